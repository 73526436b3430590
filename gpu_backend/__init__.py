"""The vLLM rollout backend: the protocol of ``rollout``, over ``AsyncLLM``.

Reading order: ``backend`` (requests, pauses, updates) · ``settings`` and ``launch`` (starting vLLM)
· ``requests`` (what goes in and comes out) · ``weight_updates``, ``weight_mapping`` and ``worker``
(new weights, and how wrong ones are refused) · ``broadcast`` (weights for other hosts). Only a run
with ``rollout.backend=vllm`` imports this package. vLLM and torch are imported inside functions,
and in ``worker``, which only vLLM's own worker processes load.
"""
