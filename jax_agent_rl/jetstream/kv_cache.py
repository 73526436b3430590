"""The KV cache on the device, in the engine's precision or in 8 bits.

For a mixture of experts, pages also hold which experts each position chose (router replay), so that
a cached prefix keeps its choices: M k bytes a position.

Shapes: P pages of S positions (or rows of several pages, where they were gathered), K key/value
heads, h head size, R rows of n pages. In 8 bits each position's key and value have one float32
scale per head, with positions last: a TPU would pad any other axis to 128. Comments on keys […, K,
h, positions] apply to values [K, positions, h] and scales too.

Page 0 is the null page: it is read where a row has no page, and writes to it are dropped. Work per
layer is a jitted function: it is traced and lowered once for all layers, and XLA inlines it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import quantized


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

    @property
    def count(self) -> int:
        """Number of pages."""
        return self.keys.shape[0]

    @property
    def length(self) -> int:
        """Positions of a page."""
        return self.keys.shape[-1]

    @property
    def value_size(self) -> int:
        """Numbers of a value."""
        return self.values.shape[-1]

    def by_position(self, function: Callable[..., Any], *others: LayerKV) -> LayerKV:
        """Map ``function(axis, array, *others' arrays)`` over the arrays.

        ``axis`` is the one of positions.
        """
        scales = None
        if self.scales is not None:
            scales = function(3, self.scales, *(other.scales for other in others))
        return LayerKV(
            keys=function(3, self.keys, *(other.keys for other in others)),
            values=function(2, self.values, *(other.values for other in others)),
            scales=scales,
        )


class LayerCache(Protocol):
    """What one layer remembers of the positions of pages, a tree of arrays [P, ...].

    Its class belongs to the layer's mixer (``jetstream.mixers``). Arrays may have any axes besides
    the one of positions.
    """

    @property
    def count(self) -> int:
        """Number of pages."""
        ...

    @property
    def length(self) -> int:
        """Positions of a page."""
        ...

    def by_position(self, function: Callable[..., Any], *others: Any) -> Self:
        """Map a function over the arrays, see :meth:`LayerKV.by_position`."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What all layers remember.

    Attributes:
        layers: one for each, such as :class:`LayerKV`; None for recurrent ones, and for those that
            read another layer's.
        routed: uint8 or uint16 [P, 1, S, M k], the experts chosen in the M layers that have any;
            None without experts. What a position chose is adjacent: to write single positions,
            TPUs would otherwise transpose the array and back.
        states: one for each layer, see ``jetstream.recurrent_states``; None for those that have
            pages. Empty without recurrent layers.
    """

    layers: tuple[Any, ...]
    routed: Any = None
    states: tuple[Any, ...] = ()

    @property
    def pages(self) -> KVCache:
        """The cache without the states."""
        return replace(self, states=())

    @property
    def entries(self) -> tuple[Any, ...]:
        """What each layer remembers: pages, or states."""
        if not self.states:
            return self.layers
        entries = []
        for layer, state in zip(self.layers, self.states, strict=True):
            entries.append(state if layer is None else layer)
        return tuple(entries)

    def with_entries(self, entries: Sequence[Any], routed: Any) -> KVCache:
        """Return the cache with other :attr:`entries` and chosen experts."""
        if not self.states:
            return KVCache(tuple(entries), routed)
        layers = []
        states = []
        for layer, entry in zip(self.layers, entries, strict=True):
            layers.append(None if layer is None else entry)
            states.append(entry if layer is None else None)
        return KVCache(tuple(layers), routed, tuple(states))

    def by_position(self, function: Callable[..., Any], *others: KVCache) -> KVCache:
        """Map a function over the arrays of pages, see :meth:`LayerKV.by_position`."""
        one_layer = jax.jit(lambda layer, *others: layer.by_position(function, *others))
        routed = None
        if self.routed is not None:
            routed = function(2, self.routed, *(other.routed for other in others))
        layers: list[Any] = []
        for layer, *same_layers in zip(
            self.layers, *(other.layers for other in others), strict=True
        ):
            layers.append(None if layer is None else one_layer(layer, *same_layers))
        return replace(self, layers=tuple(layers), routed=routed)

    @property
    def count(self) -> int:
        """Number of pages."""
        return self._first_with_pages.count

    @property
    def length(self) -> int:
        """Positions of a page."""
        return self._first_with_pages.length

    @property
    def _first_with_pages(self) -> LayerCache:
        return next(layer for layer in self.layers if layer is not None)


def empty_kv(
    config: DecoderConfig, layer: int, count: int, length: int, dtype: jnp.dtype
) -> LayerKV | None:
    """Return keys and values of ``count`` pages of zeros, with scales for int8 or float8.

    Return None for a layer that reads another layer's.
    """
    kind = config.layer_kind(layer)
    if kind.keys == "shared":
        return None
    heads = config.heads(kind.mixer).num_kv_heads
    size = config.heads(kind.mixer).head_dim
    keys = jnp.zeros((count, heads, size, length), dtype)
    values = jnp.zeros((count, heads, length, size), dtype)
    scales = None
    if is_quantized(dtype):
        scales = jnp.zeros((count, heads, 2, length), jnp.float32)
    return LayerKV(keys, values, scales)


def empty_routed(config: DecoderConfig, count: int, length: int) -> jax.Array | None:
    """Return ``KVCache.routed`` of ``count`` pages; None without experts."""
    experts = config.experts
    if experts is None:
        return None
    numbers = jnp.uint8 if experts.count <= 256 else jnp.uint16  # to hold an expert's index
    choices = len(config.expert_layers) * experts.per_token
    return jnp.zeros((count, 1, length, choices), numbers)


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether a cache of this type has scales."""
    return jnp.dtype(dtype).itemsize == 1


def to_cache(keys: jax.Array, values: jax.Array, dtype: jnp.dtype) -> LayerKV:
    """Convert keys [R, K, h, T] and values [R, K, T, h] to a cache of ``dtype``."""
    if not is_quantized(dtype):
        return LayerKV(keys.astype(dtype), values.astype(dtype))
    quantized_keys = quantized(keys, dtype, axis=2)
    quantized_values = quantized(values, dtype, axis=3)
    scales = jnp.concatenate([quantized_keys.scale, quantized_values.scale.mT], axis=2)
    return LayerKV(quantized_keys.numbers, quantized_values.numbers, scales)


def from_cache(cached: LayerKV, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Invert :func:`to_cache`: return keys and values, in ``dtype`` if they are quantized."""
    if cached.scales is None:
        return cached.keys, cached.values
    keys = cached.keys.astype(jnp.float32) * cached.scales[:, :, :1]
    values = cached.values.astype(jnp.float32) * cached.scales[:, :, 1, :, None]
    return keys.astype(dtype), values.astype(dtype)


def gather_pages(cache: KVCache, pages: jax.Array, counts: jax.Array) -> KVCache:
    """Gather pages into rows of n S positions.

    Args:
        cache: P pages.
        pages: int32 [R, n].
        counts: int32 [R], positions of each row's context. Those after it are zeroed: stale values
            may be NaN, which an attention weight of zero does not remove.
    """

    def array(axis: int, x: jax.Array) -> jax.Array:
        gathered = jnp.moveaxis(x.at[pages].get(mode="clip"), 1, axis)  # [R, K, h, n, S]
        rows = gathered.reshape(*gathered.shape[:axis], -1, *gathered.shape[axis + 2 :])
        in_context = jnp.arange(rows.shape[axis]) < counts[:, None]
        return jnp.where(jnp.expand_dims(in_context, _other_axes(axis, rows.ndim)), rows, 0)

    return cache.by_position(array)


def _other_axes(axis: int, count: int) -> list[int]:
    """Return the axes to add to [R, positions] so that positions are at ``axis`` of ``count``."""
    return [i for i in range(1, count) if i != axis]


def write_pages(cache: KVCache, rows: KVCache, pages: jax.Array) -> KVCache:
    """Write rows of n S positions to pages int32 [R, n], which are distinct except for page 0."""
    # What goes to the null page is written past the end, which drops it.
    pages = jnp.where(pages == NULL_PAGE, cache.count, pages).reshape(-1)

    def array(axis: int, x: jax.Array, row: jax.Array) -> jax.Array:
        parts = row.reshape(*row.shape[:axis], -1, x.shape[axis], *row.shape[axis + 1 :])
        parts = jnp.moveaxis(parts, axis, 1).reshape(-1, *x.shape[1:])
        return x.at[pages].set(parts, mode="drop", unique_indices=True)

    return cache.by_position(array, rows)


def write_routed(
    cache: KVCache, chosen: list[jax.Array], positions: jax.Array, pages: jax.Array | None
) -> jax.Array | None:
    """Return ``cache.routed`` with the experts of one token for each of B slots.

    Args:
        cache: B rows, or pages.
        chosen: int32 [B, k], the experts chosen in each layer that has any.
        positions: int32 [B], position of each token.
        pages: int32 [B, n], pages of each slot; None if the cache has rows.
    """
    if cache.routed is None:
        return None
    slots = jnp.arange(len(positions))
    experts = jnp.concatenate(chosen, axis=1).astype(cache.routed.dtype)  # [B, M k]
    if pages is None:
        return cache.routed.at[slots, 0, positions].set(experts)
    page = pages[slots, positions // cache.length]
    page = jnp.where(page == NULL_PAGE, cache.count, page)
    return cache.routed.at[page, 0, positions % cache.length].set(experts, mode="drop")


def write_back(
    cache: KVCache, rows: KVCache, pages: jax.Array, positions: jax.Array, steps: int
) -> KVCache:
    """Write what ``steps`` decode steps may have changed from gathered rows back to the cache.

    Args:
        cache: P pages.
        rows: gathered from the cache.
        pages: int32 [R, n], pages of the rows.
        positions: int32 [R], positions of the first step. Pages from there on belong to one row
            only.
        steps: decode steps that ran at most; static.
    """
    size = cache.length
    row_pages = pages.shape[1]
    count = min(row_pages, count_pages(steps, size))
    first = positions // size
    # The window of pages lies inside the row, so it may begin before the first changed page.
    begin = jnp.minimum(first, row_pages - count)
    index = begin[:, None] + jnp.arange(count)
    is_changed = index >= first[:, None]
    changed = jnp.where(is_changed, jnp.take_along_axis(pages, index, axis=1), NULL_PAGE)

    def window(axis: int, x: jax.Array) -> jax.Array:
        def cut(row: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(row, start, count * size, axis - 1)

        return jax.vmap(cut)(x, begin * size)

    return write_pages(cache, rows.by_position(window), changed)


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
    offset = starts % size

    def array(axis: int, x: jax.Array, chunk: jax.Array) -> jax.Array:
        width = count_pages(chunk.shape[axis], size) * size

        def cut(row: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(row, start, width, axis - 1)

        padding = [(0, 0)] * x.ndim
        padding[axis] = (size, width - chunk.shape[axis])
        shifted = jax.vmap(cut)(jnp.pad(chunk, padding), size - offset)

        padding[axis] = (0, width - size)
        first_page = jnp.pad(x.at[first].get(mode="clip"), padding)

        in_chunk = jnp.arange(width) >= offset[:, None]
        return jnp.where(jnp.expand_dims(in_chunk, _other_axes(axis, x.ndim)), shifted, first_page)

    return cache.by_position(array, chunks)


def count_pages(count: int, size: int) -> int:
    """Return the most pages that ``count`` consecutive positions touch.

    >>> count_pages(1, 32), count_pages(16, 32), count_pages(33, 32), count_pages(34, 32)
    (1, 2, 2, 3)
    """
    return -(-(count - 1) // size) + 1


def copy_page(cache: KVCache, source_and_target: jax.Array) -> KVCache:
    """Copy one page over another; their numbers are int32 [2]."""

    def copy(x: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_index_in_dim(x, source_and_target[0], keepdims=True)
        return jax.lax.dynamic_update_index_in_dim(x, page, source_and_target[1], axis=0)

    return replace(jax.tree.map(copy, cache.pages), states=cache.states)


MOVED_TOGETHER = (4, 32)
"""Pages moved by each of the programs."""


def get_pages(cache: KVCache, pages: jax.Array) -> KVCache:
    """Return copies of pages int32 [n]."""
    return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), cache.pages)
