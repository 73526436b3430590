"""Attention over packed token trees as Pallas kernels for TPUs, forward and backward.

Shapes: B rows, Q queries, T keys, H query heads, K key/value heads, G = H / K, h head size, n blocks.

The recurrence is FlashAttention's (Dao et al. 2022, arXiv 2205.14135): a program holds one block of scores, in float32,
and the running maximum and sum of each query's softmax, so the program does not grow with the row. In addition:

- Fully masked pairs of blocks are found once, outside, and neither computed nor read.
- Scores are [keys, queries], so that values per query (softmax statistics, index, depth) are a row of lanes, as in
  memory, and only values per key (end of its subtree, depth) are a column.
- One grid step serves one query head, so a head's block is a plain matrix; the G heads of one key/value head add up
  their gradients in the same buffer.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models.tree_mask import (
    BLOCK,
    MASK_VALUE,
    BlockPlan,
    Marks,
    TreeMask,
    fetched_blocks,
    pad,
    plan_blocks,
)

_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b


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
    out, normalizer = _call(
        _forward_kernel,
        plan,
        by_key=False,
        inputs=(plan.q, plan.k, plan.v, plan.marks),
        kinds=("q", "k", "k", _mark_kinds(plan.marks)),
        outputs=(
            jax.ShapeDtypeStruct(plan.q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, plan.q.shape[2]), jnp.float32),
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
    more = plan.q.shape[2] - count
    mean = jnp.sum(output * d_output, axis=-1, dtype=jnp.float32)
    # Queries that pad a block get no weight: exp(score - 1e30) = 0.
    statistics = (pad(normalizer[:, :, None], 3, more, -MASK_VALUE), pad(mean[:, :, None], 3, more))
    inputs = (plan.q, plan.k, plan.v, plan.marks, pad(d_output, 2, more), *statistics)
    kinds = ("q", "k", "k", _mark_kinds(plan.marks), "q", "statistic", "statistic")
    (dq,) = _call(
        _query_gradient_kernel,
        plan,
        by_key=False,
        inputs=inputs,
        kinds=kinds,
        outputs=(jax.ShapeDtypeStruct(plan.q.shape, q.dtype),),
        output_kinds=("q",),
        scratch=((plan.q_block, size),),
        products=3,
    )
    dk, dv = _call(
        _key_gradient_kernel,
        plan,
        by_key=True,
        inputs=inputs,
        kinds=kinds,
        outputs=(jax.ShapeDtypeStruct(plan.k.shape, k.dtype), jax.ShapeDtypeStruct(plan.v.shape, v.dtype)),
        output_kinds=("k", "k"),
        scratch=((plan.k_block, size), (plan.k_block, size)),
        products=4,
    )
    return dq[:, :, :count], dk[:, :, :keys], dv[:, :, :keys]


def _mark_kinds(marks: Marks) -> Marks:
    if marks.key_depths is None:
        return Marks("key mark")
    return Marks("key mark", "key mark", "query mark")


def _call(
    kernel: Any,
    plan: BlockPlan,
    *,
    by_key: bool,
    inputs: tuple,
    kinds: tuple,
    outputs: tuple,
    output_kinds: tuple,
    scratch: tuple[tuple[int, int], ...],
    products: int,
) -> Any:
    """Run a kernel over pairs of blocks: all keys of one block of queries, or vice versa.

    Args:
        kernel: the kernel.
        plan: padded arrays and live blocks.
        by_key: the grid is (B, K, key blocks, G, query blocks) instead of (B, H, query blocks, key blocks).
        inputs: arrays.
        kinds: how each input is cut, in the tree of ``inputs``.
        outputs: shapes and dtypes.
        output_kinds: how each output is cut.
        scratch: shapes of float32 buffers that live as long as the outer block.
        products: matrix products per pair of blocks.
    """
    batch, q_blocks, k_blocks = plan.live.shape
    heads, kv_heads, size = plan.q.shape[1], plan.k.shape[1], plan.q.shape[3]
    group = heads // kv_heads

    def at(step: tuple, fetched: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return row, query head, key/value head, query block and key block."""
        if by_key:
            row, kv_head, j, member, i = step
            return row, kv_head * group + member, kv_head, fetched[(row * k_blocks + j) * q_blocks + i], j
        row, head, i, j = step
        return row, head, jax.lax.div(head, jnp.int32(group)), i, fetched[(row * q_blocks + i) * k_blocks + j]

    def cut(kind: str) -> pl.BlockSpec:
        def index(*step_and_scalars: Any) -> tuple:
            *step, fetched, _ = step_and_scalars
            row, head, kv_head, i, j = at(tuple(step), fetched)
            return {
                "q": (row, head, i, 0),
                "k": (row, kv_head, j, 0),
                "statistic": (row, head, 0, i),
                "key mark": (row, j, 0),
                "query mark": (row, 0, i),
            }[kind]

        shape = {
            "q": (None, None, plan.q_block, size),
            "k": (None, None, plan.k_block, size),
            "statistic": (None, None, 1, plan.q_block),
            "key mark": (None, plan.k_block, 1),
            "query mark": (None, 1, plan.q_block),
        }[kind]
        return pl.BlockSpec(shape, index)

    grid = (batch, kv_heads, k_blocks, group, q_blocks) if by_key else (batch, heads, q_blocks, k_blocks)
    summed = 2 if by_key else 1
    pairs = batch * heads * q_blocks * k_blocks * plan.q_block * plan.k_block // 2
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=jax.tree.map(cut, kinds),
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
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((inputs, outputs))),
        ),
    )(fetched_blocks(plan.live.mT if by_key else plan.live), plan.place, *inputs)


def _scores(place: Any, q: Any, k: Any, marks: Marks, i: Any, j: Any) -> jax.Array:
    """Return masked scores float32 [keys, queries] of query block i and key block j."""
    scores = _product(k[...], q[...], _ROWS_BY_ROWS)
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
    q: Any,
    k: Any,
    v: Any,
    marks: Marks,
    out: Any,
    normalizer: Any,
    mixed: Any,
    peak: Any,
    total: Any,
) -> None:
    i, j, blocks = pl.program_id(2), pl.program_id(3), pl.num_programs(3)

    @pl.when(j == 0)
    def begin() -> None:
        mixed[...] = jnp.zeros_like(mixed)
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, MASK_VALUE)

    @pl.when(_is_live(fetched, i, j, pl.num_programs(2), blocks))
    def attend() -> None:
        scores = _scores(place, q, k, marks, i, j)
        higher = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        shrink = jnp.exp(peak[...] - higher)
        weights = jnp.exp(scores - higher)
        peak[...] = higher
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        mixed[...] = mixed[...] * shrink + _product(v[...], weights.astype(v.dtype), _COLUMNS_BY_COLUMNS)

    @pl.when(j == blocks - 1)
    def end() -> None:
        out[...] = (mixed[...] / total[...]).T.astype(out.dtype)
        normalizer[...] = peak[...] + jnp.log(total[...])


def _weights_and_gradient(
    place: Any, q: Any, k: Any, v: Any, marks: Marks, d_out: Any, normalizer: Any, mean: Any, i: Any, j: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the softmax's weights and the gradient of its scores, [keys, queries]."""
    weights = jnp.exp(_scores(place, q, k, marks, i, j) - normalizer[...])
    d_weights = _product(v[...], d_out[...], _ROWS_BY_ROWS)
    return weights.astype(q.dtype), (weights * (d_weights - mean[...])).astype(q.dtype)


def _query_gradient_kernel(
    fetched: Any,
    place: Any,
    q: Any,
    k: Any,
    v: Any,
    marks: Marks,
    d_out: Any,
    normalizer: Any,
    mean: Any,
    dq: Any,
    summed: Any,
) -> None:
    i, j, blocks = pl.program_id(2), pl.program_id(3), pl.num_programs(3)

    @pl.when(j == 0)
    def begin() -> None:
        summed[...] = jnp.zeros_like(summed)

    @pl.when(_is_live(fetched, i, j, pl.num_programs(2), blocks))
    def add() -> None:
        _, d_scores = _weights_and_gradient(place, q, k, v, marks, d_out, normalizer, mean, i, j)
        summed[...] += _product(d_scores, k[...], _COLUMNS_BY_COLUMNS)

    @pl.when(j == blocks - 1)
    def end() -> None:
        dq[...] = summed[...].astype(dq.dtype)


def _key_gradient_kernel(
    fetched: Any,
    place: Any,
    q: Any,
    k: Any,
    v: Any,
    marks: Marks,
    d_out: Any,
    normalizer: Any,
    mean: Any,
    dk: Any,
    dv: Any,
    k_sum: Any,
    v_sum: Any,
) -> None:
    j, member, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    members, blocks = pl.num_programs(3), pl.num_programs(4)

    @pl.when((member == 0) & (i == 0))
    def begin() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    @pl.when(_is_live(fetched, j, i, pl.num_programs(2), blocks))
    def add() -> None:
        weights, d_scores = _weights_and_gradient(place, q, k, v, marks, d_out, normalizer, mean, i, j)
        k_sum[...] += _product(d_scores, q[...])
        v_sum[...] += _product(weights, d_out[...])

    @pl.when((member == members - 1) & (i == blocks - 1))
    def end() -> None:
        dk[...] = k_sum[...].astype(dk.dtype)
        dv[...] = v_sum[...].astype(dv.dtype)
