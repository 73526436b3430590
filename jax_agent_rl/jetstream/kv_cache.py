"""The KV cache on the device, in the engine's precision or in 8 bits, and movement of its pages.

Pages of waiting sessions that it has no room for go to host memory, and are restored bit by bit::

    cache ──get_pages──► a few pages on the device ──copy in the background──► host pages
    cache ◄─write_pages─ a few pages on the device ◄──copy────────────────────── host pages

A mesh's pages are copied from and to each device, in the cache's sharding. The number of pages that
move together is one of few, to which they are padded with the null page.

For a mixture of experts, pages also hold which experts each position chose (router replay), so that
a cached prefix keeps its choices: L k bytes a position.

Shapes: P pages of S positions (or rows of several pages, where they were gathered), K key/value
heads, h head size, R rows of n pages. In 8 bits each position's key and value have one float32
scale per head, with positions last: a TPU would pad any other axis to 128. Comments on keys […, K,
h, positions] apply to values [K, positions, h] and scales too.

Page 0 is the null page: it is read where a row has no page, and writes to it are dropped. Work per
layer is a jitted
function: it is traced and lowered once for all layers, and XLA inlines it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import quantized

if TYPE_CHECKING:
    from jax_agent_rl.jetstream.engine import JaxEngine


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer, in the layouts that products read contiguously.

    Attributes:
        keys: [P, K, h, S].
        values: [P, K, S, h].
        scales: float32 [P, K, 2, S], of keys and of values; None if not quantized.
    """

    keys: Any
    values: Any
    scales: Any = None

    def by_position(self, function: Callable[..., Any], *others: LayerKV) -> LayerKV:
        """Map ``function(axis, array, *others' arrays)`` over the arrays; ``axis`` is that of positions."""
        scales = None
        if self.scales is not None:
            scales = function(3, self.scales, *(other.scales for other in others))
        return LayerKV(
            keys=function(3, self.keys, *(other.keys for other in others)),
            values=function(2, self.values, *(other.values for other in others)),
            scales=scales,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers.

    Attributes:
        layers: one for each.
        routed: uint8 or uint16 [P, 1, S, L k], the experts chosen in all layers; None without
            experts. What a position chose is adjacent: to write single positions, TPUs would
            otherwise transpose the array and back.
    """

    layers: tuple[LayerKV, ...]
    routed: Any = None

    def by_position(self, function: Callable[..., Any], *others: KVCache) -> KVCache:
        """Map a function over all arrays, see :meth:`LayerKV.by_position`."""
        layer = jax.jit(lambda own, *rest: own.by_position(function, *rest))
        routed = (
            None
            if self.routed is None
            else function(2, self.routed, *(other.routed for other in others))
        )
        return KVCache(tuple(map(layer, self.layers, *(other.layers for other in others))), routed)

    @property
    def count(self) -> int:
        """Number of pages."""
        return self.layers[0].keys.shape[0]

    @property
    def length(self) -> int:
        """Positions of a page."""
        return self.layers[0].keys.shape[-1]


def empty_cache(config: DecoderConfig, count: int, length: int, dtype: jnp.dtype) -> KVCache:
    """Return a cache of ``count`` pages of zeros, with scales for int8 or float8."""
    heads, size = config.num_kv_heads, config.head_dim

    def layer() -> LayerKV:
        return LayerKV(
            keys=jnp.zeros((count, heads, size, length), dtype),
            values=jnp.zeros((count, heads, length, size), dtype),
            scales=(
                jnp.zeros((count, heads, 2, length), jnp.float32) if is_quantized(dtype) else None
            ),
        )

    routed, experts = None, config.experts
    if experts is not None:
        numbers = jnp.uint8 if experts.count <= 256 else jnp.uint16
        routed = jnp.zeros((count, 1, length, config.num_layers * experts.per_token), numbers)
    return KVCache(tuple(layer() for _ in range(config.num_layers)), routed)


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether a cache of this type has scales."""
    return jnp.dtype(dtype).itemsize == 1


def to_cache(keys: jax.Array, values: jax.Array, dtype: jnp.dtype) -> LayerKV:
    """Convert keys [R, K, h, T] and values [R, K, T, h] to a cache of ``dtype``."""
    if not is_quantized(dtype):
        return LayerKV(keys.astype(dtype), values.astype(dtype))
    own_keys, own_values = quantized(keys, dtype, axis=2), quantized(values, dtype, axis=3)
    scales = jnp.concatenate([own_keys.scale, own_values.scale.mT], axis=2)
    return LayerKV(own_keys.numbers, own_values.numbers, scales)


def from_cache(kept: LayerKV, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Invert :func:`to_cache`: return keys and values, in ``dtype`` if they are quantized."""
    if kept.scales is None:
        return kept.keys, kept.values
    keys = kept.keys.astype(jnp.float32) * kept.scales[:, :, :1]
    values = kept.values.astype(jnp.float32) * kept.scales[:, :, 1, :, None]
    return keys.astype(dtype), values.astype(dtype)


def gather_pages(cache: KVCache, pages: jax.Array, counts: jax.Array) -> KVCache:
    """Gather pages into rows of n S positions.

    Args:
        cache: P pages.
        pages: int32 [R, n].
        counts: int32 [R], positions of each row's context. The rest is zeroed: stale values may be
            NaN, which an attention weight of zero does not remove.
    """

    def array(axis: int, x: jax.Array) -> jax.Array:
        found = jnp.moveaxis(x.at[pages].get(mode="clip"), 1, axis)  # [R, K, h, n, S]
        rows = found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])
        own = jnp.arange(rows.shape[axis]) < counts[:, None]
        return jnp.where(jnp.expand_dims(own, [i for i in (1, 2, 3) if i != axis]), rows, 0)

    return cache.by_position(array)


def write_pages(cache: KVCache, rows: KVCache, pages: jax.Array) -> KVCache:
    """Write rows of n S positions to pages int32 [R, n], which are distinct except for page 0."""
    pages = jnp.where(pages == NULL_PAGE, cache.count, pages).reshape(-1)

    def array(axis: int, x: jax.Array, row: jax.Array) -> jax.Array:
        parts = row.reshape(*row.shape[:axis], -1, x.shape[axis], *row.shape[axis + 1 :])
        parts = jnp.moveaxis(parts, axis, 1).reshape(-1, *x.shape[1:])
        return x.at[pages].set(parts, mode="drop", unique_indices=True)

    return cache.by_position(array, rows)


def write_routed(
    cache: KVCache, chosen: list[jax.Array], positions: jax.Array, pages: jax.Array | None
) -> jax.Array | None:
    """Return ``cache.routed`` with the choices of one token for each of B slots.

    Args:
        cache: B rows, or pages.
        chosen: int32 [B, k] of each layer; empty without experts.
        positions: int32 [B].
        pages: int32 [B, n], pages of each slot; None if the cache has rows.
    """
    if cache.routed is None:
        return None
    slots, new = (
        jnp.arange(len(positions)),
        jnp.concatenate(chosen, axis=1).astype(cache.routed.dtype),
    )  # [B, L k]
    if pages is None:
        return cache.routed.at[slots, 0, positions].set(new)
    page = pages[slots, positions // cache.length]
    page = jnp.where(page == NULL_PAGE, cache.count, page)
    return cache.routed.at[page, 0, positions % cache.length].set(new, mode="drop")


def write_back(
    cache: KVCache, rows: KVCache, pages: jax.Array, positions: jax.Array, steps: int
) -> KVCache:
    """Write the positions that ``steps`` decode steps may have changed from gathered rows back to the cache.

    Args:
        cache: P pages.
        rows: gathered from it.
        pages: int32 [R, n], pages of the rows.
        positions: int32 [R], of the first step. Pages from there on belong to one row only.
        steps: static.
    """
    size, row_pages = cache.length, pages.shape[1]
    count = min(row_pages, count_pages(steps, size))
    first = positions // size
    begin = jnp.minimum(first, row_pages - count)
    index = begin[:, None] + jnp.arange(count)
    mine = jnp.where(index >= first[:, None], jnp.take_along_axis(pages, index, axis=1), NULL_PAGE)

    def window(axis: int, x: jax.Array) -> jax.Array:
        part = lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count * size, axis - 1)  # noqa: E731
        return jax.vmap(part)(x, begin * size)

    return write_pages(cache, rows.by_position(window), mine)


def align_to_pages(cache: KVCache, chunks: KVCache, starts: jax.Array, first: jax.Array) -> KVCache:
    """Align chunks of T positions to whole pages, after what their first page already holds.

    Args:
        cache: P pages.
        chunks: rows of T positions.
        starts: int32 [R], where the chunks begin.
        first: int32 [R], the pages that hold these positions.

    Returns:
        Rows of ``count_pages(T, S)`` pages; their content after a chunk is undefined.
    """
    size = cache.length
    before = starts % size

    def array(axis: int, x: jax.Array, chunk: jax.Array) -> jax.Array:
        width = count_pages(chunk.shape[axis], size) * size
        sides = [(0, 0)] * 4
        sides[axis] = size, width - chunk.shape[axis]
        shift = lambda row, by: jax.lax.dynamic_slice_in_dim(row, by, width, axis - 1)  # noqa: E731
        shifted = jax.vmap(shift)(jnp.pad(chunk, sides), size - before)
        sides[axis] = 0, width - size
        held = jnp.pad(x.at[first].get(mode="clip"), sides)
        mine = jnp.expand_dims(
            jnp.arange(width) >= before[:, None], [i for i in (1, 2, 3) if i != axis]
        )
        return jnp.where(mine, shifted, held)

    return cache.by_position(array, chunks)


def count_pages(count: int, size: int) -> int:
    """Return the most pages that ``count`` consecutive positions touch.

    >>> count_pages(1, 32), count_pages(16, 32), count_pages(33, 32), count_pages(34, 32)
    (1, 2, 2, 3)
    """
    return -(-(count - 1) // size) + 1


def copy_page(cache: KVCache, place: jax.Array) -> KVCache:
    """Copy page ``place[0]`` over page ``place[1]``."""

    def copy(x: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_index_in_dim(x, place[0], keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(x, page, place[1], axis=0)

    return jax.tree.map(copy, cache)


MOVED_TOGETHER = (4, 32)
"""Pages moved by a program."""


def get_pages(cache: KVCache, pages: jax.Array) -> KVCache:
    """Return copies of pages int32 [n]."""
    return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), cache)


class HostCache:
    """Host pages of an engine, as many as fit in ``shapes.kv_offloading_bytes``.

    The memory is taken when pages are first written.

    Args:
        engine: moves the pages.
        cache: the engine's, for shapes.
    """

    def __init__(self, engine: JaxEngine, cache: KVCache) -> None:
        self.count = 0
        if engine.shapes.kv_offloading_bytes:
            page_bytes = sum(x.nbytes for x in jax.tree.leaves(cache)) // cache.count
            self.count = engine.shapes.kv_offloading_bytes // page_bytes
        self._engine = engine
        empty = lambda x: np.empty((self.count, *x.shape[1:]), x.dtype)  # noqa: E731
        self._pages = jax.tree.map(empty, cache) if self.count else None
        self.saved = self.restored = 0  # pages so far
        self._arriving: list[tuple[list[int], KVCache]] = []

    def save(self, cache: KVCache, moves: list[tuple[int, int]]) -> None:
        """Make the moves in a list, of a page to a host page, and empty it; they end in the background."""
        if not moves:
            return
        self.settle()
        self.saved += len(moves)
        for i in range(0, len(moves), MOVED_TOGETHER[-1]):
            pages, host_pages = zip(*moves[i : i + MOVED_TOGETHER[-1]], strict=True)
            content = self._engine.get_pages(cache, pages)
            for array in jax.tree.leaves(content):
                array.copy_to_host_async()
            self._arriving.append((list(host_pages), content))
        moves.clear()

    def read(self, host_pages: Sequence[int]) -> KVCache:
        """Return the content of host pages."""
        self.settle()
        self.restored += len(host_pages)
        return jax.tree.map(lambda kept: kept[list(host_pages)], self._pages)

    def settle(self) -> None:
        """Wait for what the last :meth:`save` began."""
        for host_pages, content in self._arriving:

            def write(kept: np.ndarray, new: jax.Array, host_pages: list[int] = host_pages) -> None:
                kept[host_pages] = np.asarray(new)[: len(host_pages)]

            jax.tree.map(write, self._pages, content)
        self._arriving.clear()
