"""The JAX engine: continuous batching over a paged KV cache, behind the rollout protocol.

Reading order: ``backend`` (the protocol) → ``thread`` and ``engine_loop`` (one thread runs the engine) → ``scheduler``
and ``request`` (who gets a slot) → ``block_manager`` (who gets pages) → ``engine`` → ``programs`` and ``forward`` (what
runs on the device).

Device side: ``attention``, ``decode_kernel``, ``page_ops``, ``kv``, ``sampling``, ``decode_batch``, ``shapes``,
``layout`` · weights: ``weights``, ``weight_loading``, ``adapters`` · images: ``vision_engine`` · bitwise reproducible
log-probs: ``deterministic`` · diagnosis: ``inspection`` · JetStream's own interface: ``driver_interface``, ``compat`` ·
engines of users: ``external_engine``, ``external_scheduler``.
"""
