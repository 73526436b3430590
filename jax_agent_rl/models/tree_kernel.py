"""Attention over packed token trees: the mask, and Pallas kernels for TPUs, forward and backward.

Shapes: B rows, Q queries, T keys, H query heads, K key/value heads, G = H / K, h head size, n
blocks.

The recurrence is FlashAttention's (Dao et al. 2022, arXiv 2205.14135): a program holds one block of
scores, in float32, and the running maximum and sum of each query's softmax, so the program does not
grow with the row. In addition:

- Fully masked pairs of blocks are found once, outside, and neither computed nor read.
- Scores are [keys, queries], so that values per query (softmax statistics, index, depth) are a row
  of lanes, as in memory, and only values per key (end of its subtree, depth) are a column.
- A grid step serves one query head, so its block is a plain matrix; the G heads of a key/value head
  share a gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK, LANES = (
    1024,
    128,
)  # 2,048 in MaxText's recipes for v6e; it must fit the chip's vector memory, too
_WIDEST_HEAD = 512  # bytes of a head of which blocks of 1,024 fit
MASK_VALUE = -1e30  # masked score; finite, so that rows of padding have no NaN
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b


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


class KernelInputs(NamedTuple):
    """The arrays of a kernel, or their blocks; the last three are of the backward pass.

    Attributes:
        q: [B, H, Q, h].
        k: [B, K, T, h].
        v: [B, K, T, h].
        marks: of the mask.
        d_out: [B, H, Q, h], gradient of the output.
        normalizer: float32 [B, H, 1, Q], log of each softmax's.
        mean: float32 [B, H, 1, Q], of the gradient, by the softmax's weights.
    """

    q: Any
    k: Any
    v: Any
    marks: Any
    d_out: Any = None
    normalizer: Any = None
    mean: Any = None


_KINDS = KernelInputs(
    "q", "k", "k", Marks("key mark", "key mark", "query mark"), "q", "statistic", "statistic"
)
"""How each is cut into blocks."""


class BlockPlan(NamedTuple):
    """Padded arrays of one kernel call, and its blocks.

    Attributes:
        inputs: of the forward pass.
        place: int32 [2]: index of the first query, window.
        live: bool [B, query blocks, key blocks]: false if the pair is fully masked.
        q_block: queries per block.
        k_block: keys per block.
    """

    inputs: KernelInputs
    place: jax.Array
    live: jax.Array
    q_block: int
    k_block: int


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, *, block: int = BLOCK
) -> tuple[jax.Array, jax.Array]:
    """Compute attention and the log of each softmax's normalizer.

    Args:
        q: [B, H, Q, h], already scaled; heads of one key/value head are adjacent.
        k: [B, K, T, h].
        v: [B, K, T, h].
        tree_mask: of the B rows.
        block: most queries, and keys, at a time; a multiple of 128.

    Returns:
        [B, H, Q, h] and float32 [B, H, Q].
    """
    batch, heads, count, size = q.shape
    plan = plan_blocks(q, k, v, tree_mask, block)
    padded = plan.inputs.q.shape
    out, normalizer = _call(
        _forward_kernel,
        plan,
        plan.inputs,
        by_key=False,
        outputs=(
            jax.ShapeDtypeStruct(padded, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, padded[2]), jnp.float32),
        ),
        output_kinds=("q", "statistic"),
        scratch=((size, plan.q_block), (1, plan.q_block), (1, plan.q_block)),
        products=2,
    )
    return out[:, :, :count], normalizer[:, :, 0, :count]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree_mask: TreeMask,
    output: jax.Array,
    normalizer: jax.Array,
    d_output: jax.Array,
    *,
    block: int = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return gradients of q, k and v from the results of :func:`forward` and the gradient of its output."""
    count, keys, size = q.shape[2], k.shape[2], q.shape[3]
    plan = plan_blocks(q, k, v, tree_mask, block)
    more = plan.inputs.q.shape[2] - count
    mean = jnp.sum(output * d_output, axis=-1, dtype=jnp.float32)
    inputs = plan.inputs._replace(
        d_out=pad(d_output, 2, more),
        # Queries that pad a block get no weight: exp(score - 1e30) = 0.
        normalizer=pad(normalizer[:, :, None], 3, more, -MASK_VALUE),
        mean=pad(mean[:, :, None], 3, more),
    )
    d_query, d_key, d_value = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:3])
    (dq,) = _call(
        _query_gradient_kernel,
        plan,
        inputs,
        by_key=False,
        outputs=(d_query,),
        output_kinds=("q",),
        scratch=((plan.q_block, size),),
        products=3,
    )
    dk, dv = _call(
        _key_gradient_kernel,
        plan,
        inputs,
        by_key=True,
        outputs=(d_key, d_value),
        output_kinds=("k", "k"),
        scratch=((plan.k_block, size), (plan.k_block, size)),
        products=4,
    )
    return dq[:, :, :count], dk[:, :, :keys], dv[:, :, :keys]


def _call(
    kernel: Any,
    plan: BlockPlan,
    inputs: KernelInputs,
    *,
    by_key: bool,
    outputs: tuple,
    output_kinds: tuple,
    scratch: tuple[tuple[int, int], ...],
    products: int,
) -> Any:
    """Run a kernel over pairs of blocks: all keys of one block of queries, or vice versa.

    Args:
        kernel: the kernel.
        plan: the blocks.
        inputs: padded arrays.
        by_key: the grid is (B, K, key blocks, G, query blocks) instead of (B, H, query blocks, key
            blocks).
        outputs: shapes and dtypes.
        output_kinds: how each output is cut.
        scratch: shapes of float32 buffers that live as long as the outer block.
        products: matrix products per pair of blocks.
    """
    batch, q_blocks, k_blocks = plan.live.shape
    heads, kv_heads, size = inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[3]
    group = heads // kv_heads

    def at(*step_and_scalars: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return row, query head, key/value head, query block and key block of a step."""
        *step, fetched, _ = step_and_scalars
        if by_key:
            row, kv_head, j, member, i = step
            return (
                row,
                kv_head * group + member,
                kv_head,
                fetched[(row * k_blocks + j) * q_blocks + i],
                j,
            )
        row, head, i, j = step
        return (
            row,
            head,
            jax.lax.div(head, jnp.int32(group)),
            i,
            fetched[(row * q_blocks + i) * k_blocks + j],
        )

    cuts = {  # shape of a block, and its index
        "q": ((None, None, plan.q_block, size), lambda row, head, kv_head, i, j: (row, head, i, 0)),
        "k": (
            (None, None, plan.k_block, size),
            lambda row, head, kv_head, i, j: (row, kv_head, j, 0),
        ),
        "statistic": (
            (None, None, 1, plan.q_block),
            lambda row, head, kv_head, i, j: (row, head, 0, i),
        ),
        "key mark": ((None, plan.k_block, 1), lambda row, head, kv_head, i, j: (row, j, 0)),
        "query mark": ((None, 1, plan.q_block), lambda row, head, kv_head, i, j: (row, 0, i)),
    }

    def cut(kind: str) -> pl.BlockSpec:
        shape, index = cuts[kind]
        return pl.BlockSpec(shape, lambda *step: index(*at(*step)))

    grid = (
        (batch, kv_heads, k_blocks, group, q_blocks)
        if by_key
        else (batch, heads, q_blocks, k_blocks)
    )
    summed = 2 if by_key else 1
    pairs = batch * heads * q_blocks * k_blocks * plan.q_block * plan.k_block // 2
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=(
                jax.tree.map(lambda kind, x: None if x is None else cut(kind), _KINDS, inputs),
            ),
            out_specs=jax.tree.map(cut, output_kinds),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (len(grid) - summed) + ("arbitrary",) * summed
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * size * products,
            transcendentals=pairs,
            bytes_accessed=sum(
                math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((inputs, outputs))
            ),
        ),
    )(fetched_blocks(plan.live.mT if by_key else plan.live), plan.place, inputs)


def _scores(place: Any, blocks: KernelInputs, i: Any, j: Any) -> jax.Array:
    """Return masked scores float32 [keys, queries] of query block i and key block j."""
    marks, scores = blocks.marks, _product(blocks.k[...], blocks.q[...], _ROWS_BY_ROWS)
    key = j * scores.shape[0] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    query = place[0] + i * scores.shape[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    visible = (key <= query) & (query < marks.ends[...])
    if marks.key_depths is not None:
        visible &= marks.query_depths[...] - marks.key_depths[...] < place[1]
    return jnp.where(visible, scores, MASK_VALUE)


def _product(a: jax.Array, b: jax.Array, contract: tuple = (((1,), (0,)), ((), ()))) -> jax.Array:
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _is_live(fetched: Any, outer: Any, inner: Any, outers: Any, inners: Any) -> jax.Array:
    return fetched[(pl.program_id(0) * outers + outer) * inners + inner] == inner


def _forward_kernel(
    fetched: Any,
    place: Any,
    blocks: KernelInputs,
    out: Any,
    normalizer: Any,
    mixed: Any,
    peak: Any,
    total: Any,
) -> None:
    i, j, count = pl.program_id(2), pl.program_id(3), pl.num_programs(3)

    @pl.when(j == 0)
    def begin() -> None:
        mixed[...] = jnp.zeros_like(mixed)
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, MASK_VALUE)

    @pl.when(_is_live(fetched, i, j, pl.num_programs(2), count))
    def attend() -> None:
        scores, v = _scores(place, blocks, i, j), blocks.v
        higher = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        shrink = jnp.exp(peak[...] - higher)
        weights = jnp.exp(scores - higher)
        peak[...] = higher
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        mixed[...] = mixed[...] * shrink + _product(
            v[...], weights.astype(v.dtype), _COLUMNS_BY_COLUMNS
        )

    @pl.when(j == count - 1)
    def end() -> None:
        out[...] = (mixed[...] / total[...]).T.astype(out.dtype)
        normalizer[...] = peak[...] + jnp.log(total[...])


def _weights_and_gradient(
    place: Any, blocks: KernelInputs, i: Any, j: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the softmax's weights and the gradient of its scores, [keys, queries]."""
    weights = jnp.exp(_scores(place, blocks, i, j) - blocks.normalizer[...])
    d_weights = _product(blocks.v[...], blocks.d_out[...], _ROWS_BY_ROWS)
    dtype = blocks.q.dtype
    return weights.astype(dtype), (weights * (d_weights - blocks.mean[...])).astype(dtype)


def _query_gradient_kernel(
    fetched: Any, place: Any, blocks: KernelInputs, dq: Any, summed: Any
) -> None:
    i, j, count = pl.program_id(2), pl.program_id(3), pl.num_programs(3)

    @pl.when(j == 0)
    def begin() -> None:
        summed[...] = jnp.zeros_like(summed)

    @pl.when(_is_live(fetched, i, j, pl.num_programs(2), count))
    def add() -> None:
        _, d_scores = _weights_and_gradient(place, blocks, i, j)
        summed[...] += _product(d_scores, blocks.k[...], _COLUMNS_BY_COLUMNS)

    @pl.when(j == count - 1)
    def end() -> None:
        dq[...] = summed[...].astype(dq.dtype)


def _key_gradient_kernel(
    fetched: Any, place: Any, blocks: KernelInputs, dk: Any, dv: Any, k_sum: Any, v_sum: Any
) -> None:
    j, member, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    members, count = pl.num_programs(3), pl.num_programs(4)

    @pl.when((member == 0) & (i == 0))
    def begin() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    @pl.when(_is_live(fetched, j, i, pl.num_programs(2), count))
    def add() -> None:
        weights, d_scores = _weights_and_gradient(place, blocks, i, j)
        k_sum[...] += _product(d_scores, blocks.q[...])
        v_sum[...] += _product(weights, blocks.d_out[...])

    @pl.when((member == members - 1) & (i == count - 1))
    def end() -> None:
        dk[...] = k_sum[...].astype(dk.dtype)
        dv[...] = v_sum[...].astype(dv.dtype)


def plan_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, block: int
) -> BlockPlan:
    """Pad arrays to whole blocks of at most ``block`` (a multiple of 128), and find the live pairs of blocks."""
    count, keys = q.shape[2], k.shape[2]
    if q.shape[3] * q.dtype.itemsize > _WIDEST_HEAD:
        block = max(LANES, block // 2)
    q_block, k_block = (min(block, n + -n % LANES) for n in (count, keys))
    more, more_keys = -count % q_block, -keys % k_block
    first = jnp.int32(0) if tree_mask.offset is None else tree_mask.offset.astype(jnp.int32)
    window = jnp.int32(0)
    marks = Marks(pad(tree_mask.subtree_end, 1, more_keys)[..., None])
    if tree_mask.window is not None and tree_mask.positions is not None:
        window = tree_mask.window.astype(jnp.int32)
        asking = jax.lax.dynamic_slice_in_dim(tree_mask.positions, first, count, axis=1)
        asking = jnp.pad(asking, ((0, 0), (0, more)), mode="edge")
        marks = Marks(
            marks.ends, pad(tree_mask.positions, 1, more_keys)[..., None], asking[:, None]
        )
    return BlockPlan(
        inputs=KernelInputs(pad(q, 2, more), pad(k, 2, more_keys), pad(v, 2, more_keys), marks),
        place=jnp.stack([first, window]),
        live=_live(marks, first, window, count + more, q_block, k_block),
        q_block=q_block,
        k_block=k_block,
    )


def _live(
    marks: Marks, first: jax.Array, window: jax.Array, count: int, q_block: int, k_block: int
) -> jax.Array:
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

    A masked block keeps the one before it, so that nothing is read; the first live one is read
    early.
    """
    step = jnp.arange(live.shape[-1], dtype=jnp.int32)
    latest = jax.lax.cummax(jnp.where(live, step, -1), axis=2)
    return jnp.where(
        latest < 0, jnp.argmax(live, axis=-1, keepdims=True).astype(jnp.int32), latest
    ).reshape(-1)


def pad(x: jax.Array, axis: int, more: int, value: float = 0) -> jax.Array:
    """Append ``more`` of a value to an axis."""
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value)
