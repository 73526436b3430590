"""Pallas TPU kernels for decoding: write one token per slot to its page, and attend to the slot's pages.

Shapes: B slots of n pages, P pages of S positions in the cache, K key/value heads, G queries of
each, h head size.

Each slot's keys and values are read page by page up to its own position (and from its window on),
with the running softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135): slots differ in
length, and decoding is bound by reads. A table names the next page, as in PagedAttention (Kwon et
al. 2023, arXiv 2309.06180). JAX's own paged kernels want another layout, heads 128 wide, and mostly
no window.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.jetstream.kv_cache import LayerKV
from jax_agent_rl.models.tree_kernel import MASK_VALUE

LANES, ROWS = 128, 32
"""Positions of a page that are written together, at least: of keys, of values."""
MAX_WRITE_BYTES = 2 << 20
"""Limit of the parts that a grid step writes; VMEM holds those of two steps."""
MAX_STEP_PAGES, MAX_STEP_BYTES = 16, 2 << 20
"""Limits of what one grid step reads: a step's overhead is the time of half a MiB, and VMEM holds
two."""


def write_kernel(cached: LayerKV, new: LayerKV, pages: jax.Array, positions: jax.Array) -> LayerKV:
    """Write one position per slot, in the cache's own memory where XLA donates it.

    A scatter would do, but XLA lays its operand out with positions first, and would transpose the
    whole cache for
    :func:`decode_kernel` at every step.

    Args:
        cached: P pages.
        new: B rows of one position each.
        pages: int32 [B, n]; slots without a page write to the null page 0.
        positions: int32 [B], below n S.
    """
    size = cached.values.shape[2]
    at = jnp.take_along_axis(pages, (positions // size)[:, None], axis=1)[:, 0]
    # Copies of the kernel's own, unlike the grid's, take whole tiles.
    write = _write_each if size % LANES or cached.values.shape[3] % LANES else _write_together
    return write(at, positions % size, cached, new)


def _write_each(at: jax.Array, within: jax.Array, cached: LayerKV, new: LayerKV) -> LayerKV:
    """Write a slot per grid step."""

    def part(axis: int, x: jax.Array) -> pl.BlockSpec:
        """Select the part of each slot's page that holds its position."""
        shape = _part_shape(axis, x)
        before, after = [0] * (axis - 1), [0] * (x.ndim - axis - 1)
        width = shape[axis - 1]
        return pl.BlockSpec(
            (None, *shape),
            lambda b, at, within: (at[b], *before, jax.lax.div(within[b], width), *after),
        )

    def one(_: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    def write(at: Any, within: Any, cached: LayerKV, new: LayerKV, out: LayerKV) -> None:
        position = within[pl.program_id(0)]

        def change(axis: int, old: Any, one: Any, changed: Any) -> None:
            changed[...] = _with_token(axis, old[...], one[...], position)

        cached.by_position(change, new, out)

    parts = cached.by_position(part)
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=at.shape,
        in_specs=[parts, new.by_position(one)],
        out_specs=parts,
    )
    return _call(write, specs, at, within, cached, new)


def _write_together(at: jax.Array, within: jax.Array, cached: LayerKV, new: LayerKV) -> LayerKV:
    """Write many slots per grid step: the overhead of a step is longer than the copies of a slot."""
    slots, arrays = len(at), len(jax.tree.leaves(cached))
    parts = cached.by_position(lambda axis, x: jax.ShapeDtypeStruct(_part_shape(axis, x), x.dtype))
    fit = max(1, MAX_WRITE_BYTES // sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts)))
    per_step = max(n for n in range(1, min(fit, slots) + 1) if slots % n == 0)
    # An axis of one position would be padded to a whole tile in memory.
    new = new.by_position(lambda axis, x: jnp.squeeze(x, axis))

    def one(_: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((per_step, *x.shape[1:]), lambda i, *_: (i, 0, 0))

    everything = jax.tree.map(lambda x: pl.BlockSpec(memory_space=pl.ANY), cached)
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(slots // per_step,),
        in_specs=[everything, new.by_position(one)],
        out_specs=everything,
        scratch_shapes=[
            jax.tree.map(lambda x: pltpu.VMEM((2, per_step, *x.shape), x.dtype), parts),
            pltpu.SemaphoreType.DMA((2, 2, arrays, per_step)),
        ],
    )
    return _call(
        functools.partial(_write_slots, per_step, slots // per_step), specs, at, within, cached, new
    )


def _call(
    kernel: Any, specs: Any, at: jax.Array, within: jax.Array, cached: LayerKV, new: LayerKV
) -> LayerKV:
    """Run a kernel that changes the cache in its own memory."""
    parts = jax.tree.leaves(
        cached.by_position(lambda axis, x: math.prod(_part_shape(axis, x)) * x.dtype.itemsize)
    )
    return pl.pallas_call(
        kernel,
        grid_spec=specs,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cached),
        input_output_aliases={2 + i: i for i in range(len(parts))},  # counted from ``at`` on
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * len(at) * sum(parts)
        ),
    )(at, within, cached, new)


def _with_token(axis: int, old: jax.Array, token: jax.Array, position: Any) -> jax.Array:
    """Return a part of a page with the token at its position, which counts from the page's begin."""
    here = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis - 1) == jax.lax.rem(
        position, old.shape[axis - 1]
    )
    wide = old.dtype if old.dtype.itemsize > 1 else jnp.float32  # TPUs cannot select 8-bit values
    return jnp.where(here, token.astype(wide), old.astype(wide)).astype(old.dtype)


def _part_shape(axis: int, x: jax.Array) -> tuple[int, ...]:
    """Return the shape of the part of a page that is read and written with one position."""
    return (
        *x.shape[1:axis],
        min(LANES if axis == 3 else ROWS, x.shape[axis]),
        *x.shape[axis + 1 :],
    )


def _write_slots(
    per_step: int,
    steps: int,
    at: Any,
    within: Any,
    _: LayerKV,
    new: LayerKV,
    cached: LayerKV,
    parts: LayerKV,
    done: Any,
) -> None:
    """Change the parts of ``per_step`` slots in VMEM, while those of the next are read and of the last written.

    Slots have pages of their own where they write, but for the null page, whose content does not
    matter.

    Args:
        per_step: slots of a grid step.
        steps: of the grid.
        at: the page of each slot, in SMEM.
        within: the position in it.
        _: the cache as input, which is the same memory.
        new: of this step's slots.
        cached: the cache.
        parts: [2, per_step, ...], for steps in turn.
        done: semaphores [2, 2, arrays, per_step]: of reads and writes, for steps in turn.
    """
    step = pl.program_id(0)

    def copies(step: Any, *, write: bool) -> list[Any]:
        """Return the copies of all parts of a step's slots, to or from VMEM."""
        turn, found = jax.lax.rem(step, 2), []

        def copy(axis: int, whole: Any, buffer: Any) -> None:
            number, width = len(found) // per_step, buffer.shape[axis + 1]
            for i in range(per_step):
                slot = step * per_step + i
                begin = pl.multiple_of(jax.lax.div(within[slot], width) * width, width)
                place = whole.at[(at[slot], *[slice(None)] * (axis - 1), pl.ds(begin, width))]
                mine, ready = buffer.at[turn, i], done.at[int(write), turn, number, i]
                found.append(
                    pltpu.make_async_copy(*((mine, place) if write else (place, mine)), ready)
                )

        cached.by_position(copy, parts)
        return found

    def start(step: Any, *, write: bool) -> None:
        for each in copies(step, write=write):
            each.start()

    def wait(step: Any, *, write: bool) -> None:
        for each in copies(step, write=write):
            each.wait()

    pl.when(step == 0)(lambda: start(0, write=False))
    pl.when(step > 0)(lambda: wait(step - 1, write=True))
    pl.when(step + 1 < steps)(lambda: start(step + 1, write=False))
    wait(step, write=False)

    def change(axis: int, old: Any, one: Any) -> None:
        turn = jax.lax.rem(step, 2)
        for i in range(per_step):
            token = jnp.expand_dims(
                one[i].astype(jnp.float32), axis - 1
            )  # TPUs insert no axis into 8 or 16 bits
            old[turn, i] = _with_token(axis, old[turn, i], token, within[step * per_step + i])

    parts.by_position(change, new)
    start(step, write=True)
    pl.when(step + 1 == steps)(lambda: wait(step, write=True))


def decode_kernel(
    q: jax.Array,
    cached: LayerKV,
    pages: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None = None,
    *,
    window: int | None = None,
) -> jax.Array:
    """Attend from one token per slot, already in the cache.

    Args:
        q: [B, K, G, h], already scaled.
        cached: P pages.
        pages: int32 [B, n], pages of each slot.
        positions: int32 [B], position of each token.
        sinks: [K, G], a further score of each query head's softmax; None for none.
        window: positions a token attends to, itself included; None for all.

    Returns:
        [B, K, G, h].
    """
    slots, kv_heads, group, width = q.shape
    count, size = pages.shape[1], cached.values.shape[2]
    page_bytes = sum(x[0].size * x.dtype.itemsize for x in jax.tree.leaves(cached))
    per_step = max(1, min(MAX_STEP_PAGES, MAX_STEP_BYTES // page_bytes, count))
    begins = jnp.zeros_like(positions) if window is None else jnp.maximum(positions + 1 - window, 0)

    def slot(b: Any, *_: Any) -> tuple:
        return b, 0, 0, 0

    def pages_of_step(i: int) -> LayerKV:
        """Return the spec of one of the pages read in a grid step."""

        def place(b: Any, j: Any, pages: Any, positions: Any, begins: Any) -> tuple:
            """Keep the nearest visible page in place of an invisible one, so that it is not read."""
            first, last = jax.lax.div(begins[b], size), jax.lax.div(positions[b], size)
            return pages[b * count + jnp.clip(j * per_step + i, first, last)], 0, 0, 0

        return cached.by_position(lambda axis, x: pl.BlockSpec((None, *x.shape[1:]), place))

    length = count * size
    own_sinks = None if sinks is None else sinks.astype(jnp.float32)[..., None]
    return pl.pallas_call(
        functools.partial(_attend, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(slots, -(-count // per_step)),
            in_specs=[
                pl.BlockSpec((None, *q.shape[1:]), slot),
                None if sinks is None else pl.BlockSpec((kv_heads, group, 1), lambda *_: (0, 0, 0)),
                [pages_of_step(i) for i in range(per_step)],
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
    )(pages.reshape(-1), positions, begins, q, own_sinks, [cached] * per_step)


def _attend(
    pages: Any,
    positions: Any,
    begins: Any,
    q: Any,
    sinks: Any,
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
        # A sink is a score before all others, of a value of zeros.
        total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0)
        peak[...] = jnp.full_like(peak, MASK_VALUE) if sinks is None else sinks[...]

    for i, page in enumerate(cached):
        first = (j * len(cached) + i) * size
        visible_page = (first <= position) & (begin < first + size)
        pl.when(visible_page)(
            functools.partial(_add, q, page, first, position, begin, mixed, peak, total)
        )

    @pl.when(j == pl.num_programs(1) - 1)
    def finish() -> None:
        out[...] = (mixed[...] / total[...]).astype(out.dtype)


def _add(
    q: Any, page: LayerKV, first: Any, position: Any, begin: Any, mixed: Any, peak: Any, total: Any
) -> None:
    """Add one page to the running attention of K heads."""
    queries, scales = q[...], page.scales
    keys, values = page.keys[...].astype(queries.dtype), page.values[...].astype(queries.dtype)
    by_head = ((0,), (0,))
    scores = jax.lax.dot_general(
        queries, keys, (((2,), (1,)), by_head), preferred_element_type=jnp.float32
    )
    if scales is not None:
        scores *= scales[:, :1]
    at = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    visible = (at <= position) & (at >= begin)
    scores = jnp.where(visible, scores, MASK_VALUE)
    higher = jnp.maximum(peak[...], jnp.max(scores, axis=2, keepdims=True))
    shrink, weights = jnp.exp(peak[...] - higher), jnp.exp(scores - higher)
    peak[...] = higher
    total[...] = total[...] * shrink + jnp.sum(weights, axis=2, keepdims=True)
    # Stale values may be NaN, which a weight of zero does not remove.
    if scales is not None:
        weights = jnp.where(visible, weights * scales[:, 1:], 0)
    place = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    values = jnp.where(place <= position, values, 0)
    weights = weights.astype(queries.dtype)
    new = jax.lax.dot_general(
        weights, values, (((2,), (1,)), by_head), preferred_element_type=jnp.float32
    )
    mixed[...] = mixed[...] * shrink + new
