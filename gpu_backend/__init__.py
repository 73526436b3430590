"""The vLLM rollout backend: the same protocol, over ``AsyncLLM``. Nothing here is imported unless asked for.

Reading order: ``backend`` (requests, pauses, updates) · ``settings`` and ``launch`` (starting vLLM)
· ``requests`` (what goes in and comes out) · ``updates``, ``weights`` and ``worker`` (new weights,
and how wrong ones are refused) · ``broadcast`` (weights for other hosts). vLLM and torch are
imported inside functions, and in ``worker``, which only vLLM's own worker processes load.
"""
