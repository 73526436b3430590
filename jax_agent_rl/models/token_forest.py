"""Packed rows of token trees, cut into chunks for layers whose state is one matrix per head.

Shapes: B rows, T tokens, N chunks of c tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_agent_rl.models.delta_net import CHUNK

NO_TOKEN = -1
"""Parent of a root."""


class TokenForest(NamedTuple):
    """Chunks of packed rows of token trees. Tokens are numbered within their row.

    Attributes:
        parent: int32 [B, T], or ``NO_TOKEN``.
        is_ancestor: bool [B, N, c, c], [i, j] whether j is an ancestor of i or i itself.
        entry: int32 [B, N, c], the last token before the chunk on the path to each token, or
            ``NO_TOKEN``.
        run: int32 [B, N, c], number of the run of each token in its chunk.
    """

    parent: jax.Array
    is_ancestor: jax.Array
    entry: jax.Array
    run: jax.Array

    @property
    def chunk(self) -> int:
        """Tokens of a chunk, c."""
        return self.run.shape[2]


def plan_forest(positions: jax.Array, subtree_end: jax.Array, *, chunk: int = CHUNK) -> TokenForest:
    """Return the chunks of packed rows, computed once for all layers.

    Args:
        positions: int32 [B, T], depth of each token in its tree.
        subtree_end: int32 [B, T], index one past the last descendant.
        chunk: c.
    """
    rows, count = positions.shape
    num_chunks = -(-count // chunk)
    padding = num_chunks * chunk - count
    parent = jax.vmap(_parents)(positions)

    # Padding is trees of one token.
    index = jnp.arange(num_chunks * chunk)
    own_end = jnp.broadcast_to(index[count:] + 1, (rows, padding)).astype(subtree_end.dtype)
    ends = jnp.concatenate([subtree_end, own_end], axis=1).reshape(rows, num_chunks, 1, chunk)
    parents = jnp.pad(parent, ((0, 0), (0, padding)), constant_values=NO_TOKEN)

    by_chunk = index.reshape(num_chunks, chunk)
    is_before = by_chunk[:, None, :] <= by_chunk[:, :, None]
    is_ancestor = is_before & (by_chunk[:, :, None] < ends)

    first_ancestor = by_chunk[:, :1] + jnp.argmax(is_ancestor, axis=-1)
    flat = first_ancestor.reshape(rows, -1)
    entry = jnp.take_along_axis(parents, flat, axis=1).reshape(rows, num_chunks, chunk)
    changes = entry[:, :, 1:] != entry[:, :, :-1]
    run = jnp.pad(jnp.cumsum(changes, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    return TokenForest(parent, is_ancestor, entry, run)


def _parents(positions: jax.Array) -> jax.Array:
    """Return the parent of each token of a row, int32 [T].

    In depth-first order it is the last token before that is one less deep. Sorted by depth and
    index, with each token once as itself and once as a child at its parent's depth, a child follows
    its parent.
    """
    count = positions.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    depths = jnp.concatenate([positions, positions - 1]).astype(jnp.int32)
    # A token of the parent's depth can't have the child's index, so the order is strict.
    numbers = jnp.concatenate([index, index])
    is_child = jnp.concatenate([jnp.zeros(count, jnp.int32), jnp.ones(count, jnp.int32)])
    _, sorted_numbers, sorted_child = jax.lax.sort((depths, numbers, is_child), num_keys=2)

    place = jnp.arange(2 * count, dtype=jnp.int32)
    last_place = jax.lax.cummax(jnp.where(sorted_child == 0, place, -1))
    found = jnp.where(last_place >= 0, sorted_numbers[jnp.maximum(last_place, 0)], NO_TOKEN)
    # Those that are not children go to a place beyond the end.
    target = jnp.where(sorted_child == 1, sorted_numbers, count)
    parent = jnp.full(count, NO_TOKEN, jnp.int32).at[target].set(found, mode="drop")
    return jnp.where(positions == 0, NO_TOKEN, parent)
