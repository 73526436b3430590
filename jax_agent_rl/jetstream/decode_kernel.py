"""Pallas TPU kernels for decoding: write one token per slot to its page, and attend to its pages.

Shapes: B slots of n pages, P pages of S positions in the cache, K key/value heads, G queries of
each, h head size, v size of a value (mostly h). Latents (``latent_cache``) are one key/value head,
whose values are the first numbers of its keys.

Each slot's keys and values are read page by page up to its own position (and from its window on),
with the running softmax of FlashAttention (Dao et al. 2022, arXiv 2205.14135): slots differ in
length, and decoding is bound by reads. A table of page numbers names the next page, as in
PagedAttention (Kwon et al. 2023, arXiv 2309.06180). JAX's own paged kernels want another layout,
heads 128 wide, and mostly no window.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.jetstream.kv_cache import LayerCache, LayerKV
from jax_agent_rl.jetstream.latent_cache import LayerLatents
from jax_agent_rl.models.tree_kernel import MASK_VALUE

LANES = 128
"""Positions of a page whose keys are written together, at least."""
ROWS = 32
"""Positions of a page whose values are written together, at least."""
MAX_WRITE_BYTES = 2 << 20
"""Limit of the parts that a grid step writes; VMEM holds the parts of two steps."""
MAX_STEP_PAGES = 16
"""Limit of the pages that one grid step reads."""
MAX_STEP_BYTES = 2 << 20
"""Limit of what one grid step reads: its overhead is the time of half a MiB, and VMEM holds two."""
Pages = TypeVar("Pages", bound=LayerCache)


def write_kernel(cached: Pages, new: Pages, pages: jax.Array, positions: jax.Array) -> Pages:
    """Write one position per slot, in the cache's own memory where XLA donates it.

    A scatter would do, but XLA lays its operand out with positions first, and would transpose the
    whole cache for :func:`decode_kernel` at every step.

    Args:
        cached: P pages.
        new: B rows of one position each.
        pages: int32 [B, n]; slots without a page write to the null page 0.
        positions: int32 [B], below n S.
    """
    size = cached.length
    page = jnp.take_along_axis(pages, (positions // size)[:, None], axis=1)[:, 0]
    # Copies of the kernel's own, unlike the grid's, take whole tiles.
    fills_tiles = all(x.shape[-1] % LANES == 0 for x in jax.tree.leaves(cached))
    if fills_tiles:
        return write_together(page, positions % size, cached, new)
    return write_each(page, positions % size, cached, new)


def write_each(page: jax.Array, within: jax.Array, cached: Pages, new: Pages) -> Pages:
    """Write a slot per grid step.

    Args:
        page: int32 [B], the page of each slot.
        within: int32 [B], the position in it.
        cached: P pages.
        new: B rows of one position each.
    """

    def part(axis: int, x: jax.Array) -> pl.BlockSpec:
        """Select the part of each slot's page that holds its position."""
        shape = _part_shape(axis, x)
        leading = [0] * (axis - 1)
        trailing = [0] * (x.ndim - axis - 1)
        width = shape[axis - 1]

        def index(b: Any, page: Any, within: Any) -> tuple:
            return (page[b], *leading, jax.lax.div(within[b], width), *trailing)

        return pl.BlockSpec((None, *shape), index)

    def row(_: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, 0, 0, 0))

    def write(page: Any, within: Any, cached: Any, new: Any, out: Any) -> None:
        position = within[pl.program_id(0)]

        def change(axis: int, old: Any, token: Any, changed: Any) -> None:
            changed[...] = _with_token(axis, old[...], token[...], position)

        cached.by_position(change, new, out)

    parts = cached.by_position(part)
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=page.shape,
        in_specs=[parts, new.by_position(row)],
        out_specs=parts,
    )
    return _call(write, specs, page, within, cached, new)


def write_together(page: jax.Array, within: jax.Array, cached: Pages, new: Pages) -> Pages:
    """Write many slots per grid step: a step's overhead is longer than the copies of a slot.

    It takes the arguments of :func:`write_each`.
    """
    slots = len(page)
    arrays = len(jax.tree.leaves(cached))
    parts = cached.by_position(lambda axis, x: jax.ShapeDtypeStruct(_part_shape(axis, x), x.dtype))
    part_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts))
    max_per_step = min(max(1, MAX_WRITE_BYTES // part_bytes), slots)
    per_step = max(n for n in range(1, max_per_step + 1) if slots % n == 0)
    steps = slots // per_step
    # An axis of one position would be padded to a whole tile in memory.
    new = new.by_position(lambda axis, x: jnp.squeeze(x, axis))

    def rows(_: int, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((per_step, *x.shape[1:]), lambda i, *_: (i, 0, 0))

    everything = jax.tree.map(lambda x: pl.BlockSpec(memory_space=pl.ANY), cached)
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(steps,),
        in_specs=[everything, new.by_position(rows)],
        out_specs=everything,
        scratch_shapes=[
            jax.tree.map(lambda x: pltpu.VMEM((2, per_step, *x.shape), x.dtype), parts),
            pltpu.SemaphoreType.DMA((2, 2, arrays, per_step)),
        ],
    )
    kernel = functools.partial(_write_slots, per_step, steps)
    return _call(kernel, specs, page, within, cached, new)


def _call(
    kernel: Any, specs: Any, page: jax.Array, within: jax.Array, cached: Pages, new: Pages
) -> Pages:
    """Run a kernel that changes the cache in its own memory."""
    part_bytes = jax.tree.leaves(
        cached.by_position(lambda axis, x: math.prod(_part_shape(axis, x)) * x.dtype.itemsize)
    )
    return pl.pallas_call(
        kernel,
        grid_spec=specs,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cached),
        # Inputs are counted from ``page`` on.
        input_output_aliases={2 + i: i for i in range(len(part_bytes))},
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * len(page) * sum(part_bytes)
        ),
    )(page, within, cached, new)


def _with_token(axis: int, old: jax.Array, token: jax.Array, position: Any) -> jax.Array:
    """Return a part of a page with the token at its position.

    ``position`` counts from the beginning of the page.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, old.shape, axis - 1)
    is_token = index == jax.lax.rem(position, old.shape[axis - 1])
    wide = old.dtype if old.dtype.itemsize > 1 else jnp.float32  # TPUs cannot select 8-bit values
    return jnp.where(is_token, token.astype(wide), old.astype(wide)).astype(old.dtype)


def _part_shape(axis: int, x: jax.Array) -> tuple[int, ...]:
    """Return the shape of the part of a page that is read and written with one position."""
    width = LANES if axis == 3 else ROWS
    return (*x.shape[1:axis], min(width, x.shape[axis]), *x.shape[axis + 1 :])


def _write_slots(
    per_step: int,
    steps: int,
    page: Any,
    within: Any,
    _: LayerCache,
    new: LayerCache,
    cached: LayerCache,
    parts: LayerCache,
    semaphores: Any,
) -> None:
    """Change the parts of ``per_step`` slots in VMEM.

    Meanwhile the parts of the next step are read, and the parts of the last one written. Slots have
    pages of their own where they write, but for the null page, whose content does not matter.

    Args:
        per_step: slots of a grid step.
        steps: steps of the grid.
        page: the page of each slot, in SMEM.
        within: the position of each slot's token in its page.
        _: the cache as input, which is the same memory.
        new: rows of this step's slots.
        cached: the cache as output.
        parts: [2, per_step, ...], for steps in turn.
        semaphores: [2, 2, arrays, per_step]: of reads and writes, for steps in turn.
    """
    step = pl.program_id(0)

    def copies(step: Any, *, write: bool) -> list[Any]:
        """Return the copies of all parts of a step's slots, to or from VMEM."""
        turn = jax.lax.rem(step, 2)
        slot_copies = []

        def copy(axis: int, array: Any, buffer: Any) -> None:
            number = len(slot_copies) // per_step
            width = buffer.shape[axis + 1]
            for i in range(per_step):
                slot = step * per_step + i
                begin = pl.multiple_of(jax.lax.div(within[slot], width) * width, width)
                in_cache = array.at[(page[slot], *[slice(None)] * (axis - 1), pl.ds(begin, width))]
                in_buffer = buffer.at[turn, i]
                semaphore = semaphores.at[int(write), turn, number, i]
                if write:
                    slot_copies.append(pltpu.make_async_copy(in_buffer, in_cache, semaphore))
                else:
                    slot_copies.append(pltpu.make_async_copy(in_cache, in_buffer, semaphore))

        cached.by_position(copy, parts)
        return slot_copies

    def start(step: Any, *, write: bool) -> None:
        for copy in copies(step, write=write):
            copy.start()

    def wait(step: Any, *, write: bool) -> None:
        for copy in copies(step, write=write):
            copy.wait()

    pl.when(step == 0)(lambda: start(0, write=False))
    # The buffer that the next step reads into was written from in the last step.
    pl.when(step > 0)(lambda: wait(step - 1, write=True))
    pl.when(step + 1 < steps)(lambda: start(step + 1, write=False))
    wait(step, write=False)

    def change(axis: int, old: Any, rows: Any) -> None:
        turn = jax.lax.rem(step, 2)
        for i in range(per_step):
            # In float32, as TPUs insert no axis into 8 or 16 bits.
            token = jnp.expand_dims(rows[i].astype(jnp.float32), axis - 1)
            old[turn, i] = _with_token(axis, old[turn, i], token, within[step * per_step + i])

    parts.by_position(change, new)
    start(step, write=True)
    pl.when(step + 1 == steps)(lambda: wait(step, write=True))


def decode_kernel(
    q: jax.Array,
    cached: LayerKV | LayerLatents,
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
        [B, K, G, v].
    """
    slots, kv_heads, group, _ = q.shape
    value_size = cached.value_size
    out_shape = (slots, kv_heads, group, value_size)
    count = pages.shape[1]
    size = cached.length
    page_bytes = sum(x[0].size * x.dtype.itemsize for x in jax.tree.leaves(cached))
    per_step = max(1, min(MAX_STEP_PAGES, MAX_STEP_BYTES // page_bytes, count))
    if window is None:
        begins = jnp.zeros_like(positions)
    else:
        begins = jnp.maximum(positions + 1 - window, 0)

    def slot(b: Any, *_: Any) -> tuple:
        return b, 0, 0, 0

    def page_of_step(i: int) -> Any:
        """Return the spec of one of the pages read in a grid step."""

        def index(b: Any, j: Any, pages: Any, positions: Any, begins: Any) -> tuple:
            """Name the nearest visible page in place of an invisible one, which is not read."""
            first = jax.lax.div(begins[b], size)
            last = jax.lax.div(positions[b], size)
            return pages[b * count + jnp.clip(j * per_step + i, first, last)], 0, 0, 0

        return cached.by_position(lambda axis, x: pl.BlockSpec((None, *x.shape[1:]), index))

    sink_column = None if sinks is None else sinks.astype(jnp.float32)[..., None]
    sinks_spec = None
    if sinks is not None:
        sinks_spec = pl.BlockSpec((kv_heads, group, 1), lambda *_: (0, 0, 0))

    length = count * size
    return pl.pallas_call(
        functools.partial(_attend, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(slots, -(-count // per_step)),
            in_specs=[
                pl.BlockSpec((None, *q.shape[1:]), slot),
                sinks_spec,
                [page_of_step(i) for i in range(per_step)],
            ],
            out_specs=pl.BlockSpec((None, *out_shape[1:]), slot),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, group, n), jnp.float32) for n in (value_size, 1, 1)
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(out_shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * length,
            transcendentals=slots * kv_heads * group * length,
            bytes_accessed=slots * count * page_bytes,
        ),
    )(pages.reshape(-1), positions, begins, q, sink_column, [cached] * per_step)


def _attend(
    pages: Any,
    positions: Any,
    begins: Any,
    q: Any,
    sinks: Any,
    cached: list[LayerKV | LayerLatents],
    out: Any,
    mixed: Any,
    peak: Any,
    total: Any,
    *,
    size: int,
) -> None:
    """Attend from one slot to the pages of one grid step, with a running softmax.

    Args:
        pages: read by the specs of ``cached``.
        positions: [B], in SMEM.
        begins: [B], first visible position of each slot.
        q: [K, G, h].
        sinks: [K, G, 1], or None.
        cached: the step's pages.
        out: [K, G, v], written in the slot's last step.
        mixed: [K, G, v], the running sum of weighted values.
        peak: [K, G, 1], the highest score so far.
        total: [K, G, 1], the running sum of weights.
        size: positions of a page.
    """
    b = pl.program_id(0)
    j = pl.program_id(1)
    position = positions[b]
    begin = begins[b]

    @pl.when(j == 0)
    def start() -> None:
        mixed[...] = jnp.zeros_like(mixed)
        # A sink is a score before all others, of a value of zeros.
        total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0)
        peak[...] = jnp.full_like(peak, MASK_VALUE) if sinks is None else sinks[...]

    for i, page in enumerate(cached):
        first = (j * len(cached) + i) * size
        is_visible = (first <= position) & (begin < first + size)
        add = functools.partial(_add, q, page, first, position, begin, mixed, peak, total)
        pl.when(is_visible)(add)

    @pl.when(j == pl.num_programs(1) - 1)
    def finish() -> None:
        out[...] = (mixed[...] / total[...]).astype(out.dtype)


def _add(
    q: Any,
    page: LayerKV | LayerLatents,
    first: Any,
    position: Any,
    begin: Any,
    mixed: Any,
    peak: Any,
    total: Any,
) -> None:
    """Add one page to the running attention of K heads."""
    queries = q[...]
    if isinstance(page, LayerLatents):
        scores, values, value_scales = _latent_scores(queries, page)
        position_axis = 2
    else:
        scores, values, value_scales = _key_scores(queries, page)
        position_axis = 1

    key_positions = first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    visible = (key_positions <= position) & (key_positions >= begin)
    scores = jnp.where(visible, scores, MASK_VALUE)
    new_peak = jnp.maximum(peak[...], jnp.max(scores, axis=2, keepdims=True))
    shrink = jnp.exp(peak[...] - new_peak)
    weights = jnp.exp(scores - new_peak)
    peak[...] = new_peak
    total[...] = total[...] * shrink + jnp.sum(weights, axis=2, keepdims=True)

    # Stale values may be NaN, which a weight of zero does not remove.
    if value_scales is not None:
        weights = jnp.where(visible, weights * value_scales, 0)
    value_positions = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, position_axis)
    values = jnp.where(value_positions <= position, values, 0)
    weights = weights.astype(queries.dtype)
    page_mixed = jax.lax.dot_general(
        weights, values, (((2,), (position_axis,)), _BY_HEAD), preferred_element_type=jnp.float32
    )
    mixed[...] = mixed[...] * shrink + page_mixed


_BY_HEAD = ((0,), (0,))


def _key_scores(queries: jax.Array, page: LayerKV) -> tuple[jax.Array, jax.Array, Any]:
    """Return scores float32 [K, G, S], values [K, S, v] and their scales [K, 1, S], or None."""
    scores = _scores(queries, page.keys[...])
    values = page.values[...].astype(queries.dtype)
    if page.scales is None:
        return scores, values, None
    return scores * page.scales[:, :1], values, page.scales[:, 1:]


def _latent_scores(queries: jax.Array, page: LayerLatents) -> tuple[jax.Array, jax.Array, Any]:
    """Return scores float32 [1, G, S], latents [1, v, S] and their scales [1, 1, S], or None."""
    rank = page.value_size
    numbers = page.numbers[...].astype(queries.dtype)
    latents = numbers[:, :rank]
    if page.scales is None:
        return _scores(queries, numbers), latents, None
    scores = _scores(queries[..., :rank], latents) * page.scales[:, :1]
    rotary_scores = _scores(queries[..., rank:], numbers[:, rank:]) * page.scales[:, 1:]
    return scores + rotary_scores, latents, page.scales[:, :1]


def _scores(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply [K, G, n] with [K, n, S] -> float32 [K, G, S]."""
    return jax.lax.dot_general(
        queries,
        keys.astype(queries.dtype),
        (((2,), (1,)), _BY_HEAD),
        preferred_element_type=jnp.float32,
    )
