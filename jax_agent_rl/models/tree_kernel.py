"""Attention over packed token trees: the mask, and Pallas kernels for TPUs, forward and backward.

Shapes: B rows, Q queries, T keys, H query heads, K key/value heads, G = H / K, h head size, v size
of a value (mostly h), n blocks.

The recurrence is FlashAttention's (Dao et al. 2022, arXiv 2205.14135): a program holds one block of
scores, in float32, and the running maximum and sum of each query's softmax, so the program does not
grow with the row. In addition:

- Fully masked pairs of blocks are found once, outside the kernel, and neither computed nor read.
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

# MaxText's recipes for v6e have blocks of 2,048. A block must also fit the chip's vector memory.
BLOCK = 1024
LANES = 128
_WIDEST_HEAD = 512  # bytes of the widest head of which a block fits
MASK_VALUE = -1e30  # of a masked score; finite, so that rows of padding have no NaN
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b


class TreeMask(NamedTuple):
    """Attention mask of token trees.

    Token i attends to j iff ``j <= i < subtree_end[j]`` and j is within the window.

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
    """The arrays of a mask, in the layout of the scores; depths are None without a window.

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
        v: [B, K, T, v].
        marks: the mask.
        d_out: [B, H, Q, v], gradient of the output.
        normalizer: float32 [B, H, 1, Q], log of each softmax's normalizer.
        mean: float32 [B, H, 1, Q], mean of the values' gradient, weighted by each softmax.
    """

    q: Any
    k: Any
    v: Any
    marks: Any
    d_out: Any = None
    normalizer: Any = None
    mean: Any = None


_KINDS = KernelInputs(
    "q", "k", "v", Marks("key mark", "key mark", "query mark"), "out", "statistic", "statistic"
)
"""How each array is cut into blocks."""


class BlockPlan(NamedTuple):
    """Padded arrays of one kernel call, and its blocks.

    Attributes:
        inputs: arrays of the forward pass.
        offset_and_window: int32 [2]: index of the first query in the row, and the window.
        live: bool [B, query blocks, key blocks]: false if the pair is fully masked.
        q_block: queries per block.
        k_block: keys per block.
    """

    inputs: KernelInputs
    offset_and_window: jax.Array
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
        v: [B, K, T, v].
        block: most queries, and keys, at a time; a multiple of 128.

    Returns:
        [B, H, Q, v] and float32 [B, H, Q].
    """
    batch, heads, count, _ = q.shape
    value_size = v.shape[3]
    plan = plan_blocks(q, k, v, tree_mask, block)
    padded_count = plan.inputs.q.shape[2]

    out, normalizer = _call(
        _forward_kernel,
        plan,
        plan.inputs,
        by_key=False,
        outputs=(
            jax.ShapeDtypeStruct((batch, heads, padded_count, value_size), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, padded_count), jnp.float32),
        ),
        output_kinds=("out", "statistic"),
        scratch=((value_size, plan.q_block), (1, plan.q_block), (1, plan.q_block)),
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
    """Return the gradients of q, k and v.

    They follow from the results of :func:`forward` and the gradient of its output.
    """
    query_count = q.shape[2]
    key_count = k.shape[2]
    size = q.shape[3]
    plan = plan_blocks(q, k, v, tree_mask, block)
    padding = plan.inputs.q.shape[2] - query_count

    mean = jnp.sum(output * d_output, axis=-1, dtype=jnp.float32)
    inputs = plan.inputs._replace(
        d_out=pad(d_output, 2, padding),
        # Queries that pad a block get no weight: exp(score - 1e30) = 0.
        normalizer=pad(normalizer[:, :, None], 3, padding, -MASK_VALUE),
        mean=pad(mean[:, :, None], 3, padding),
    )
    dq_shape = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)
    dk_shape = jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype)
    dv_shape = jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype)

    (dq,) = _call(
        _query_gradient_kernel,
        plan,
        inputs,
        by_key=False,
        outputs=(dq_shape,),
        output_kinds=("q",),
        scratch=((plan.q_block, size),),
        products=3,
    )
    dk, dv = _call(
        _key_gradient_kernel,
        plan,
        inputs,
        by_key=True,
        outputs=(dk_shape, dv_shape),
        output_kinds=("k", "v"),
        scratch=((plan.k_block, size), (plan.k_block, v.shape[3])),
        products=4,
    )
    return dq[:, :, :query_count], dk[:, :, :key_count], dv[:, :, :key_count]


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
        inputs: padded arrays.
        by_key: the grid is (B, K, key blocks, G, query blocks) instead of (B, H, query blocks, key
            blocks).
        outputs: shapes and dtypes.
        output_kinds: how each output is cut, one of the names in :data:`_KINDS`.
        scratch: shapes of float32 buffers that live as long as the outer block.
        products: matrix products per pair of blocks, for the compiler's estimate of the cost.
    """
    batch, q_blocks, k_blocks = plan.live.shape
    heads = inputs.q.shape[1]
    kv_heads = inputs.k.shape[1]
    size = inputs.q.shape[3]
    value_size = inputs.v.shape[3]
    group = heads // kv_heads

    def block_indices(*step_and_scalars: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return row, query head, key/value head, query block and key block of a step."""
        *step, fetched, _ = step_and_scalars
        if by_key:
            row, kv_head, j, member, i = step
            head = kv_head * group + member
            return row, head, kv_head, fetched[(row * k_blocks + j) * q_blocks + i], j

        row, head, i, j = step
        kv_head = jax.lax.div(head, jnp.int32(group))
        return row, head, kv_head, i, fetched[(row * q_blocks + i) * k_blocks + j]

    def query_index(row: Any, head: Any, kv_head: Any, i: Any, j: Any) -> tuple:
        return row, head, i, 0

    def key_index(row: Any, head: Any, kv_head: Any, i: Any, j: Any) -> tuple:
        return row, kv_head, j, 0

    cuts = {  # shape of a block, and its index
        "q": ((None, None, plan.q_block, size), query_index),
        "out": ((None, None, plan.q_block, value_size), query_index),
        "k": ((None, None, plan.k_block, size), key_index),
        "v": ((None, None, plan.k_block, value_size), key_index),
        "statistic": (
            (None, None, 1, plan.q_block),
            lambda row, head, kv_head, i, j: (row, head, 0, i),
        ),
        "key mark": ((None, plan.k_block, 1), lambda row, head, kv_head, i, j: (row, j, 0)),
        "query mark": ((None, 1, plan.q_block), lambda row, head, kv_head, i, j: (row, 0, i)),
    }

    def cut(kind: str) -> pl.BlockSpec:
        shape, index = cuts[kind]
        return pl.BlockSpec(shape, lambda *step: index(*block_indices(*step)))

    if by_key:
        grid = (batch, kv_heads, k_blocks, group, q_blocks)
        summed_axes = 2
        fetched = fetched_blocks(plan.live.mT)
    else:
        grid = (batch, heads, q_blocks, k_blocks)
        summed_axes = 1
        fetched = fetched_blocks(plan.live)
    parallel_axes = len(grid) - summed_axes

    # About half of all scores are masked.
    pairs = batch * heads * q_blocks * k_blocks * plan.q_block * plan.k_block // 2
    arrays = jax.tree.leaves((inputs, outputs))
    bytes_accessed = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    call = pl.pallas_call(
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
            dimension_semantics=("parallel",) * parallel_axes + ("arbitrary",) * summed_axes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * size * products,
            transcendentals=pairs,
            bytes_accessed=bytes_accessed,
        ),
    )
    return call(fetched, plan.offset_and_window, inputs)


def _scores(offset_and_window: Any, blocks: KernelInputs, i: Any, j: Any) -> jax.Array:
    """Return masked scores float32 [keys, queries] of query block i and key block j."""
    marks = blocks.marks
    scores = _product(blocks.k[...], blocks.q[...], _ROWS_BY_ROWS)
    keys, queries = scores.shape
    key = j * keys + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    first_query = offset_and_window[0] + i * queries
    query = first_query + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)

    visible = (key <= query) & (query < marks.ends[...])
    if marks.key_depths is not None:
        distance = marks.query_depths[...] - marks.key_depths[...]
        visible &= distance < offset_and_window[1]
    return jnp.where(visible, scores, MASK_VALUE)


def _product(a: jax.Array, b: jax.Array, contract: tuple = (((1,), (0,)), ((), ()))) -> jax.Array:
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _is_live(fetched: Any, outer: Any, inner: Any, outer_count: Any, inner_count: Any) -> jax.Array:
    """Return whether a step has a block of its own in memory: a masked one keeps another's."""
    index = (pl.program_id(0) * outer_count + outer) * inner_count + inner
    return fetched[index] == inner


def _forward_kernel(
    fetched: Any,
    offset_and_window: Any,
    blocks: KernelInputs,
    out: Any,
    normalizer: Any,
    mixed: Any,
    peak: Any,
    total: Any,
) -> None:
    i = pl.program_id(2)
    j = pl.program_id(3)
    count = pl.num_programs(3)

    @pl.when(j == 0)
    def begin() -> None:
        mixed[...] = jnp.zeros_like(mixed)
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, MASK_VALUE)

    @pl.when(_is_live(fetched, i, j, pl.num_programs(2), count))
    def attend() -> None:
        scores = _scores(offset_and_window, blocks, i, j)
        v = blocks.v
        new_peak = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        shrink = jnp.exp(peak[...] - new_peak)
        weights = jnp.exp(scores - new_peak)

        peak[...] = new_peak
        total[...] = total[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        mixed[...] = mixed[...] * shrink + _product(
            v[...], weights.astype(v.dtype), _COLUMNS_BY_COLUMNS
        )

    @pl.when(j == count - 1)
    def end() -> None:
        out[...] = (mixed[...] / total[...]).T.astype(out.dtype)
        normalizer[...] = peak[...] + jnp.log(total[...])


def _weights_and_gradient(
    offset_and_window: Any, blocks: KernelInputs, i: Any, j: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the softmax's weights and the gradient of its scores, [keys, queries]."""
    scores = _scores(offset_and_window, blocks, i, j)
    weights = jnp.exp(scores - blocks.normalizer[...])
    d_weights = _product(blocks.v[...], blocks.d_out[...], _ROWS_BY_ROWS)
    dtype = blocks.q.dtype
    return weights.astype(dtype), (weights * (d_weights - blocks.mean[...])).astype(dtype)


def _query_gradient_kernel(
    fetched: Any, offset_and_window: Any, blocks: KernelInputs, dq: Any, q_sum: Any
) -> None:
    i = pl.program_id(2)
    j = pl.program_id(3)
    count = pl.num_programs(3)

    @pl.when(j == 0)
    def begin() -> None:
        q_sum[...] = jnp.zeros_like(q_sum)

    @pl.when(_is_live(fetched, i, j, pl.num_programs(2), count))
    def add() -> None:
        _, d_scores = _weights_and_gradient(offset_and_window, blocks, i, j)
        q_sum[...] += _product(d_scores, blocks.k[...], _COLUMNS_BY_COLUMNS)

    @pl.when(j == count - 1)
    def end() -> None:
        dq[...] = q_sum[...].astype(dq.dtype)


def _key_gradient_kernel(
    fetched: Any,
    offset_and_window: Any,
    blocks: KernelInputs,
    dk: Any,
    dv: Any,
    k_sum: Any,
    v_sum: Any,
) -> None:
    j = pl.program_id(2)
    member = pl.program_id(3)
    i = pl.program_id(4)
    members = pl.num_programs(3)
    count = pl.num_programs(4)

    @pl.when((member == 0) & (i == 0))
    def begin() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    @pl.when(_is_live(fetched, j, i, pl.num_programs(2), count))
    def add() -> None:
        weights, d_scores = _weights_and_gradient(offset_and_window, blocks, i, j)
        k_sum[...] += _product(d_scores, blocks.q[...])
        v_sum[...] += _product(weights, blocks.d_out[...])

    @pl.when((member == members - 1) & (i == count - 1))
    def end() -> None:
        dk[...] = k_sum[...].astype(dk.dtype)
        dv[...] = v_sum[...].astype(dv.dtype)


def plan_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, tree_mask: TreeMask, block: int
) -> BlockPlan:
    """Pad arrays to whole blocks, and find the live pairs of blocks.

    Args:
        block: most queries, and keys, of a block; a multiple of 128.
    """
    query_count = q.shape[2]
    key_count = k.shape[2]
    if q.shape[3] * q.dtype.itemsize > _WIDEST_HEAD:
        block = max(LANES, block // 2)
    q_block = min(block, query_count + -query_count % LANES)
    k_block = min(block, key_count + -key_count % LANES)
    q_padding = -query_count % q_block
    k_padding = -key_count % k_block

    if tree_mask.offset is None:
        offset = jnp.int32(0)
    else:
        offset = tree_mask.offset.astype(jnp.int32)
    window = jnp.int32(0)
    marks = Marks(pad(tree_mask.subtree_end, 1, k_padding)[..., None])
    if tree_mask.window is not None and tree_mask.positions is not None:
        window = tree_mask.window.astype(jnp.int32)
        query_depths = jax.lax.dynamic_slice_in_dim(
            tree_mask.positions, offset, query_count, axis=1
        )
        # A depth of 0 in the padding would make a block look nearer to its keys than it is.
        query_depths = jnp.pad(query_depths, ((0, 0), (0, q_padding)), mode="edge")
        key_depths = pad(tree_mask.positions, 1, k_padding)
        marks = Marks(marks.ends, key_depths[..., None], query_depths[:, None])

    return BlockPlan(
        inputs=KernelInputs(
            pad(q, 2, q_padding), pad(k, 2, k_padding), pad(v, 2, k_padding), marks
        ),
        offset_and_window=jnp.stack([offset, window]),
        live=_live_pairs(marks, offset, window, query_count + q_padding, q_block, k_block),
        q_block=q_block,
        k_block=k_block,
    )


def _live_pairs(
    marks: Marks,
    offset: jax.Array,
    window: jax.Array,
    query_count: int,
    q_block: int,
    k_block: int,
) -> jax.Array:
    """Return bool [B, query blocks, key blocks].

    It is false only if no query of the block attends to any of the keys.
    """
    batch, key_count, _ = marks.ends.shape
    begins = (offset + jnp.arange(0, query_count, q_block))[:, None]
    last_end = marks.ends.reshape(batch, 1, -1, k_block).max(axis=-1)
    live = (jnp.arange(0, key_count, k_block) < begins + q_block) & (begins < last_end)
    if marks.key_depths is None:
        return live

    shallowest_query = marks.query_depths.reshape(batch, -1, q_block).min(axis=-1)
    deepest_key = marks.key_depths.reshape(batch, -1, k_block).max(axis=-1)
    return live & (shallowest_query[:, :, None] - deepest_key[:, None] < window)


def fetched_blocks(live: jax.Array) -> jax.Array:
    """Return int32 [B · n · m]: the block in memory at each step of the last axis.

    At a masked block the one before it stays in memory, so that nothing is read. Before the first
    live block, that one is read early.
    """
    step = jnp.arange(live.shape[-1], dtype=jnp.int32)
    latest_live = jax.lax.cummax(jnp.where(live, step, -1), axis=2)
    is_before_first = latest_live < 0
    first_live = jnp.argmax(live, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(is_before_first, first_live, latest_live).reshape(-1)


def pad(x: jax.Array, axis: int, count: int, value: float = 0) -> jax.Array:
    """Append a value to an axis, ``count`` times."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count)
    return jnp.pad(x, widths, constant_values=value)
