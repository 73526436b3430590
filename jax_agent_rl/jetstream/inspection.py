"""Diagnosis of a running engine: samples of its weights by published name, and its layers' outputs.

Nothing here changes the engine, and its programs stay out of the engine's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.forward import EngineParams, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import KVCache, LayerKV, empty_cache, from_cache
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.hf import tensor_names
from jax_agent_rl.models.layers import embed
from jax_agent_rl.models.quantized import Quantized
from jax_agent_rl.models.tensor_files import named_tensors
from jax_agent_rl.models.tensor_samples import LayerOutput, TensorSample


def tensor_samples(model: DecoderConfig, scheduler: Scheduler) -> Mapping[str, TensorSample]:
    """Sample every tensor of the decoder; empty for external engines.

    Args:
        model: with the learner's number of key/value heads.
        scheduler: holds the weights.
    """
    params = scheduler.params
    if not isinstance(params, EngineParams):
        return {}
    names = tensor_names(model)
    top = {"embed": params.embed, "final_norm": params.final_norm, "lm_head": params.head}
    samples = {names[key]: TensorSample.of(np.asarray(x)) for key, x in top.items() if key in names and x is not None}
    for i, layer in enumerate(params.layers):
        own = [(names["layers"][key][i], array) for key, array in _split(model, layer).items()]
        samples |= {name: TensorSample.of(array) for name, array in named_tensors(own)}
    return samples


def layer_outputs(scheduler: Scheduler, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
    """Return the layers' outputs for a context prefilled in one chunk; empty for external engines."""
    params, engine = scheduler.params, scheduler.engine
    if not isinstance(params, EngineParams) or isinstance(params.embed, np.ndarray):  # asleep
        return []
    config, mesh = engine.config, engine.split
    ids = jnp.asarray(token_ids, jnp.int32)

    @jax.jit
    def run(params: EngineParams) -> tuple[jax.Array, list[tuple[jax.Array, LayerKV, jax.Array | None]]]:
        # An empty page: all of the context is in the chunk.
        cache: KVCache = empty_cache(config, 1, engine.shapes.page, engine.kv_dtype)
        layers = prefill_chunks(config, params, cache, ids[None], jnp.zeros(1, jnp.int32), mesh=mesh)
        return embed(config, params.embed, ids), layers

    embedded, layers = jax.device_get(run(params))
    outputs = [LayerOutput(hidden=np.asarray(embedded, np.float32))]
    for hidden, kept, _ in layers:
        keys, values = from_cache(kept, jnp.dtype(jnp.float32))
        outputs.append(
            LayerOutput(
                hidden=np.asarray(hidden, np.float32).T,
                keys=np.asarray(keys, np.float32)[0].transpose(2, 0, 1),
                values=np.asarray(values, np.float32)[0].transpose(1, 0, 2),
            )
        )
    return outputs


def _split(model: DecoderConfig, layer: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Undo the engine's fusion and repetition: return a layer's arrays in the learner's layout, on the host."""
    arrays = {
        name: np.asarray(x.numbers, np.float32) * np.asarray(x.scale, np.float32)
        if isinstance(x, Quantized)
        else np.asarray(x)
        for name, x in layer.items()
    }
    for fused, parts in (("qkv", ("q", "k", "v")), ("qkv_bias", ("q_bias", "k_bias", "v_bias"))):
        if fused in arrays:
            by_head = arrays.pop(fused)  # [K, (G + 2) h, ...]
            repeats, size = len(by_head) // model.num_kv_heads, model.head_dim
            queries, keys, values = np.split(by_head, [by_head.shape[1] - 2 * size, by_head.shape[1] - size], axis=1)
            for name, x in zip(parts, (queries, keys[::repeats], values[::repeats]), strict=True):
                arrays[name] = x.reshape(-1, *x.shape[2:])
    if "sinks" in arrays:
        arrays["sinks"] = arrays["sinks"].reshape(-1)
    if "gate_up" in arrays:
        arrays["gate"], arrays["up"] = arrays.pop("gate_up")
    return arrays
