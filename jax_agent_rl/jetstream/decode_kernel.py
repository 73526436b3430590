"""One token per slot written to its page of the cache, and its attention to its pages, as Pallas kernels for TPUs.

Shapes: B slots of n pages, P pages of S positions in the cache, K key/value heads, G queries of each, h head size.

Each slot's keys and values are read page by page up to its own position (and from its window on), with the running
softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135): slots of a dispatch differ in length, and reading is what
a decode step takes its time for. Which page comes next stands in a table, as in PagedAttention (Kwon et al. 2023, arXiv
2309.06180). Pages are read as they lie: the paged kernels that come with JAX want another layout, heads 128 wide, and
mostly no window.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.jetstream.kv import LayerKV
from jax_agent_rl.models.tree_mask import MASK_VALUE

SLOT_COUNTS, ROWS = 128, 32
"""Positions of a page that are written at least: of keys, of values."""
TOGETHER, TOGETHER_BYTES = 4, 2 << 20
"""Most pages read in one step of the kernel, and most bytes: a step has a price of its own, and memory holds two."""


def write_kernel(cached: LayerKV, new: LayerKV, pages: jax.Array, positions: jax.Array) -> LayerKV:
    """The cache with one more position of each slot, in the cache's own memory where XLA lets go of it.

    A scatter would do, but XLA lays a scatter's operand out with positions first, and would turn the whole cache
    around for :func:`decode_kernel` at every step.

    Args:
        cached: of P pages.
        new: of B rows, one position each.
        pages: int32 [B, n]; where they are 0, nobody's, that is what is written to.
        positions: int32 [B], below n S.
    """
    size = cached.values.shape[2]
    at = jnp.take_along_axis(pages, (positions // size)[:, None], axis=1)[:, 0]

    def part(axis: int, x: jax.Array) -> pl.BlockSpec:
        """Of each slot's page the part its position is in."""
        width = min(SLOT_COUNTS if axis == 3 else ROWS, size)
        shape = (None, *x.shape[1:axis], width, *x.shape[axis + 1 :])
        before, after = [0] * (axis - 1), [0] * (x.ndim - axis - 1)
        return pl.BlockSpec(shape, lambda b, at, within: (at[b], *before, jax.lax.div(within[b], width), *after))

    def one(axis: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    parts = cached.by_position(part)
    return pl.pallas_call(
        _write,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=positions.shape,
            in_specs=[parts, new.by_position(one)],
            out_specs=parts,
        ),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cached),
        input_output_aliases={2 + i: i for i in range(len(jax.tree.leaves(cached)))},  # counted from ``at`` on
    )(at, positions % size, cached, new)


def _write(at: Any, within: Any, cached: LayerKV, new: LayerKV, out: LayerKV) -> None:
    position = within[pl.program_id(0)]

    def write(axis: int, old: Any, one: Any, changed: Any) -> None:
        place = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis - 1)
        here = place == jax.lax.rem(position, old.shape[axis - 1])
        wide = old.dtype if old.dtype.itemsize > 1 else jnp.float32  # chips do not select among 8 bits
        changed[...] = jnp.where(here, one[...].astype(wide), old[...].astype(wide)).astype(old.dtype)

    cached.by_position(write, new, out)


def decode_kernel(
    q: jax.Array, cached: LayerKV, pages: jax.Array, positions: jax.Array, *, window: int | None = None
) -> jax.Array:
    """Attention of one token per slot, already in the cache.

    Args:
        q: [B, K, G, h], already scaled.
        cached: of P pages.
        pages: int32 [B, n], of each slot.
        positions: int32 [B], where each token is.
        window: how many positions it sees, itself among them; None: all.

    Returns:
        [B, K, G, h].
    """
    slots, kv_heads, group, width = q.shape
    count, size = pages.shape[1], cached.values.shape[2]
    page_bytes = sum(x[0].size * x.dtype.itemsize for x in jax.tree.leaves(cached))
    together = max(1, min(TOGETHER, TOGETHER_BYTES // page_bytes, count))
    begins = jnp.zeros_like(positions) if window is None else jnp.maximum(positions + 1 - window, 0)

    def slot(b: Any, *_: Any) -> tuple:
        return b, 0, 0, 0

    def pages_of_step(i: int) -> LayerKV:
        """One of those that are read together."""

        def place(b: Any, j: Any, pages: Any, positions: Any, begins: Any) -> tuple:
            """A page out of sight is not read: its step keeps the nearest that is in sight."""
            first, last = jax.lax.div(begins[b], size), jax.lax.div(positions[b], size)
            return pages[b * count + jnp.clip(j * together + i, first, last)], 0, 0, 0

        return cached.by_position(lambda axis, x: pl.BlockSpec((None, *x.shape[1:]), place))

    length = count * size
    return pl.pallas_call(
        functools.partial(_attend, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(slots, -(-count // together)),
            in_specs=[
                pl.BlockSpec((None, *q.shape[1:]), slot),
                [pages_of_step(i) for i in range(together)],
            ],
            out_specs=pl.BlockSpec((None, *q.shape[1:]), slot),
            scratch_shapes=[pltpu.VMEM((kv_heads, group, n), jnp.float32) for n in (width, 1, 1)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * length,
            transcendentals=slots * kv_heads * group * length,
            bytes_accessed=slots * count * page_bytes,
        ),
    )(pages.reshape(-1), positions, begins, q, [cached] * together)


def _attend(
    pages: Any,
    positions: Any,
    begins: Any,
    q: Any,
    cached: list[LayerKV],
    out: Any,
    mixed: Any,
    peak: Any,
    total: Any,
    *,
    size: int,
) -> None:
    b, j = pl.program_id(0), pl.program_id(1)
    position, begin = positions[b], begins[b]

    @pl.when(j == 0)
    def start() -> None:
        mixed[...] = jnp.zeros_like(mixed)
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, MASK_VALUE)

    for i, page in enumerate(cached):
        first = (j * len(cached) + i) * size
        in_sight = (first <= position) & (begin < first + size)
        pl.when(in_sight)(functools.partial(_add, q, page, first, position, begin, mixed, peak, total))

    @pl.when(j == pl.num_programs(1) - 1)
    def finish() -> None:
        out[...] = (mixed[...] / total[...]).astype(out.dtype)


def _add(q: Any, page: LayerKV, first: Any, position: Any, begin: Any, mixed: Any, peak: Any, total: Any) -> None:
    """One page's part of the attention of K heads at once."""
    queries, scales = q[...], page.scales
    keys, values = page.keys[...].astype(queries.dtype), page.values[...].astype(queries.dtype)
    by_head = ((0,), (0,))
    scores = jax.lax.dot_general(queries, keys, (((2,), (1,)), by_head), preferred_element_type=jnp.float32)
    if scales is not None:
        scores *= scales[:, :1]
    at = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    seen = (at <= position) & (at >= begin)
    scores = jnp.where(seen, scores, MASK_VALUE)
    higher = jnp.maximum(peak[...], jnp.max(scores, axis=2, keepdims=True))
    shrink, weights = jnp.exp(peak[...] - higher), jnp.exp(scores - higher)
    peak[...] = higher
    total[...] = total[...] * shrink + jnp.sum(weights, axis=2, keepdims=True)
    # What a page held before is anything, and no weight of zero takes away a NaN.
    if scales is not None:
        weights = jnp.where(seen, weights * scales[:, 1:], 0)
    place = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    values = jnp.where(place <= position, values, 0)
    weights = weights.astype(queries.dtype)
    new = jax.lax.dot_general(weights, values, (((2,), (1,)), by_head), preferred_element_type=jnp.float32)
    mixed[...] = mixed[...] * shrink + new
