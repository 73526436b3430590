"""Attention with key/value heads in an engine, over a cache of keys and values.

Shapes as in ``jetstream.forward``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.jetstream.adapted_layer import AdaptedLayer
from jax_agent_rl.jetstream.attention import DEVICES, chunk_attention, decode_attention
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.jetstream.kv_cache import LayerKV, empty_kv, to_cache
from jax_agent_rl.jetstream.mixers.mixer import (
    ChunkInputs,
    DecodeInputs,
    EngineMixer,
    LayerSettings,
)
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import mrope_tables, rms_norm, rope_tables, rotate
from jax_agent_rl.models.sharding import constrain
from jax_agent_rl.models.vision_context import ImageInputs

RopeTables = tuple[tuple[jax.Array, jax.Array], ...]
"""Cos and sin [r/2, B] of full layers, and of windowed ones, if r of a head's numbers rotate."""


def _prepare(config: DecoderConfig, positions: jax.Array, images: ImageInputs | None) -> RopeTables:
    if images is not None:  # no vision model has windowed layers
        cos, sin = mrope_tables(config.rope, config.head_dim, images.rope_positions.reshape(-1, 3))
        return ((cos.T, sin.T),)

    tables = []
    for rope in (config.rope, config.local_rope or config.rope):
        cos, sin = rope_tables(rope, config.head_dim, positions)
        tables.append((cos.T, sin.T))
    return tuple(tables)


def _decode(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: LayerKV,
    inputs: DecodeInputs,
) -> tuple[jax.Array, LayerKV]:
    config = settings.config
    positions = inputs.positions
    pages = inputs.pages
    rope_table = inputs.shared[settings.windowed]
    sinks = layer.params.get("sinks")
    if layer.native:
        assert pages is not None  # these kernels read no rows
        qkv = _project(config, layer, x)
        mixed, cached = cpu_kernels.decode_attention(
            config, qkv, cached, positions, pages, rope_table, sinks, windowed=settings.windowed
        )
        mixed = mixed.reshape(-1, x.shape[1])
    else:
        q, k, v = _split_and_rotate(config, _project(config, layer, x), *rope_table)
        q = q.transpose(3, 0, 1, 2)
        new = (k.transpose(2, 0, 1), v.transpose(2, 0, 1))
        mixed, cached = decode_attention(
            q, cached, new, positions, pages, sinks, window=_window(settings), mesh=settings.mesh
        )
        mixed = mixed.reshape(len(positions), -1).T
    return _project_back(settings, layer, mixed), cached


def _chunk(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: LayerKV,
    inputs: ChunkInputs,
) -> tuple[jax.Array, LayerKV]:
    rows = len(inputs.starts)
    rope_table = inputs.shared[settings.windowed]
    sinks = layer.params.get("sinks")
    qkv = _project(settings.config, layer, x)
    q, k, v = _split_and_rotate(settings.config, qkv, *rope_table)
    q, k, v = (y.reshape(*y.shape[:-1], rows, -1) for y in (q, k, v))
    chunk = to_cache(k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1), cached.keys.dtype)
    mixed = chunk_attention(
        q, cached, chunk, inputs.starts, sinks, window=_window(settings), mesh=settings.mesh
    )
    return _project_back(settings, layer, mixed.reshape(-1, x.shape[1])), chunk


def _window(settings: LayerSettings) -> int | None:
    return settings.config.sliding_window if settings.windowed else None


def _project(config: DecoderConfig, layer: AdaptedLayer, x: jax.Array) -> jax.Array:
    """Return queries, keys and values [K, G + 2, h, B] of x [D, B], not rotated."""
    qkv = layer.multiply(config, "qkv", x, "input_norm")
    if config.qkv_bias:
        qkv = qkv + layer.params["qkv_bias"][..., None]
    qkv = qkv.reshape(config.num_kv_heads, -1, config.head_dim, x.shape[1])
    if not config.qk_norm:
        return qkv
    q = _norm(config, qkv[:, :-2], layer.params["q_norm"])
    k = _norm(config, qkv[:, -2:-1], layer.params["k_norm"])
    return jnp.concatenate([q, k, qkv[:, -1:]], axis=1)


def _norm(config: DecoderConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Apply the norm of queries or keys [K, n, h, B]."""
    if config.qk_norm_over == "head":
        return rms_norm(config, x, weight, axis=2)
    heads = x.reshape(-1, x.shape[-1])
    return rms_norm(config, heads, weight, axis=0).reshape(x.shape)


def _split_and_rotate(
    config: DecoderConfig, qkv: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotated, scaled queries [K, G, h, B] and rotated keys and values [K, h, B].

    ``cos`` and ``sin`` are [r/2, B].
    """
    q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    q = rotate(config.rope, q, cos, sin, axis=2)
    k = rotate(config.rope, k, cos, sin, axis=1)
    return q * config.score_scale, k, v


def _project_back(settings: LayerSettings, layer: AdaptedLayer, mixed: jax.Array) -> jax.Array:
    """Return the output [D, B] of the heads' mixture [H h, B]."""
    out = constrain(layer.multiply(settings.config, "o", mixed), settings.mesh)
    if settings.config.o_bias:
        out = out + layer.params["o_bias"][:, None]
    return out


def _cache_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of keys, values and their scales [P, K, …]: split by head."""
    return NamedSharding(mesh, PartitionSpec(None, DEVICES))


ATTENTION = EngineMixer(
    prepare=_prepare,
    decode=_decode,
    chunk=_chunk,
    empty_cache=empty_kv,
    cache_sharding=_cache_sharding,
)
