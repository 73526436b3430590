"""The vLLM rollout backend: the same protocol, over ``AsyncLLM``. Nothing here is imported unless asked for.

Reading order: ``backend.py`` (requests, pauses, updates), ``settings.py`` and ``launch.py`` (starting vLLM),
``sampling.py``, ``live.py`` and ``versions.py`` (what goes in and comes out), ``updates.py``, ``weights.py`` and
``worker.py`` (weights, and how a wrong model is refused), ``transfer.py`` (weights without files on CUDA). vLLM and
torch are imported inside functions, and in ``worker.py``, which only vLLM's own worker processes load.
"""
