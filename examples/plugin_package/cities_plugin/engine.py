"""A rollout backend: the JAX engine on one device, with shapes of this package's choice.

An engine of your own implements ``jax_agent_rl.rollout.protocol.RolloutBackend``; a run gives it
its first weights as a folder, and later ones as safetensors files.
"""

from __future__ import annotations

from jax_agent_rl.config import EngineMeshConfig
from jax_agent_rl.jetstream import data_parallel
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rollout.protocol import BackendSpec, RolloutBackend


def make_backend(spec: BackendSpec) -> RolloutBackend:
    """Return the engine, not yet started."""
    model, params = load_hf(spec.model)
    slots = min(spec.max_concurrent, 8)
    shapes = EngineShapes(
        max_model_len=spec.max_model_len,
        max_concurrent_decodes=slots,
        kv_cache_tokens=2 * slots * spec.max_model_len,
        decode_steps=4,
        prefill_buckets=(32, 128),
    )
    return data_parallel.make_backend(
        model,
        params,
        shapes,
        mesh=make_engine_mesh(EngineMeshConfig()),
        version=spec.version,
        seed=spec.seed,
        decode_text=spec.decode_text,
    )
