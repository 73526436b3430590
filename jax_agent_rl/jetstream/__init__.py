"""The JAX engine: continuous batching over a paged KV cache, behind the rollout protocol.

Reading order, with vLLM's names where they differ: ``backend`` (AsyncLLM) → ``engine_core`` (the
thread that runs the engine) → ``scheduler``, ``request`` and ``admission`` (which requests run) →
``block_manager`` (which pages hold what; KVCacheManager) → ``engine`` (GPUModelRunner) →
``programs`` and ``forward`` (what runs on the device).

Speculative decoding: ``speculation`` (what is drafted and verified), ``verification`` (its
programs).

Device side: ``attention``, ``decode_kernel``, ``cpu``, ``kv_cache``, ``sampling``,
``decode_batch``, ``shapes``, ``sharding`` · weights: ``weights``, ``adapters`` · images:
``vision_engine`` · bitwise reproducible log-probs: ``deterministic`` · scoring and diagnosis:
``inspection`` · JetStream's interface: ``driver_interface`` · engines of users:
``external_engine``.
"""
