"""Attention to the engine's KV cache: Pallas kernels on TPUs, plain JAX elsewhere.

Shapes: B slots, R rows, T chunk tokens, K key/value heads, G queries of each, h head size, S cache
positions. On a mesh each device computes its own heads.

On a TPU a decode step reads only the pages each slot uses, and a chunk's ``R H T (S + T)`` scores
stay in blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.jetstream.decode_kernel import decode_kernel, write_kernel
from jax_agent_rl.jetstream.kv_cache import LayerKV, from_cache, to_cache
from jax_agent_rl.models import tree_kernel
from jax_agent_rl.models.attention import add_sinks
from jax_agent_rl.models.sharding import by_platform
from jax_agent_rl.models.tree_kernel import MASK_VALUE, TreeMask

DEVICES = ("expert", "tensor")
"""The axes of an engine's mesh that are not 1."""

_HEADS_FIRST = PartitionSpec(DEVICES)
_HEADS_SECOND = PartitionSpec(None, DEVICES)
_REPLICATED = PartitionSpec()


def decode_attention(
    q: jax.Array,
    cached: LayerKV,
    new: tuple[jax.Array, jax.Array] | None,
    positions: jax.Array,
    pages: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    window: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, LayerKV]:
    """Write one token per slot to the cache and attend to it.

    Args:
        q: [B, K, G, h], already scaled.
        cached: B rows, finite beyond ``positions``; or pages, which TPU kernels read and write in
            place.
        new: keys and values [B, K, h] of the tokens; None if the cache has them already.
        positions: int32 [B], position of each token, which attends to the cache up to there.
        pages: int32 [B, n], pages of each slot; None if ``cached`` has rows.
        sinks: [K, G], a further score of each query head's softmax; None for none.
        window: positions a token attends to, itself included; None for all.
        mesh: the engine's mesh, if it has more than one device.

    Returns:
        [B, K, G, h], and the updated cache.
    """
    attend = plain_decode if pages is None else _decode_by_kernels
    specs = {
        "q": _HEADS_SECOND,
        "cached": _HEADS_SECOND,
        "new": _HEADS_SECOND,
        "positions": _REPLICATED,
        "pages": _REPLICATED,
        "sinks": _HEADS_FIRST,
    }
    run = on_each_device(
        functools.partial(attend, window=window),
        mesh,
        tuple(specs.values()),
        (_HEADS_SECOND, _HEADS_SECOND),
    )
    return run(q, cached, new, positions, pages, sinks)


def chunk_attention(
    q: jax.Array,
    cached: LayerKV,
    new: LayerKV,
    starts: jax.Array,
    sinks: jax.Array | None = None,
    *,
    window: int | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Attend one chunk of each of R contexts to the cache before it and to itself.

    Args:
        q: [K, G, h, R, T], already scaled.
        cached: R rows; a chunk attends to positions below its start, the others must be finite.
        new: the chunks as stored in the cache, so results do not depend on how a prompt is cut.
        starts: int32 [R], position of each chunk's first token.
        sinks: as in :func:`decode_attention`.
        window: as in :func:`decode_attention`.
        mesh: as in :func:`decode_attention`.

    Returns:
        [K, G, h, R, T].
    """
    specs = {
        "q": _HEADS_FIRST,
        "cached": _HEADS_SECOND,
        "new": _HEADS_SECOND,
        "starts": _REPLICATED,
        "sinks": _HEADS_FIRST,
    }
    attend = functools.partial(
        by_platform,
        tpu=functools.partial(chunk_by_kernel, window=window),
        default=functools.partial(_plain_chunk, window=window),
    )
    run = on_each_device(attend, mesh, tuple(specs.values()), _HEADS_FIRST)
    return run(q, cached, new, starts, sinks)


def on_each_device(
    run: Callable[..., Any], mesh: Mesh | None, specs: tuple[PartitionSpec, ...], out: Any
) -> Callable[..., Any]:
    """Run per device of a mesh, as XLA cannot split a kernel."""
    if mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def plain_decode(
    q: jax.Array,
    cached: LayerKV,
    new: tuple[jax.Array, jax.Array] | None,
    positions: jax.Array,
    pages: None,
    sinks: jax.Array | None,
    *,
    window: int | None,
) -> tuple[jax.Array, LayerKV]:
    """Write and attend as :func:`decode_attention` does, by plain operations on gathered KV."""

    def write(axis: int, old: jax.Array, token: jax.Array) -> jax.Array:
        index = (jnp.arange(len(positions)), *[slice(None)] * (axis - 1), positions)
        return old.at[index].set(jnp.squeeze(token, axis))

    if new is not None:
        cached = cached.by_position(write, one_position(new, cached))
    length = cached.values.shape[2]
    scales = cached.scales
    distance = positions[:, None] - jnp.arange(length)  # [B, S]
    visible = (distance >= 0) & (distance < (window or length))

    keys = cached.keys
    values = cached.values
    if scales is not None:
        keys = keys.astype(q.dtype)
        values = values.astype(q.dtype)
    scores = jnp.einsum("bkgh,bkhs->bkgs", q, keys, preferred_element_type=jnp.float32)
    if scales is not None:
        scores = scores * scales[:, :, :1]
    scores = jnp.where(visible[:, None, None], scores, MASK_VALUE)
    weights = _softmax(scores, None if sinks is None else sinks[..., None])
    if scales is not None:
        weights = weights * scales[:, :, 1:]
    return jnp.einsum("bkgs,bksh->bkgh", weights.astype(values.dtype), values), cached


def _decode_by_kernels(
    q: jax.Array,
    cached: LayerKV,
    new: tuple[jax.Array, jax.Array] | None,
    positions: jax.Array,
    pages: jax.Array,
    sinks: jax.Array | None,
    *,
    window: int | None,
) -> tuple[jax.Array, LayerKV]:
    if new is not None:
        cached = write_kernel(cached, one_position(new, cached), pages, positions)
    return decode_kernel(q, cached, pages, positions, sinks, window=window), cached


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Apply a softmax over the last axis of scores and a sink, whose weight is left out."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks.astype(jnp.float32)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    weights = jnp.exp(scores - peak)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - peak))


def one_position(new: tuple[jax.Array, jax.Array], cached: LayerKV) -> LayerKV:
    """Return keys and values [B, K, h] of one position per row in the cache's layout."""
    k, v = new
    return to_cache(k[..., None], v[:, :, None], cached.keys.dtype)


def _plain_chunk(
    q: jax.Array,
    cached: LayerKV,
    new: LayerKV,
    starts: jax.Array,
    sinks: jax.Array | None,
    *,
    window: int | None,
) -> jax.Array:
    visible = chunk_mask(starts, new.values.shape[2], cached.values.shape[2], window)
    keys, values = _join(cached, new, q.dtype)
    scores = jnp.einsum("kghrt,rkhs->rkgts", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, MASK_VALUE)
    weights = _softmax(scores, None if sinks is None else sinks[..., None, None])
    return jnp.einsum("rkgts,rksh->kghrt", weights.astype(values.dtype), values)


def _join(cached: LayerKV, new: LayerKV, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Return keys [R, K, h, S + T] and values [R, K, S + T, h]."""
    joined = cached.by_position(lambda axis, old, chunk: jnp.concatenate([old, chunk], axis), new)
    return from_cache(joined, dtype)


def chunk_mask(starts: jax.Array, count: int, length: int, window: int | None) -> jax.Array:
    """Return the mask of each chunk position, bool [R, 1, 1, T, length + T].

    It sees the cache below ``starts``, then the chunk up to itself.
    """
    query = starts[:, None, None] + jnp.arange(count)[:, None]  # [R, T, 1]
    rows = len(starts)
    key = jnp.broadcast_to(jnp.arange(length), (rows, 1, length))
    cache_distance = jnp.where(key < starts[:, None, None], query - key, -1)
    chunk_distance = jnp.arange(count)[:, None] - jnp.arange(count)
    chunk_distance = jnp.broadcast_to(chunk_distance, (rows, count, count))
    distance = jnp.concatenate([cache_distance, chunk_distance], axis=2)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible[:, None, None]


def chunk_tree_mask(
    starts: jax.Array, count: int, length: int, window: int | None = None
) -> TreeMask:
    """Return :func:`chunk_mask` as the mask of rows of the cache followed by the chunk.

    Cached positions below the chunk's start are ancestors of all of it, the others have no
    descendants. The chunk's ids are the queries.
    """
    rows = len(starts)
    cached_positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    cached_ends = jnp.where(cached_positions < starts[:, None], length + count, 0)
    return TreeMask(
        subtree_end=jnp.pad(cached_ends, ((0, 0), (0, count)), constant_values=length + count),
        positions=jnp.concatenate([cached_positions, starts[:, None] + jnp.arange(count)], axis=1),
        window=None if window is None else jnp.int32(window),
        offset=jnp.int32(length),
    )


def chunk_by_kernel(
    q: jax.Array,
    cached: LayerKV,
    new: LayerKV,
    starts: jax.Array,
    sinks: jax.Array | None,
    *,
    window: int | None,
) -> jax.Array:
    """Attend by the learner's kernel: to rows of the cache followed by the chunk."""
    kv_heads, group, size, rows, count = q.shape
    length = cached.values.shape[2]
    tree_mask = chunk_tree_mask(starts, count, length, window)
    queries = q.transpose(3, 0, 1, 4, 2).reshape(rows, kv_heads * group, count, size)
    keys, values = _join(cached, new, q.dtype)
    mixed, normalizer = tree_kernel.forward(queries, keys.mT, values, tree_mask)
    if sinks is not None:
        mixed, _ = add_sinks(mixed, normalizer, sinks.reshape(-1))
    return mixed.reshape(rows, kv_heads, group, count, size).transpose(1, 2, 4, 0, 3)
