"""Attention masks of packed token trees, and the blocks of queries and keys that kernels compute.

Shapes: B rows, Q queries, T keys, h head size, n and m blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK, LANES = 512, 128
MASK_VALUE = -1e30  # masked score; finite, so that rows of padding have no NaN


class TreeMask(NamedTuple):
    """Attention mask of token trees: i attends to j iff ``j <= i < subtree_end[j]`` and j is within the window.

    Attributes:
        subtree_end: int32 [B, T].
        positions: int32 [B, T], depth of each token in its tree; needed for a window.
        window: int32 []: ``positions[i] - positions[j] < window``; None for no window.
        offset: int32 []: index of the first query in the row; None if all tokens are queries.
    """

    subtree_end: jax.Array
    positions: jax.Array | None = None
    window: jax.Array | None = None
    offset: jax.Array | None = None


class Marks(NamedTuple):
    """The arrays of a mask; depths are None without a window.

    Attributes:
        ends: int32 [B, T, 1], end of each key's subtree; 0 for padding.
        key_depths: int32 [B, T, 1].
        query_depths: int32 [B, 1, Q].
    """

    ends: Any
    key_depths: Any = None
    query_depths: Any = None


class BlockPlan(NamedTuple):
    """Padded arrays of one kernel call, and its blocks.

    Attributes:
        q: [B, H, Q, h].
        k: [B, K, T, h].
        v: [B, K, T, h].
        marks: of the mask.
        place: int32 [2]: index of the first query, window.
        live: bool [B, query blocks, key blocks]: false if the pair is fully masked.
        q_block: queries per block.
        k_block: keys per block.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    marks: Marks
    place: jax.Array
    live: jax.Array
    q_block: int
    k_block: int


def plan_blocks(q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, block: int) -> BlockPlan:
    """Pad arrays to whole blocks of at most ``block`` (a multiple of 128), and find the live pairs of blocks."""
    count, keys = q.shape[2], k.shape[2]
    q_block, k_block = (min(block, n + -n % LANES) for n in (count, keys))
    more, more_keys = -count % q_block, -keys % k_block
    first = jnp.int32(0) if tree_mask.offset is None else tree_mask.offset.astype(jnp.int32)
    window = jnp.int32(0)
    marks = Marks(pad(tree_mask.subtree_end, 1, more_keys)[..., None])
    if tree_mask.window is not None and tree_mask.positions is not None:
        window = tree_mask.window.astype(jnp.int32)
        asking = jax.lax.dynamic_slice_in_dim(tree_mask.positions, first, count, axis=1)
        asking = jnp.pad(asking, ((0, 0), (0, more)), mode="edge")
        marks = Marks(marks.ends, pad(tree_mask.positions, 1, more_keys)[..., None], asking[:, None])
    return BlockPlan(
        q=pad(q, 2, more),
        k=pad(k, 2, more_keys),
        v=pad(v, 2, more_keys),
        marks=marks,
        place=jnp.stack([first, window]),
        live=_live(marks, first, window, count + more, q_block, k_block),
        q_block=q_block,
        k_block=k_block,
    )


def _live(marks: Marks, first: jax.Array, window: jax.Array, count: int, q_block: int, k_block: int) -> jax.Array:
    """Return bool [B, query blocks, key blocks]: false only if no query of the block attends to any of the keys."""
    batch, keys, _ = marks.ends.shape
    begins = (first + jnp.arange(0, count, q_block))[:, None]
    last_end = marks.ends.reshape(batch, 1, -1, k_block).max(axis=-1)
    live = (jnp.arange(0, keys, k_block) < begins + q_block) & (begins < last_end)
    if marks.key_depths is None:
        return live
    nearest = marks.query_depths.reshape(batch, -1, q_block).min(axis=-1)
    deepest = marks.key_depths.reshape(batch, -1, k_block).max(axis=-1)
    return live & (nearest[:, :, None] - deepest[:, None] < window)


def fetched_blocks(live: jax.Array) -> jax.Array:
    """Return int32 [B · n · m]: the block in memory at each step of the last axis.

    A masked block keeps the one before it, so that nothing is read; the first live one is read early.
    """
    step = jnp.arange(live.shape[-1], dtype=jnp.int32)
    latest = jax.lax.cummax(jnp.where(live, step, -1), axis=2)
    return jnp.where(latest < 0, jnp.argmax(live, axis=-1, keepdims=True).astype(jnp.int32), latest).reshape(-1)


def pad(x: jax.Array, axis: int, more: int, value: float = 0) -> jax.Array:
    """Append ``more`` of a value to an axis."""
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value)
