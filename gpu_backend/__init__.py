"""The vLLM rollout backend: the protocol of ``rollout``, over ``AsyncLLM``.

Reading order: ``backend`` (requests, pauses, updates) · ``settings`` and ``launch`` (starting vLLM)
· ``requests`` (what goes in and comes out) · ``weight_updates``, ``weight_mapping`` and ``worker``
(new weights, and how wrong ones are refused) · ``cuda_ipc`` and ``broadcast`` (weights from the
learner's device) · ``tpu_weights``. Only a run with ``rollout.backend=vllm`` imports this package.
vLLM is imported inside functions, and in ``worker``, which only vLLM's own worker processes load;
torch there, in ``cuda_ipc`` and in ``broadcast``, which are imported where they are used.
"""
