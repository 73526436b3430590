"""Attention with key/value heads in an engine, over a cache of keys and values.

Shapes as in ``jetstream.forward``.
"""

from __future__ import annotations

import functools

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
from jax_agent_rl.models.layer_kinds import MixerName
from jax_agent_rl.models.layers import mrope_tables, rms_norm, rope_tables, rotate
from jax_agent_rl.models.sharding import constrain
from jax_agent_rl.models.vision_context import ImageInputs

RopeTables = tuple[tuple[jax.Array, jax.Array], ...]
"""Cos and sin [r/2, B] of full layers, and of windowed ones, if r of a head's numbers rotate."""


def _prepare(
    mixer: MixerName, config: DecoderConfig, positions: jax.Array, images: ImageInputs | None
) -> RopeTables:
    head_dim = config.heads(mixer).head_dim
    if images is not None:  # no vision model has windowed layers
        cos, sin = mrope_tables(config.rope, head_dim, images.rope_positions.reshape(-1, 3))
        return ((cos.T, sin.T),)

    tables = []
    for rope in (config.rope, config.local_rope or config.rope):
        cos, sin = rope_tables(rope, head_dim, positions)
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
    heads, gate = _project(settings, layer, x)

    # CPU kernels rotate, write to the pages and attend in one call.
    if layer.native:
        assert pages is not None  # these kernels read no rows
        arguments = (config, heads, cached, positions, pages, rope_table, sinks)
        if settings.kind.keys == "shared":
            mixed = cpu_kernels.read_attention(*arguments, windowed=settings.windowed)
        else:
            mixed, cached = cpu_kernels.decode_attention(*arguments, windowed=settings.windowed)
        mixed = mixed.reshape(-1, x.shape[1])
        return _project_back(settings, layer, mixed, gate), cached

    q, kv = _split_and_rotate(settings, heads, *rope_table)
    new = None
    if kv is not None:  # else the tokens are in the cache already, of the layer that it shares
        k, v = kv
        new = (k.transpose(2, 0, 1), v.transpose(2, 0, 1))
    mixed, cached = decode_attention(
        q.transpose(3, 0, 1, 2),
        cached,
        new,
        positions,
        pages,
        sinks,
        window=_window(settings),
        mesh=settings.mesh,
    )
    return _project_back(settings, layer, mixed.reshape(len(positions), -1).T, gate), cached


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
    heads, gate = _project(settings, layer, x)
    q, kv = _split_and_rotate(settings, heads, *rope_table)

    q = q.reshape(*q.shape[:-1], rows, -1)
    if kv is None:
        chunk = inputs.source_chunk
        assert chunk is not None
    else:
        k, v = (y.reshape(*y.shape[:-1], rows, -1) for y in kv)
        chunk = to_cache(k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1), cached.keys.dtype)

    mixed = chunk_attention(
        q, cached, chunk, inputs.starts, sinks, window=_window(settings), mesh=settings.mesh
    )
    return _project_back(settings, layer, mixed.reshape(-1, x.shape[1]), gate), chunk


def _window(settings: LayerSettings) -> int | None:
    return settings.config.sliding_window if settings.windowed else None


def _project(
    settings: LayerSettings, layer: AdaptedLayer, x: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Project x [D, B].

    Returns:
        Queries, keys and values [K, G + 2, h, B], not rotated, of which layers that share another
        layer's keys and values have queries alone, [K, G, h, B]; and the gates of what heads mix,
        [H h, B], if the model has any.
    """
    config = settings.config
    heads = config.heads(settings.kind.mixer)
    qkv = layer.multiply(config, f"{heads.prefix}qkv", x, config.mixer_norm)
    if config.qkv_bias:
        qkv = qkv + layer.params["qkv_bias"][..., None]
    qkv = qkv.reshape(heads.num_kv_heads, -1, heads.head_dim, x.shape[1])

    group = config.num_heads // heads.num_kv_heads
    gate = None
    if config.attention_gate:  # each query is followed by its gate
        queries = qkv[:, : 2 * group]
        gate = queries[:, 1::2].reshape(-1, x.shape[1])
        qkv = jnp.concatenate([queries[:, ::2], qkv[:, 2 * group :]], axis=1)

    q = qkv[:, :group]
    if settings.kind.keys == "shared":
        return _head_norm(settings, layer, q, "q_norm"), gate
    if not config.qk_norm and not config.v_norm and not heads.keys_as_values:
        return qkv, gate
    k = qkv[:, group : group + 1]
    v = qkv[:, -1:]  # the keys, if there are no values
    if config.v_norm:
        v = rms_norm(config, v, jnp.ones(heads.head_dim, v.dtype), axis=2)
    q = _head_norm(settings, layer, q, "q_norm")
    k = _head_norm(settings, layer, k, "k_norm")
    return jnp.concatenate([q, k, v], axis=1), gate


def _head_norm(settings: LayerSettings, layer: AdaptedLayer, x: jax.Array, name: str) -> jax.Array:
    """Apply the norm of heads [K, n, h, B], if there is one."""
    config = settings.config
    if not config.qk_norm:
        return x
    prefix = config.heads(settings.kind.mixer).prefix
    return _norm(config, x, layer.params[prefix + name])


def _norm(config: DecoderConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Apply the norm of queries or keys [K, n, h, B]."""
    if config.qk_norm_over == "head":
        return rms_norm(config, x, weight, axis=2)
    heads = x.reshape(-1, x.shape[-1])
    return rms_norm(config, heads, weight, axis=0).reshape(x.shape)


def _split_and_rotate(
    settings: LayerSettings, heads: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Split what :func:`_project` returned; ``cos`` and ``sin`` are [r/2, B].

    Returns:
        Rotated, scaled queries [K, G, h, B], and rotated keys and values [K, h, B], or None if the
        layer shares another's.
    """
    config = settings.config
    if settings.kind.keys == "shared":
        return rotate(config.rope, heads, cos, sin, axis=2) * config.score_scale, None
    q = rotate(config.rope, heads[:, :-2], cos, sin, axis=2)
    k = rotate(config.rope, heads[:, -2], cos, sin, axis=1)
    v = heads[:, -1]
    return q * config.score_scale, (k, v)


def _project_back(
    settings: LayerSettings, layer: AdaptedLayer, mixed: jax.Array, gate: jax.Array | None
) -> jax.Array:
    """Return the output [D, B] of the heads' mixture and perhaps their gates [H h, B]."""
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    prefix = settings.config.heads(settings.kind.mixer).prefix
    out = constrain(layer.multiply(settings.config, f"{prefix}o", mixed), settings.mesh)
    if settings.config.o_bias:
        out = out + layer.params["o_bias"][:, None]
    return out


def _cache_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of keys, values and their scales [P, K, …]: split by head."""
    return NamedSharding(mesh, PartitionSpec(None, DEVICES))


def _mixer(name: MixerName) -> EngineMixer:
    return EngineMixer(
        prepare=functools.partial(_prepare, name),
        decode=_decode,
        chunk=_chunk,
        empty_cache=empty_kv,
        cache_sharding=_cache_sharding,
    )


ATTENTION = _mixer("attention")
GLOBAL_ATTENTION = _mixer("global_attention")
