"""Attention over packed token trees, block by block, with its own backward pass.

Shapes: B rows, T tokens, H query heads, K key/value heads, G = H / K, h head size. Scores exist for one block of
queries at a time and are recomputed in the backward pass (Dao et al. 2022, FlashAttention, arXiv 2205.14135), so memory
grows with T, not T², and a block's scores stay in cache. Blocks see no key to their right, which halves the work.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # masks a score; finite, so that a row of padding stays free of NaN
BLOCK = 128


class Sight(NamedTuple):
    """Which tokens a token sees: i sees j iff ``j <= i < subtree_end[j]`` and j is within the window.

    Attributes:
        subtree_end: int32 [B, T].
        positions: int32 [B, T], depth of each token in its tree; needed for a window.
        window: int32 []: ``positions[i] - positions[j] < window``; None for no window.
    """

    subtree_end: jax.Array
    positions: jax.Array | None = None
    window: jax.Array | None = None


@jax.custom_vjp
def tree_attention(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> jax.Array:
    """Dot-product attention over trees.

    Args:
        q: [B, H, T, h], already scaled; heads of one key/value head are adjacent.
        k, v: [B, K, T, h].

    Returns:
        [B, H, T, h].
    """
    return _forward(q, k, v, sight)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> tuple[jax.Array, list[jax.Array]]:
    """The output, and the log of each block's softmax normalizer [B, K, G·block, 1]."""
    outputs, normalizers = [], []
    for begin, end in _blocks(q.shape[2]):
        queries = _fold(q[:, :, begin:end], k.shape[1])
        scores = _scores(queries, k[:, :, :end], sight, begin)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("bkms,bksh->bkmh", weights.astype(v.dtype), v[:, :, :end]) / total.astype(v.dtype)
        outputs.append(_unfold(mixed, q.shape[1]))
        normalizers.append(peak + jnp.log(total))
    return jnp.concatenate(outputs, axis=2), normalizers


def _save(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> tuple[jax.Array, tuple]:
    output, normalizers = _forward(q, k, v, sight)
    return output, (q, k, v, sight, output, normalizers)


def _backward(saved: tuple, d_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, sight, output, normalizers = saved
    kv_heads = k.shape[1]
    dq = []
    dk, dv = jnp.zeros_like(k), jnp.zeros_like(v)
    for (begin, end), normalizer in zip(_blocks(q.shape[2]), normalizers, strict=True):
        queries = _fold(q[:, :, begin:end], kv_heads)
        d_out = _fold(d_output[:, :, begin:end], kv_heads)
        out = _fold(output[:, :, begin:end], kv_heads)
        weights = jnp.exp(_scores(queries, k[:, :, :end], sight, begin) - normalizer)
        d_weights = jnp.einsum("bkmh,bksh->bkms", d_out, v[:, :, :end], preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights - jnp.sum(d_out * out, axis=-1, keepdims=True, dtype=jnp.float32))
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        dq.append(_unfold(jnp.einsum("bkms,bksh->bkmh", d_scores, k[:, :, :end]), q.shape[1]))
        # Written with the long axis last on both sides: CPUs run this product half again as fast.
        dk = dk.at[:, :, :end].add(jnp.einsum("bkhm,bkms->bkhs", queries.mT, d_scores).mT)
        dv = dv.at[:, :, :end].add(jnp.einsum("bkhm,bkms->bkhs", d_out.mT, weights).mT)
    return jnp.concatenate(dq, axis=2), dk, dv, None


tree_attention.defvjp(_save, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK)]


def _scores(queries: jax.Array, keys: jax.Array, sight: Sight, begin: int) -> jax.Array:
    """Masked scores float32 [B, K, G·block, S] of a block of folded queries that starts at ``begin``."""
    batch, kv_heads, folded, _ = queries.shape
    length = keys.shape[2]
    block = length - begin
    bias = jnp.where(_visible(sight, begin, length), 0.0, NEGATIVE)[:, None, None]
    scores = jnp.einsum("bkmh,bksh->bkms", queries, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, folded // block, block, length) + bias
    return scores.reshape(batch, kv_heads, folded, length)


def _visible(sight: Sight, begin: int, end: int) -> jax.Array:
    """bool [B, end - begin, end]: which keys the queries from ``begin`` on see."""
    index = jnp.arange(begin, end)[:, None]
    visible = (jnp.arange(end) <= index) & (index < sight.subtree_end[:, None, :end])
    if sight.window is None or sight.positions is None:
        return visible
    distance = sight.positions[:, begin:end, None] - sight.positions[:, None, :end]
    return visible & (distance < sight.window)


def _fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, H, n, h] -> [B, K, G·n, h]: one product per key/value head instead of one per query head."""
    batch, _, _, size = x.shape
    return x.reshape(batch, kv_heads, -1, size)


def _unfold(x: jax.Array, heads: int) -> jax.Array:
    """[B, K, G·n, h] -> [B, H, n, h]"""
    batch, _, _, size = x.shape
    return x.reshape(batch, heads, -1, size)
