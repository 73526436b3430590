"""Model families in Flax, and their files.

``config`` and ``families`` hyperparameters and Hugging Face's ``config.json`` · ``decoder``, ``layers``, ``attention``,
``moe`` the forward pass over packed token trees · ``tree_kernel`` their masks and TPU kernels · ``vision`` Qwen-VL's
towers · ``sharding`` devices · ``lora`` adapters · ``hf``, ``tensors``, ``stored``, ``convert`` files.
"""
