"""Pallas kernels for NVIDIA GPUs, by Triton, of attention over packed token trees.

Shapes as in ``models.tree_kernel``, whose mask and live pairs of blocks these share; n live blocks.

A program holds one tile of queries (of keys, for their gradients) in registers and walks over the
live blocks of the other side alone, whose numbers it reads from a list. So nothing of a masked
block is read, and no sum is shared between programs: results are the same in every run. The
gradients of a key/value head are summed over its group of query heads within a program.

Scores are [queries, keys] here: a warp sums a row without leaving its registers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jax_agent_rl.models.tree_kernel import (
    LANES,
    MASK_VALUE,
    BlockPlan,
    TreeMask,
    pad,
    plan_blocks,
)

BLOCK = LANES
"""Queries, and keys, of the blocks that are live or not; tiles divide it."""
WIDEST_HEAD = 256
"""Numbers of the widest head whose tiles fit a multiprocessor."""
_NARROWEST_HEAD = 16  # of Triton's products
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b
_PLAIN = (((1,), (0,)), ((), ()))


class Tile(NamedTuple):
    """How a program is cut.

    Attributes:
        queries: of a tile.
        keys: of a tile.
        warps: of a program; each has 32 threads.
        stages: tiles of the other side that are loaded ahead, and the one in use.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class MaskArrays(NamedTuple):
    """The arrays of a mask; depths are None without a window.

    Attributes:
        ends: int32 [B, T], end of each key's subtree; 0 for padding.
        key_depths: int32 [B, T].
        query_depths: int32 [B, Q].
        offset_and_window: int32 [2]: index of the first query in the row, and the window.
    """

    ends: Any
    key_depths: Any
    query_depths: Any
    offset_and_window: Any


class LiveBlocks(NamedTuple):
    """The blocks that a block of the other side is not fully masked from.

    Attributes:
        numbers: int32 [B, blocks, n], the live ones first, in order.
        count: int32 [B, blocks, 1].
    """

    numbers: Any
    count: Any


class Gradients(NamedTuple):
    """What the backward pass is given.

    Attributes:
        d_out: [B, H, Q, v].
        normalizer: float32 [B, H, Q], log of each softmax's normalizer.
        mean: float32 [B, H, Q], mean of the values' gradient, weighted by each softmax.
    """

    d_out: Any
    normalizer: Any
    mean: Any


def supports(q: jax.Array, v: jax.Array) -> bool:
    """Return whether the kernels' tiles fit a multiprocessor with heads of these sizes."""
    return max(q.shape[3], v.shape[3]) <= WIDEST_HEAD


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Compute attention and the log of each softmax's normalizer.

    Args:
        q: [B, H, Q, h], already scaled; heads of one key/value head are adjacent.
        k: [B, K, T, h].
        v: [B, K, T, v].
        interpret: compute what the kernels do without a GPU.

    Returns:
        [B, H, Q, v] and float32 [B, H, Q].
    """
    batch, heads, count, _ = q.shape
    plan = _plan(q, k, v, tree_mask)
    inputs = plan.inputs
    tile = forward_tile(inputs.q.shape[3], inputs.q.dtype.itemsize)
    padded_count = inputs.q.shape[2]
    value_size = inputs.v.shape[3]

    run = _call(
        functools.partial(_forward_kernel, tile=tile),
        plan,
        tile,
        by_key=False,
        outputs=(
            jax.ShapeDtypeStruct((batch, heads, padded_count, value_size), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, padded_count), jnp.float32),
        ),
        products=2,
        interpret=interpret,
    )
    out, normalizer = run(inputs.q, inputs.k, inputs.v, _marks(plan), _live_blocks(plan.live))
    return out[:, :, :count, : v.shape[3]], normalizer[:, :, :count]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree_mask: TreeMask,
    output: jax.Array,
    normalizer: jax.Array,
    d_output: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v.

    They follow from the results of :func:`forward` and the gradient of its output.
    """
    plan = _plan(q, k, v, tree_mask)
    inputs = plan.inputs
    tile = backward_tile(inputs.q.shape[3], inputs.q.dtype.itemsize)
    padding = inputs.q.shape[2] - q.shape[2]
    marks = _marks(plan)
    mean = jnp.sum(output * d_output, axis=-1, dtype=jnp.float32)
    gradients = Gradients(
        d_out=pad(_pad_head(d_output), 2, padding),
        # Queries that pad a block get no weight: exp(score - 1e30) = 0.
        normalizer=pad(normalizer, 2, padding, -MASK_VALUE),
        mean=pad(mean, 2, padding),
    )
    dq_shape = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)
    dk_shape = jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype)
    dv_shape = jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype)

    queries = _call(
        functools.partial(_query_gradient_kernel, tile=tile),
        plan,
        tile,
        by_key=False,
        outputs=(dq_shape,),
        products=3,
        gradients=gradients,
        interpret=interpret,
    )
    live = _live_blocks(plan.live)
    (dq,) = queries(inputs.q, inputs.k, inputs.v, marks, live, gradients)

    keys = _call(
        functools.partial(_key_gradient_kernel, tile=tile),
        plan,
        tile,
        by_key=True,
        outputs=(dk_shape, dv_shape),
        products=4,
        gradients=gradients,
        interpret=interpret,
    )
    live = _live_blocks(plan.live.mT)
    dk, dv = keys(inputs.q, inputs.k, inputs.v, marks, live, gradients)
    return (
        dq[:, :, : q.shape[2], : q.shape[3]],
        dk[:, :, : k.shape[2], : k.shape[3]],
        dv[:, :, : v.shape[2], : v.shape[3]],
    )


def forward_tile(size: int, itemsize: int) -> Tile:
    """Return the tile of the forward pass.

    Tiles are as large as they can be without spilling registers, as ptxas says for sm_90a.

    Args:
        size: numbers of a head.
        itemsize: bytes of a number.
    """
    if size * itemsize <= 256:  # 128 numbers in bfloat16
        return Tile(queries=128, keys=64, warps=8, stages=2)
    if size * itemsize <= 512:
        return Tile(queries=64, keys=32, warps=4, stages=2)
    return Tile(queries=32, keys=32, warps=8, stages=1)


def backward_tile(size: int, itemsize: int) -> Tile:
    """Return the tile of the backward pass, which holds twice as many arrays; see above."""
    if size * itemsize <= 256:
        return Tile(queries=64, keys=64, warps=8, stages=2)
    if size * itemsize <= 512:
        return Tile(queries=32, keys=32, warps=8, stages=1)
    return Tile(queries=16, keys=16, warps=8, stages=1)


# --- around the kernels ---------------------------------------------------------------------------


def _plan(q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask) -> BlockPlan:
    """Pad heads to powers of two, as Triton's arrays are, and rows to whole blocks."""
    return plan_blocks(_pad_head(q), _pad_head(k), _pad_head(v), tree_mask, BLOCK)


def _pad_head(x: jax.Array) -> jax.Array:
    size = x.shape[3]
    padded_size = max(_NARROWEST_HEAD, 1 << (size - 1).bit_length())
    return pad(x, 3, padded_size - size)


def _marks(plan: BlockPlan) -> MaskArrays:
    """Return a mask's arrays without the axes that TPUs want."""
    marks = plan.inputs.marks
    key_depths = None
    query_depths = None
    if marks.key_depths is not None:
        key_depths = marks.key_depths[..., 0]
        query_depths = marks.query_depths[:, 0]
    return MaskArrays(marks.ends[..., 0], key_depths, query_depths, plan.offset_and_window)


def _live_blocks(live: jax.Array) -> LiveBlocks:
    """List the live blocks of each block.

    Args:
        live: bool [B, blocks, blocks of the other side].
    """
    numbers = jnp.argsort(~live, axis=-1, stable=True).astype(jnp.int32)
    count = jnp.sum(live, axis=-1, keepdims=True, dtype=jnp.int32)
    return LiveBlocks(numbers, count)


def _call(
    kernel: Callable[..., None],
    plan: BlockPlan,
    tile: Tile,
    *,
    by_key: bool,
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    products: int,
    gradients: Gradients | None = None,
    interpret: bool,
) -> Callable[..., Any]:
    """Return a kernel's call, a program for each tile of queries, or of keys.

    Args:
        by_key: programs are for tiles of keys; they see all query heads of their key/value head.
        products: matrix products of a tile, for the estimate of the cost.
        gradients: given where the kernel takes them.
    """
    inputs = plan.inputs
    batch, heads, query_count, size = inputs.q.shape
    kv_heads, key_count = inputs.k.shape[1:3]
    value_size = inputs.v.shape[3]
    group = heads // kv_heads

    def cut(*shape: int | None, head: int | None = None, tokens: int | None = None) -> pl.BlockSpec:
        """Return the part of an array that a program is given.

        Args:
            shape: its shape, after the row.
            head: axis that the program's head selects from, if any.
            tokens: axis that the program's tile selects from, if any.
        """

        def index(number: Any, program_head: Any, row: Any) -> tuple:
            positions: list[Any] = [row] + [0] * len(shape)
            if head is not None:
                positions[head] = program_head
            if tokens is not None:
                positions[tokens] = number
            return tuple(positions)

        return pl.BlockSpec((None, *shape), index)

    def of_group(spec: pl.BlockSpec) -> pl.BlockSpec:
        """Let a program of a query head read its key/value head."""
        assert spec.index_map is not None
        index = spec.index_map
        return pl.BlockSpec(
            spec.block_shape,
            lambda number, head, row: index(number, jax.lax.div(head, jnp.int32(group)), row),
        )

    if by_key:
        grid = (key_count // tile.keys, kv_heads, batch)
        tiles_per_block = BLOCK // tile.keys
        q_spec = cut(group, query_count, size, head=1)
        k_spec = cut(None, tile.keys, size, head=1, tokens=2)
        v_spec = cut(None, tile.keys, value_size, head=1, tokens=2)
        d_out_spec = cut(group, query_count, value_size, head=1)
        statistic = cut(group, query_count, head=1)
        key_mark = cut(tile.keys, tokens=1)
        query_mark = cut(query_count)
        out_specs = (k_spec, v_spec)
    else:
        grid = (query_count // tile.queries, heads, batch)
        tiles_per_block = BLOCK // tile.queries
        q_spec = cut(None, tile.queries, size, head=1, tokens=2)
        k_spec = of_group(cut(None, key_count, size, head=1))
        v_spec = of_group(cut(None, key_count, value_size, head=1))
        d_out_spec = cut(None, tile.queries, value_size, head=1, tokens=2)
        statistic = cut(None, tile.queries, head=1, tokens=2)
        key_mark = cut(key_count)
        query_mark = cut(tile.queries, tokens=1)
        out_specs = (q_spec,) if gradients is not None else (d_out_spec, statistic)

    other_blocks = plan.live.shape[1 if by_key else 2]

    def of_block(length: int) -> pl.BlockSpec:
        """Return the part of a list of live blocks: that of the block that a tile is in."""
        return pl.BlockSpec(
            (None, None, length),
            lambda number, head, row: (row, jax.lax.div(number, jnp.int32(tiles_per_block)), 0),
        )

    has_depths = inputs.marks.key_depths is not None
    marks = MaskArrays(
        key_mark,
        key_mark if has_depths else None,
        query_mark if has_depths else None,
        pl.BlockSpec((2,), lambda number, head, row: (0,)),
    )
    in_specs: list[Any] = [q_spec, k_spec, v_spec, marks]
    in_specs.append(LiveBlocks(of_block(other_blocks), of_block(1)))
    if gradients is not None:
        in_specs.append(Gradients(d_out_spec, statistic, statistic))

    # About half of all scores are masked.
    pairs = batch * heads * query_count * key_count // 2
    arrays = jax.tree.leaves((inputs, gradients, outputs))
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * size * products,
            transcendentals=pairs,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
        ),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),  # type: ignore[attr-defined]
    )


# --- in the kernels -------------------------------------------------------------------------------


def _product(a: jax.Array, b: jax.Array, contract: tuple = _PLAIN) -> jax.Array:
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _visible(
    marks: MaskArrays, query: jax.Array, key: jax.Array, query_marks: Any, key_marks: Any
) -> jax.Array:
    """Return bool [queries, keys]: which keys of a tile its queries attend to.

    Args:
        query: int32 [queries], index in the row.
        key: int32 [keys], likewise.
        query_marks: where the queries' marks are in what the program is given.
        key_marks: likewise.
    """
    ends = marks.ends[key_marks]
    visible = (key[None, :] <= query[:, None]) & (query[:, None] < ends[None, :])
    if marks.key_depths is not None:
        query_depths = marks.query_depths[query_marks]
        key_depths = marks.key_depths[key_marks]
        distance = query_depths[:, None] - key_depths[None, :]
        visible &= distance < marks.offset_and_window[1]
    return visible


def _score_gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, gradients: Gradients
) -> tuple[jax.Array, jax.Array]:
    """Return the weights of a tile, and the gradients of its scores, float32 [queries, keys] each.

    Args:
        gradients: of the tile's queries.
    """
    scores = jnp.where(visible, _product(q, k, _ROWS_BY_ROWS), MASK_VALUE)
    weights = jnp.exp(scores - gradients.normalizer[:, None])
    d_weights = _product(gradients.d_out, v, _ROWS_BY_ROWS)
    return weights, weights * (d_weights - gradients.mean[:, None])


def _tile_of(live: LiveBlocks, step: jax.Array, size: int) -> jax.Array:
    """Return the first token of the tile at a step; live blocks have several tiles each."""
    tiles = BLOCK // size
    block = live.numbers[jax.lax.div(step, jnp.int32(tiles))]
    return block * BLOCK + jax.lax.rem(step, jnp.int32(tiles)) * size


def _forward_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    marks: MaskArrays,
    live: LiveBlocks,
    out_ref: Any,
    normalizer_ref: Any,
    *,
    tile: Tile,
) -> None:
    q = q_ref[...]
    first = marks.offset_and_window[0] + pl.program_id(0) * tile.queries
    query = first + jnp.arange(tile.queries, dtype=jnp.int32)

    def attend(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mixed, peak, total = carry
        begin = _tile_of(live, step, tile.keys)
        rows = pl.ds(begin, tile.keys)
        k = k_ref[rows, :]
        v = v_ref[rows, :]
        key = begin + jnp.arange(tile.keys, dtype=jnp.int32)
        visible = _visible(marks, query, key, slice(None), rows)

        scores = jnp.where(visible, _product(q, k, _ROWS_BY_ROWS), MASK_VALUE)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        shrink = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[:, None])
        mixed = mixed * shrink[:, None] + _product(weights.astype(v.dtype), v)
        return mixed, new_peak, total * shrink + jnp.sum(weights, axis=1)

    begin = (
        jnp.zeros((tile.queries, v_ref.shape[1]), jnp.float32),
        jnp.full((tile.queries,), MASK_VALUE, jnp.float32),
        jnp.zeros((tile.queries,), jnp.float32),
    )
    steps = live.count[0] * (BLOCK // tile.keys)
    mixed, peak, total = jax.lax.fori_loop(0, steps, attend, begin)
    out_ref[...] = (mixed / total[:, None]).astype(out_ref.dtype)
    normalizer_ref[...] = peak + jnp.log(total)


def _query_gradient_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    marks: MaskArrays,
    live: LiveBlocks,
    gradients: Gradients,
    dq_ref: Any,
    *,
    tile: Tile,
) -> None:
    q = q_ref[...]
    d_out = gradients.d_out[...]
    normalizer = gradients.normalizer[...]
    mean = gradients.mean[...]
    first = marks.offset_and_window[0] + pl.program_id(0) * tile.queries
    query = first + jnp.arange(tile.queries, dtype=jnp.int32)

    def add(step: jax.Array, dq: jax.Array) -> jax.Array:
        begin = _tile_of(live, step, tile.keys)
        rows = pl.ds(begin, tile.keys)
        k = k_ref[rows, :]
        v = v_ref[rows, :]
        key = begin + jnp.arange(tile.keys, dtype=jnp.int32)
        visible = _visible(marks, query, key, slice(None), rows)

        _, d_scores = _score_gradients(q, k, v, visible, Gradients(d_out, normalizer, mean))
        return dq + _product(d_scores.astype(k.dtype), k)

    steps = live.count[0] * (BLOCK // tile.keys)
    dq = jax.lax.fori_loop(0, steps, add, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_gradient_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    marks: MaskArrays,
    live: LiveBlocks,
    gradients: Gradients,
    dk_ref: Any,
    dv_ref: Any,
    *,
    tile: Tile,
) -> None:
    k = k_ref[...]
    v = v_ref[...]
    key = pl.program_id(0) * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
    group = q_ref.shape[0]

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk, dv = carry
        # All query heads of the group in turn, so that they share what they read of the mask.
        head = jax.lax.rem(step, jnp.int32(group))
        begin = _tile_of(live, jax.lax.div(step, jnp.int32(group)), tile.queries)
        rows = pl.ds(begin, tile.queries)
        q = q_ref[head, rows, :]
        d_out = gradients.d_out[head, rows, :]
        normalizer = gradients.normalizer[head, rows]
        mean = gradients.mean[head, rows]
        query = marks.offset_and_window[0] + begin + jnp.arange(tile.queries, dtype=jnp.int32)
        visible = _visible(marks, query, key, rows, slice(None))

        tile_gradients = Gradients(d_out, normalizer, mean)
        weights, d_scores = _score_gradients(q, k, v, visible, tile_gradients)
        dk += _product(d_scores.astype(q.dtype), q, _COLUMNS_BY_COLUMNS)
        dv += _product(weights.astype(d_out.dtype), d_out, _COLUMNS_BY_COLUMNS)
        return dk, dv

    begin = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    steps = live.count[0] * (BLOCK // tile.queries) * group
    dk, dv = jax.lax.fori_loop(0, steps, add, begin)
    dk_ref[...] = dk.astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)
