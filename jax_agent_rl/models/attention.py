"""Attention over packed token trees, block by block, with its own backward pass.

Shapes: B rows, T tokens, H query heads, K key/value heads, G = H / K, h head size. Scores exist for one block of
queries at a time and are recomputed in the backward pass (Dao et al. 2022, FlashAttention, arXiv 2205.14135), so memory
grows with T, not T², and a block's scores stay in cache. Blocks see no key to their right, which halves the work.

Where the mesh axis ``context`` splits the tokens of a row, each shard gathers the keys and values of the whole row and
attends with its own queries (as Llama 3 was trained: Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2). A tree
mask needs no more than where those queries stand. Per layer that takes ``2 B K T h`` numbers of a shard, which is small
beside activations: K is far below H, and all else stays split. A ring would hold less and wait at each of its hops.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models.mesh import ROWS

NEGATIVE = -1e30  # masks a score; finite, so that a row of padding stays free of NaN
BLOCK = 128


class Sight(NamedTuple):
    """Which tokens a token sees: i sees j iff ``j <= i < subtree_end[j]`` and j is within the window.

    Attributes:
        subtree_end: int32 [B, T].
        positions: int32 [B, T], depth of each token in its tree; needed for a window.
        window: int32 []: ``positions[i] - positions[j] < window``; None for no window.
        offset: int32 []: where in the row the first query stands; None where all tokens of the row are queries.
    """

    subtree_end: jax.Array
    positions: jax.Array | None = None
    window: jax.Array | None = None
    offset: jax.Array | None = None


def sharded_tree_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, mesh: Mesh | None = None
) -> jax.Array:
    """:func:`tree_attention` whose tokens may be split over the mesh axis ``context``."""
    if mesh is None or mesh.shape["context"] == 1:
        return tree_attention(q, k, v, sight)

    def shard(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> jax.Array:
        keys, values = (jax.lax.all_gather(x, "context", axis=2, tiled=True) for x in (k, v))
        offset = jax.lax.axis_index("context") * q.shape[2]
        return tree_attention(q, keys, values, sight._replace(offset=offset))

    # Key/value heads that do not divide are computed by every shard of the axis.
    heads = "tensor" if k.shape[1] % mesh.shape["tensor"] == 0 else None
    split, whole = PartitionSpec(ROWS, heads, "context"), PartitionSpec(ROWS)
    sights = jax.tree.map(lambda x: whole if x.ndim else PartitionSpec(), sight)
    run = jax.shard_map(shard, mesh=mesh, in_specs=(split, split, split, sights), out_specs=split, check_vma=False)
    return run(q, k, v, sight)


@jax.custom_vjp
def tree_attention(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> jax.Array:
    """Dot-product attention over trees.

    Args:
        q: [B, H, Q, h], already scaled; heads of one key/value head are adjacent. Q is T without a ``sight.offset``.
        k, v: [B, K, T, h].

    Returns:
        [B, H, Q, h].
    """
    return _forward(q, k, v, sight)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight) -> tuple[jax.Array, list[jax.Array]]:
    """The output, and the log of each block's softmax normalizer [B, K, G·block, 1]."""
    outputs, normalizers = [], []
    for begin, end, seen in _blocks(q, k, sight):
        queries = _fold(q[:, :, begin:end], k.shape[1])
        scores = _scores(queries, k[:, :, :seen], sight, (begin, end))
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum("bkms,bksh->bkmh", weights.astype(v.dtype), v[:, :, :seen]) / total.astype(v.dtype)
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
    for (begin, end, seen), normalizer in zip(_blocks(q, k, sight), normalizers, strict=True):
        queries = _fold(q[:, :, begin:end], kv_heads)
        d_out = _fold(d_output[:, :, begin:end], kv_heads)
        out = _fold(output[:, :, begin:end], kv_heads)
        weights = jnp.exp(_scores(queries, k[:, :, :seen], sight, (begin, end)) - normalizer)
        d_weights = jnp.einsum("bkmh,bksh->bkms", d_out, v[:, :, :seen], preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights - jnp.sum(d_out * out, axis=-1, keepdims=True, dtype=jnp.float32))
        d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
        dq.append(_unfold(jnp.einsum("bkms,bksh->bkmh", d_scores, k[:, :, :seen]), q.shape[1]))
        # Written with the long axis last on both sides: CPUs run this product half again as fast.
        dk = dk.at[:, :, :seen].add(jnp.einsum("bkhm,bkms->bkhs", queries.mT, d_scores).mT)
        dv = dv.at[:, :, :seen].add(jnp.einsum("bkhm,bkms->bkhs", d_out.mT, weights).mT)
    return jnp.concatenate(dq, axis=2), dk, dv, None


tree_attention.defvjp(_save, _backward)


def _blocks(q: jax.Array, k: jax.Array, sight: Sight) -> list[tuple[int, int, int]]:
    """Begin and end of each block of queries, and how many keys it looks at: all, where its place is not static."""
    length = q.shape[2]
    ends = [(begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK)]
    return [(begin, end, end if sight.offset is None else k.shape[2]) for begin, end in ends]


def _scores(queries: jax.Array, keys: jax.Array, sight: Sight, span: tuple[int, int]) -> jax.Array:
    """Masked scores float32 [B, K, G·block, S] of the folded queries from ``span[0]`` to ``span[1]``."""
    batch, kv_heads, folded, _ = queries.shape
    length, block = keys.shape[2], span[1] - span[0]
    bias = jnp.where(_visible(sight, span, length), 0.0, NEGATIVE)[:, None, None]
    scores = jnp.einsum("bkmh,bksh->bkms", queries, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, folded // block, block, length) + bias
    return scores.reshape(batch, kv_heads, folded, length)


def _visible(sight: Sight, span: tuple[int, int], keys: int) -> jax.Array:
    """bool [B, block, keys]: which of the first keys the queries of a block see."""
    index = jnp.arange(*span) + (0 if sight.offset is None else sight.offset)
    visible = (jnp.arange(keys) <= index[:, None]) & (index[:, None] < sight.subtree_end[:, None, :keys])
    if sight.window is None or sight.positions is None:
        return visible
    distance = sight.positions[:, index][:, :, None] - sight.positions[:, None, :keys]
    return visible & (distance < sight.window)


def _fold(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, H, n, h] -> [B, K, G·n, h]: one product per key/value head instead of one per query head."""
    batch, _, _, size = x.shape
    return x.reshape(batch, kv_heads, -1, size)


def _unfold(x: jax.Array, heads: int) -> jax.Array:
    """[B, K, G·n, h] -> [B, H, n, h]"""
    batch, _, _, size = x.shape
    return x.reshape(batch, heads, -1, size)
