"""Model families in Flax, and their files.

``config`` and ``families`` hyperparameters and Hugging Face's ``config.json`` · ``decoder``,
``layers``, ``attention``, ``moe`` the forward pass over packed token trees · ``tree_kernel`` their
masks and TPU kernels · ``delta_net``, ``delta_tree``, ``delta_kernel`` layers with a state in place
of keys and values · ``image_processor`` pixels to patches · ``vision_context`` where images
stand in a sequence · ``vision_tower`` patches to features · ``sharding`` devices · ``lora``
adapters · ``hf``, ``tensors``, ``stored``, ``convert`` files.
"""
