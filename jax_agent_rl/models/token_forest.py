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


def plan_forest(subtree_end: jax.Array, *, chunk: int = CHUNK) -> TokenForest:
    """Return the chunks of packed rows, computed once for all layers.

    Args:
        subtree_end: int32 [B, T], index one past the last descendant.
        chunk: c.
    """
    rows, count = subtree_end.shape
    num_chunks = -(-count // chunk)
    padding = num_chunks * chunk - count
    parent = jax.vmap(_parents)(subtree_end)

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


def _parents(subtree_end: jax.Array) -> jax.Array:
    """Return the parent of each token of a row, int32 [T]: the last of its ancestors.

    Every pair is compared, in one small loop. A sort has fewer steps, but a compiler for TPUs took
    longer for it than for any other operation of a gradient.
    """
    index = jnp.arange(subtree_end.shape[0], dtype=jnp.int32)
    is_before = index[None, :] < index[:, None]
    is_ancestor = is_before & (index[:, None] < subtree_end[None, :])
    return jnp.max(jnp.where(is_ancestor, index[None, :], NO_TOKEN), axis=1)
