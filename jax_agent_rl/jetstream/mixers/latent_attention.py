"""Latent attention in an engine, over a cache of latents (``models.mixers.latent_attention``).

A head's key is its matrix times the latent, so its score is the latent's with the query times that
matrix; and the mixture of a head's values is its other matrix times the mixture of latents
(DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1.3)::

    query ─► k_b ─► query of latents ─┐
    query ─► rotate ──────────────────┴─► scores with the cache ─► mixture of latents ─► v_b ─► o

A step then reads r + p numbers per position, whatever the number of heads. On a mesh heads are
split, and the cache is replicated.

Shapes as in ``jetstream.forward``, with r numbers of a latent, p of a rotary key, c = r + p, and n
numbers of a query and key that do not rotate.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_agent_rl.jetstream.adapted_layer import AdaptedLayer
from jax_agent_rl.jetstream.attention import (
    DEVICES,
    chunk_mask,
    chunk_tree_mask,
    on_each_device,
)
from jax_agent_rl.jetstream.decode_kernel import decode_kernel, write_kernel
from jax_agent_rl.jetstream.latent_cache import (
    LayerLatents,
    empty_latents,
    from_latents,
    to_latents,
)
from jax_agent_rl.jetstream.mixers.mixer import (
    ChunkInputs,
    DecodeInputs,
    EngineMixer,
    LayerSettings,
)
from jax_agent_rl.models import tree_kernel
from jax_agent_rl.models.config import DecoderConfig, LatentAttention
from jax_agent_rl.models.layers import rms_norm, rope_tables, rotate
from jax_agent_rl.models.sharding import by_platform, constrain
from jax_agent_rl.models.tree_kernel import MASK_VALUE
from jax_agent_rl.models.vision_context import ImageInputs

RopeTable = tuple[jax.Array, jax.Array]
"""Cos and sin [p/2, B]."""

_HEADS_FIRST = PartitionSpec(DEVICES)
_HEADS_SECOND = PartitionSpec(None, DEVICES)
_REPLICATED = PartitionSpec()


def _prepare(config: DecoderConfig, positions: jax.Array, images: ImageInputs | None) -> RopeTable:
    assert config.latent is not None
    assert images is None  # no vision model has latent attention
    cos, sin = rope_tables(config.rope, config.latent.rope_dim, positions)
    return cos.T, sin.T


def _decode(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: LayerLatents,
    inputs: DecodeInputs,
) -> tuple[jax.Array, LayerLatents]:
    latent = _latent_config(settings.config)
    queries = _queries(settings.config, layer, x, inputs.shared).transpose(2, 0, 1)  # [B, H, c]
    new = _latents(settings.config, layer, x, inputs.shared)
    token = to_latents(new.T[:, None, :, None], latent.kv_rank, cached.numbers.dtype)

    run = on_each_device(
        decode_latents if inputs.pages is None else _decode_by_kernels,
        settings.mesh,
        (_HEADS_SECOND, _REPLICATED, _REPLICATED, _REPLICATED, _REPLICATED),
        (_HEADS_SECOND, _REPLICATED),
    )
    mixed, cached = run(queries, cached, token, inputs.positions, inputs.pages)
    return _project_back(settings, layer, mixed.transpose(1, 2, 0)), cached


def _chunk(
    settings: LayerSettings,
    layer: AdaptedLayer,
    x: jax.Array,
    cached: LayerLatents,
    inputs: ChunkInputs,
) -> tuple[jax.Array, LayerLatents]:
    latent = _latent_config(settings.config)
    rows = len(inputs.starts)
    queries = _queries(settings.config, layer, x, inputs.shared)
    queries = queries.reshape(*queries.shape[:2], rows, -1)  # [H, c, R, T]
    new = _latents(settings.config, layer, x, inputs.shared)
    new = new.reshape(len(new), rows, -1).transpose(1, 0, 2)[:, None]  # [R, 1, c, T]
    chunk = to_latents(new, latent.kv_rank, cached.numbers.dtype)

    attend = on_each_device(
        functools.partial(by_platform, tpu=chunk_by_kernel, default=plain_chunk),
        settings.mesh,
        (_HEADS_FIRST, _REPLICATED, _REPLICATED, _REPLICATED),
        _HEADS_FIRST,
    )
    mixed = attend(queries, cached, chunk, inputs.starts)  # [H, r, R, T]
    mixed = mixed.reshape(*mixed.shape[:2], x.shape[1])
    return _project_back(settings, layer, mixed), chunk


def _latent_config(config: DecoderConfig) -> LatentAttention:
    assert config.latent is not None
    return config.latent


def _queries(
    config: DecoderConfig, layer: AdaptedLayer, x: jax.Array, rope_table: RopeTable
) -> jax.Array:
    """Return scaled queries of latents and rotary keys [H, c, B] of x [D, B]."""
    latent = _latent_config(config)
    if latent.q_rank is None:
        queries = layer.multiply(config, "qkv", x, config.mixer_norm)  # there are no k, v
    else:
        q_latent = layer.multiply(config, "q_a", x, config.mixer_norm)
        q_latent = _norm(config, layer, "q_a_norm", q_latent)
        queries = layer.multiply(config, "q_b", q_latent)
    queries = queries.reshape(config.num_heads, latent.head_dim, -1)

    content, rotary = jnp.split(queries, [latent.nope_dim], axis=1)
    content = layer.multiply_heads("k_b", content)
    rotary = rotate(config.rope, rotary, *rope_table, axis=1)
    return jnp.concatenate([content, rotary], axis=1) * config.score_scale


def _latents(
    config: DecoderConfig, layer: AdaptedLayer, x: jax.Array, rope_table: RopeTable
) -> jax.Array:
    """Return what is cached [c, B] of x [D, B]."""
    latents = layer.multiply(config, "kv_a", x, config.mixer_norm)
    latent, rotary_key = jnp.split(latents, [_latent_config(config).kv_rank], axis=0)
    latent = _norm(config, layer, "kv_a_norm", latent)
    rotary_key = rotate(config.rope, rotary_key, *rope_table, axis=0)
    return jnp.concatenate([latent, rotary_key], axis=0)


def _norm(config: DecoderConfig, layer: AdaptedLayer, name: str, x: jax.Array) -> jax.Array:
    """Apply the RMS norm of latents [r, B]."""
    return rms_norm(config, x, layer.params[name], axis=0, eps=LatentAttention.norm_eps)


def _project_back(settings: LayerSettings, layer: AdaptedLayer, mixed: jax.Array) -> jax.Array:
    """Return the output [D, B] of the heads' mixtures of latents [H, r, B]."""
    values = layer.multiply_heads("v_b", mixed)
    values = values.reshape(-1, values.shape[-1])
    return constrain(layer.multiply(settings.config, "o", values), settings.mesh)


def decode_latents(
    q: jax.Array,
    cached: LayerLatents,
    new: LayerLatents,
    positions: jax.Array,
    pages: None = None,
) -> tuple[jax.Array, LayerLatents]:
    """Write one token per slot to the cache and attend to it.

    Args:
        q: [B, H, c], already scaled.
        cached: B rows, finite beyond ``positions``.
        new: the tokens, B rows of one position.
        positions: int32 [B], position of each token, which attends to the cache up to there.
        pages: None, as the cache has rows.

    Returns:
        Mixtures of latents [B, H, r], and the updated cache.
    """

    def write(_: int, old: jax.Array, token: jax.Array) -> jax.Array:
        return old.at[jnp.arange(len(positions)), :, :, positions].set(token[..., 0])

    rank = cached.value_size
    cached = cached.by_position(write, new)
    numbers = cached.numbers[:, 0].astype(q.dtype)
    latents = numbers[:, :rank]
    scores = jnp.einsum("bhc,bcs->bhs", q[..., :rank], latents, preferred_element_type=jnp.float32)
    rotary_scores = jnp.einsum(
        "bhc,bcs->bhs", q[..., rank:], numbers[:, rank:], preferred_element_type=jnp.float32
    )
    # Scores and weights are scaled in place of the cache: it is read in its own precision.
    if cached.scales is not None:
        scores = scores * cached.scales[:, :, 0]
        rotary_scores = rotary_scores * cached.scales[:, :, 1]
    scores = scores + rotary_scores

    visible = positions[:, None] >= jnp.arange(cached.length)  # [B, S]
    scores = jnp.where(visible[:, None], scores, MASK_VALUE)
    weights = jax.nn.softmax(scores, axis=-1)
    if cached.scales is not None:
        weights = weights * cached.scales[:, :, 0]
    return jnp.einsum("bhs,brs->bhr", weights.astype(q.dtype), latents), cached


def _decode_by_kernels(
    q: jax.Array,
    cached: LayerLatents,
    new: LayerLatents,
    positions: jax.Array,
    pages: jax.Array,
) -> tuple[jax.Array, LayerLatents]:
    """Do as :func:`decode_latents` in pages int32 [B, n] of each slot, in place."""
    cached = write_kernel(cached, new, pages, positions)
    return decode_kernel(q[:, None], cached, pages, positions)[:, 0], cached


def plain_chunk(
    q: jax.Array, cached: LayerLatents, new: LayerLatents, starts: jax.Array
) -> jax.Array:
    """Attend one chunk of each of R contexts to the cache before it and to itself.

    Args:
        q: [H, c, R, T], already scaled.
        cached: R rows; a chunk attends to positions below its start, the others must be finite.
        new: the chunks as stored in the cache.
        starts: int32 [R], position of each chunk's first token.

    Returns:
        Mixtures of latents [H, r, R, T].
    """
    visible = chunk_mask(starts, new.length, cached.length, None)[:, 0]  # [R, 1, T, S + T]
    numbers = _join(cached, new, q.dtype)
    scores = jnp.einsum("hcrt,rcs->rhts", q, numbers, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, MASK_VALUE)
    weights = jax.nn.softmax(scores, axis=-1).astype(numbers.dtype)
    return jnp.einsum("rhts,rcs->hcrt", weights, numbers[:, : cached.value_size])


def chunk_by_kernel(
    q: jax.Array, cached: LayerLatents, new: LayerLatents, starts: jax.Array
) -> jax.Array:
    """Attend as :func:`plain_chunk`, by the learner's kernel: latents are one key/value head."""
    tree_mask = chunk_tree_mask(starts, new.length, cached.length)
    numbers = _join(cached, new, q.dtype).mT[:, None]  # [R, 1, S + T, c]
    queries = q.transpose(2, 0, 3, 1)
    latents = numbers[..., : cached.value_size]
    mixed, _ = tree_kernel.forward(queries, numbers, latents, tree_mask)
    return mixed.transpose(1, 3, 0, 2)


def _join(cached: LayerLatents, new: LayerLatents, dtype: jnp.dtype) -> jax.Array:
    """Return latents and rotary keys [R, c, S + T]."""
    joined = cached.by_position(lambda axis, old, chunk: jnp.concatenate([old, chunk], axis), new)
    return from_latents(joined, dtype)[:, 0]


def _cache_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of latents, which all heads share: replicated."""
    return NamedSharding(mesh, PartitionSpec())


LATENT_ATTENTION = EngineMixer(
    prepare=_prepare,
    decode=_decode,
    chunk=_chunk,
    empty_cache=empty_latents,
    cache_sharding=_cache_sharding,
)
