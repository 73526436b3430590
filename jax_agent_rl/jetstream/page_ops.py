"""Pages of a cache gathered to rows, and rows written back to pages, on the device.

Shapes: P pages of S positions in the cache, K key/value heads, h head size, R rows of n pages. Comments on keys
[…, K, h, positions] apply to values [K, positions, h] and scales too, see :class:`LayerKV`. Page 0 is the null page: it
is read where a row has no page, and writes to it are dropped.

Work per layer is a jitted function: it is traced and lowered once for all layers, and XLA inlines it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.kv import KVCache, LayerKV


def gathered(cache: KVCache, pages: jax.Array, counts: jax.Array) -> KVCache:
    """Gather pages into rows of n S positions.

    Args:
        cache: P pages.
        pages: int32 [R, n].
        counts: int32 [R], positions of each row's context. The rest is zeroed: stale values may be NaN, which an
            attention weight of zero does not remove.
    """

    def array(axis: int, x: jax.Array) -> jax.Array:
        found = jnp.moveaxis(x.at[pages].get(mode="clip"), 1, axis)  # [R, K, h, n, S]
        rows = found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])
        own = jnp.arange(rows.shape[axis]) < counts[:, None]
        return jnp.where(jnp.expand_dims(own, [i for i in (1, 2, 3) if i != axis]), rows, 0)

    layer = jax.jit(lambda layer: layer.by_position(array))
    return KVCache(tuple(map(layer, cache.layers)))


def written(cache: KVCache, rows: tuple[LayerKV, ...], pages: jax.Array) -> KVCache:
    """Write rows of n S positions to pages int32 [R, n], which are distinct except for page 0."""
    pages = jnp.where(pages == NULL_PAGE, cache.count, pages).reshape(-1)

    def array(axis: int, x: jax.Array, row: jax.Array) -> jax.Array:
        parts = row.reshape(*row.shape[:axis], -1, x.shape[axis], *row.shape[axis + 1 :])
        parts = jnp.moveaxis(parts, axis, 1).reshape(-1, *x.shape[1:])
        return x.at[pages].set(parts, mode="drop", unique_indices=True)

    layer = jax.jit(lambda layer, row: layer.by_position(array, row))
    return KVCache(tuple(map(layer, cache.layers, rows)))


def write_back(cache: KVCache, rows: KVCache, pages: jax.Array, positions: jax.Array, steps: int) -> KVCache:
    """Write the positions that ``steps`` decode steps may have changed from gathered rows back to the cache.

    Args:
        cache: P pages.
        rows: gathered from it.
        pages: int32 [R, n], pages of the rows.
        positions: int32 [R], of the first step. Pages from there on belong to one row only.
        steps: static.
    """
    size, most = cache.length, pages.shape[1]
    count = min(most, pages_of(steps, size))
    first = positions // size
    begin = jnp.minimum(first, most - count)
    index = begin[:, None] + jnp.arange(count)
    mine = jnp.where(index >= first[:, None], jnp.take_along_axis(pages, index, axis=1), NULL_PAGE)

    def window(axis: int, x: jax.Array) -> jax.Array:
        part = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count * size, axis - 1)  # noqa: E731
        return jax.vmap(part)(x, begin * size)

    layer = jax.jit(lambda layer: layer.by_position(window))
    return written(cache, tuple(map(layer, rows.layers)), mine)


def aligned(cache: KVCache, chunks: tuple[LayerKV, ...], starts: jax.Array, first: jax.Array) -> tuple[LayerKV, ...]:
    """Align chunks of T positions to whole pages, after what their first page already holds.

    Args:
        cache: P pages.
        chunks: KV of each layer.
        starts: int32 [R], where the chunks begin.
        first: int32 [R], the pages that hold these positions.

    Returns:
        Rows of ``pages_of(T, S)`` pages; their content after a chunk is undefined.
    """
    size = cache.length
    before = starts % size

    def array(axis: int, x: jax.Array, chunk: jax.Array) -> jax.Array:
        width = pages_of(chunk.shape[axis], size) * size
        sides = [(0, 0)] * 4
        sides[axis] = size, width - chunk.shape[axis]
        shift = lambda row, by: jax.lax.dynamic_slice_in_dim(row, by, width, axis - 1)  # noqa: E731
        shifted = jax.vmap(shift)(jnp.pad(chunk, sides), size - before)
        sides[axis] = 0, width - size
        held = jnp.pad(x.at[first].get(mode="clip"), sides)
        mine = jnp.expand_dims(jnp.arange(width) >= before[:, None], [i for i in (1, 2, 3) if i != axis])
        return jnp.where(mine, shifted, held)

    layer = jax.jit(lambda layer, chunk: layer.by_position(array, chunk))
    return tuple(map(layer, cache.layers, chunks))


def pages_of(count: int, size: int) -> int:
    """Return the most pages that ``count`` consecutive positions touch.

    >>> pages_of(1, 32), pages_of(16, 32), pages_of(33, 32), pages_of(34, 32)
    (1, 2, 2, 3)
    """
    return -(-(count - 1) // size) + 1


def copied(cache: KVCache, place: jax.Array) -> KVCache:
    """Copy page ``place[0]`` over page ``place[1]``."""

    def copy(x: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_index_in_dim(x, place[0], keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(x, page, place[1], axis=0)

    return jax.tree.map(copy, cache)
