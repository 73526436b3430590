"""The JAX engine: continuous batching over a paged KV cache, behind the rollout protocol.

Reading order, with vLLM's names where they differ: ``backend`` (AsyncLLM) → ``engine_core`` (the
thread that runs the engine) → ``scheduler``, ``request`` and ``admission`` (which requests run) →
``block_manager`` (which pages hold what; KVCacheManager) → ``engine`` (GPUModelRunner) and its
parts ``prefill``, ``slot_decoder`` and ``verification`` → ``programs`` and ``forward`` (what runs
on the device).

Device side: ``context``, ``attention``, ``decode_kernel``, ``cpu``, ``kv_cache``, ``host_cache``,
``sampling``, ``decode_batch``, ``shapes``, ``sharding`` · weights: ``weights``, ``adapters`` ·
speculative decoding: ``speculation``, ``drafting`` · images: ``images`` · several engines of a
process: ``data_parallel``, ``replica`` · bitwise reproducible log-probs: ``deterministic``,
``deterministic_scorer`` · scoring and diagnosis: ``inspection`` · JetStream's interface:
``driver_interface`` · engines of users: ``external_engine``.
"""
