"""The delta rule over packed token trees: Pallas kernels for TPUs, forward and backward.

They compute what ``models.delta_tree`` describes, one chunk of a few heads per grid step, in the
order of the row, or backwards. Nothing of a chunk but its results leaves the chip: neither its
triangular system nor the solution.

The state after a chunk's last token stays on the chip, as most chunks go on from there. The start
of another run is put together from the memory (:func:`_state_after`): the corrections and starts
that earlier chunks have left there. A gradient of such a start goes the same way back
(:func:`_add_gradients`), and waits in the memory for the chunks that it belongs to.

Shapes as in ``models.delta_tree``; g heads per grid step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models.delta_net import DeltaTokens, unit_lower_inverse
from jax_agent_rl.models.token_forest import NO_TOKEN, TokenForest
from jax_agent_rl.models.tree_kernel import LANES, pad

CHUNK = 128
"""Tokens of a chunk: as many as a TPU's matrix unit has rows."""
HEADS = 2
"""Most heads of a grid step: their chains of products run beside each other."""
EXACT_PASSES = 6
"""Products in bfloat16 that a TPU makes of one in float32."""
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b


class ForestMarks(NamedTuple):
    """Where the tokens of a row hang, T padded to whole chunks.

    Attributes:
        entry: int32 [B, 1, T], see :class:`TokenForest`.
        run: int32 [B, 1, T].
        begin: int32 [B, 1, T], r-th number of a chunk: first slot of its run r, c if it has none.
        end: int32 [B, N, 1, c], slot after the last descendant in the chunk.
    """

    entry: Any
    run: Any
    begin: Any
    end: Any


class TokenRow(NamedTuple):
    """What tokens bring to the delta rule; of a head, numbers of a kind lie side by side.

    Attributes:
        q: float32 [B, T, H k].
        k: float32 [B, T, H k].
        v: float32 [B, T, H v].
        log_decay: float32 [B, H / g, N, g, c].
        beta: float32 [B, H / g, N, g, c].
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any


class History(NamedTuple):
    """Arrays in the memory that states are made of.

    Attributes:
        keys: float32 [B, T, H k].
        corrections: float32 [B, T, H v].
        starts: float32 [B, N, H, k, v], of each chunk's first run.
    """

    keys: Any
    corrections: Any
    starts: Any


class Walk(NamedTuple):
    """Buffers for one earlier chunk, and what is known of a state on the way to its beginning.

    Attributes:
        chunk: the chunk's keys, corrections and start.
        scale: float32 [g, 1, c], by which the chunk's part has faded at the end of the way.
        semaphores: of the three copies.
    """

    chunk: History
    scale: Any
    semaphores: Any


class ForwardWork(NamedTuple):
    """What a forward grid step keeps on the chip; all but ``walk`` are float32.

    Attributes:
        state: [g, k, v], of the last token, or of the start of the run at hand.
        reads: [c, g k].
        queries: [c, g k].
        mixing: [g, c, c].
        corrections: [2, c, g v], of chunks in turn.
        starts: [2, g, k, v], of chunks in turn.
        writes: semaphores of the copies of the last two to the memory.
        walk: for starts of other runs.
    """

    state: Any
    reads: Any
    queries: Any
    mixing: Any
    corrections: Any
    starts: Any
    writes: Any
    walk: Walk


class BackwardWork(NamedTuple):
    """What a backward grid step keeps on the chip; all but the last four are float32.

    Attributes:
        d_state: [g, k, v], gradient of the state after the last token of the chunk at hand, as far
            as the next chunk goes on from there.
        state: [g, k, v], start of the run at hand.
        d_start: [g, k, v], gradient of it.
        d_first: [g, k, v], gradient of the start of the chunk's first run.
        reads: [c, g k].
        queries: [c, g k].
        d_reads: [c, g k].
        d_queries: [c, g k].
        d_faded: [N, g, c], of all chunks.
        d_keys: [2, c, g k], of chunks in turn.
        d_corrections: [2, c, g v]: of corrections, and then of values, of chunks in turn.
        d_fading: [g, 1, c], of the log of a state's factor.
        has_gradients: int32 [N], whether gradients wait in the memory for a chunk.
        writes: semaphores of the copies of keys' and values' gradients to the memory.
        waiting: a chunk's gradients, from the memory and back.
        walk: for starts of other runs.
    """

    d_state: Any
    state: Any
    d_start: Any
    d_first: Any
    reads: Any
    queries: Any
    d_reads: Any
    d_queries: Any
    d_faded: Any
    d_keys: Any
    d_corrections: Any
    d_fading: Any
    has_gradients: Any
    writes: Any
    waiting: History
    walk: Walk


class Sizes(NamedTuple):
    """Sizes of a call.

    Attributes:
        rows: B.
        chunks: N.
        chunk: c.
        heads: H.
        group: g.
        key: k, padded.
        value: v, padded.
    """

    rows: int
    chunks: int
    chunk: int
    heads: int
    group: int
    key: int
    value: int

    @property
    def history(self) -> History:
        """Return the shapes of all of a row's history."""
        length = self.chunks * self.chunk
        return History(
            keys=(self.rows, length, self.heads * self.key),
            corrections=(self.rows, length, self.heads * self.value),
            starts=(self.rows, self.chunks, self.heads, self.key, self.value),
        )

    @property
    def part(self) -> History:
        """Return the shapes of a grid step's part of it."""
        return History(
            keys=(self.chunk, self.group * self.key),
            corrections=(self.chunk, self.group * self.value),
            starts=(self.group, self.key, self.value),
        )

    def of_key(self, head: int) -> Any:
        """Return the index of a head's queries or keys."""
        return slice(None), slice(head * self.key, (head + 1) * self.key)

    def of_value(self, head: int) -> Any:
        """Return the index of a head's values."""
        return slice(None), slice(head * self.value, (head + 1) * self.value)


class ChunkStep(NamedTuple):
    """A grid step: its place, and the arrays that most functions read.

    Attributes:
        sizes: of the call.
        row_number: row of the batch.
        group_number: number of the group of heads.
        marks: of the row.
        row: of all tokens ``log_decay`` and ``beta``, of the chunk's the others.
        history: of all rows.
        walk: buffers.
    """

    sizes: Sizes
    row_number: Any
    group_number: Any
    marks: ForestMarks
    row: TokenRow
    history: History
    walk: Walk

    def in_memory(self, history: History, number: Any) -> History:
        """Return the part of the heads at hand in one chunk."""
        sizes = self.sizes
        tokens = pl.ds(pl.multiple_of(number * sizes.chunk, sizes.chunk), sizes.chunk)

        def channels(size: int) -> Any:
            width = sizes.group * size
            return pl.ds(pl.multiple_of(self.group_number * width, width), width)

        heads = pl.ds(self.group_number * sizes.group, sizes.group)
        return History(
            keys=history.keys.at[self.row_number, tokens, channels(sizes.key)],
            corrections=history.corrections.at[self.row_number, tokens, channels(sizes.value)],
            starts=history.starts.at[self.row_number, number, heads],
        )


# --- calls ----------------------------------------------------------------------------------------


def forward(tokens: DeltaTokens, forest: TokenForest) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply the delta rule along every path of the rows' trees.

    Args:
        tokens: [B, T, H, ..].
        forest: of the rows.

    Returns:
        Outputs float32 [B, T, H, v]; and for the backward pass corrections, float32 [B, N, c, H,
        v], and the start of each chunk's first run, float32 [B, N, H, k, v].
    """
    sizes, marks, row = _prepare(tokens, forest)
    part = sizes.part
    work = ForwardWork(
        state=_buffer(part.starts),
        reads=_buffer(part.keys),
        queries=_buffer(part.keys),
        mixing=_buffer((sizes.group, sizes.chunk, sizes.chunk)),
        corrections=_buffer((2, *part.corrections)),
        starts=_buffer((2, *part.starts)),
        writes=pltpu.SemaphoreType.DMA((2,)),
        walk=_walk_buffers(sizes),
    )
    cut = _Cuts(sizes, backwards=False)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    history = sizes.history

    def kernel(marks: ForestMarks, row: TokenRow, keys: Any, out: Any, *rest: Any) -> None:
        corrections, starts, work = rest
        history = History(keys, corrections, starts)
        step = ChunkStep(sizes, pl.program_id(0), pl.program_id(1), marks, row, history, work.walk)
        _forward_kernel(step, out, work)

    outputs, corrections, starts = pl.pallas_call(
        kernel,
        grid=cut.grid,
        in_specs=(cut.marks, cut.row, anywhere),
        out_specs=(cut.values, anywhere, anywhere),
        out_shape=tuple(
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in (history.corrections, history.corrections, history.starts)
        ),
        scratch_shapes=(work,),
        compiler_params=cut.parameters,
        # Products with keys and queries, and of the inverse and with it.
        cost_estimate=_cost(sizes, plain=6, exact=2 * _levels(sizes) + 2, arrays=6),
    )(marks, row, row.k)

    value_size = tokens.v.shape[-1]
    shape = (sizes.rows, sizes.chunks, sizes.chunk, sizes.heads, sizes.value)
    outputs = outputs.reshape(sizes.rows, -1, sizes.heads, sizes.value)
    outputs = outputs[:, : tokens.beta.shape[1], :, :value_size]
    return outputs, corrections.reshape(shape), starts


def backward(
    tokens: DeltaTokens,
    forest: TokenForest,
    corrections: jax.Array,
    starts: jax.Array,
    d_outputs: jax.Array,
) -> DeltaTokens:
    """Return the gradients of tokens.

    They follow from the results of :func:`forward` and the gradient of its outputs.
    """
    sizes, marks, row = _prepare(tokens, forest)
    part = sizes.part
    history = sizes.history
    corrections = corrections.reshape(history.corrections)
    d_out = _flat(d_outputs, sizes, sizes.value)

    work = BackwardWork(
        **{name: _buffer(part.starts) for name in ("d_state", "state", "d_start", "d_first")},
        **{name: _buffer(part.keys) for name in ("reads", "queries", "d_reads", "d_queries")},
        d_faded=_buffer((sizes.chunks, sizes.group, sizes.chunk)),
        d_keys=_buffer((2, *part.keys)),
        d_corrections=_buffer((2, *part.corrections)),
        d_fading=_buffer((sizes.group, 1, sizes.chunk)),
        has_gradients=pltpu.SMEM((sizes.chunks,), jnp.int32),
        writes=pltpu.SemaphoreType.DMA((2,)),
        waiting=History(*(_buffer(shape) for shape in part)),
        walk=_walk_buffers(sizes),
    )
    cut = _Cuts(sizes, backwards=True)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def kernel(
        marks: ForestMarks, row: TokenRow, saved: tuple, history: History, *rest: Any
    ) -> None:
        d_q, d_log_decay, d_beta, d_keys, d_values, d_starts, work = rest
        gradients = History(d_keys, d_values, d_starts)
        step = ChunkStep(sizes, pl.program_id(0), pl.program_id(1), marks, row, history, work.walk)
        _backward_kernel(step, saved, (d_q, d_log_decay, d_beta), gradients, work)

    shapes = (history.keys, row.beta.shape, row.beta.shape, *history)
    d_q, d_log_decay, d_beta, d_k, d_v, _ = pl.pallas_call(
        kernel,
        grid=cut.grid,
        in_specs=(
            cut.marks,
            cut.row,
            (cut.values, cut.values, cut.starts),
            History(anywhere, anywhere, anywhere),
        ),
        out_specs=(cut.keys, cut.numbers, cut.numbers, anywhere, anywhere, anywhere),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        scratch_shapes=(work,),
        compiler_params=cut.parameters,
        cost_estimate=_cost(sizes, plain=17, exact=2 * _levels(sizes) + 6, arrays=10),
    )(marks, row, (corrections, d_out, starts), History(row.k, corrections, starts))

    count = tokens.beta.shape[1]

    def by_head(x: jax.Array, like: jax.Array) -> jax.Array:
        x = x.reshape(sizes.rows, -1, sizes.heads, x.shape[-1] // sizes.heads)
        return x[:, :count, :, : like.shape[-1]]

    def by_token(x: jax.Array) -> jax.Array:
        """Turn [B, H / g, N, g, c] into [B, T, H]."""
        return x.transpose(0, 2, 4, 1, 3).reshape(sizes.rows, -1, sizes.heads)[:, :count]

    return DeltaTokens(
        q=by_head(d_q, tokens.q),
        k=by_head(d_k, tokens.k),
        v=by_head(d_v, tokens.v),
        log_decay=by_token(d_log_decay),
        beta=by_token(d_beta),
    )


def _prepare(tokens: DeltaTokens, forest: TokenForest) -> tuple[Sizes, ForestMarks, TokenRow]:
    """Return the arrays of a call: whole chunks, and heads of whole lanes."""
    rows, chunks, chunk = forest.run.shape
    heads = tokens.beta.shape[2]
    sizes = Sizes(
        rows=rows,
        chunks=chunks,
        chunk=chunk,
        heads=heads,
        group=max(n for n in range(1, HEADS + 1) if heads % n == 0),
        key=tokens.k.shape[-1] + -tokens.k.shape[-1] % LANES,
        value=tokens.v.shape[-1] + -tokens.v.shape[-1] % LANES,
    )

    def by_group(x: jax.Array) -> jax.Array:
        """Turn [B, T, H] into [B, H / g, N, g, c]."""
        x = pad(x, 1, chunks * chunk - x.shape[1])
        x = x.reshape(rows, chunks, chunk, heads // sizes.group, sizes.group)
        return x.transpose(0, 3, 1, 4, 2)

    row = TokenRow(
        q=_flat(tokens.q, sizes, sizes.key),
        k=_flat(tokens.k, sizes, sizes.key),
        v=_flat(tokens.v, sizes, sizes.value),
        log_decay=by_group(tokens.log_decay),
        beta=by_group(tokens.beta),
    )

    slot = jnp.arange(chunk, dtype=jnp.int32)
    begin = jnp.sum(forest.run[..., None, :] < slot[:, None], axis=-1, dtype=jnp.int32)
    end = slot + jnp.sum(forest.is_ancestor, axis=-2, dtype=jnp.int32)
    marks = ForestMarks(
        entry=forest.entry.reshape(rows, 1, -1),
        run=forest.run.reshape(rows, 1, -1),
        begin=begin.reshape(rows, 1, -1),
        end=end[:, :, None],
    )
    return sizes, marks, row


def _flat(x: jax.Array, sizes: Sizes, size: int) -> jax.Array:
    """Turn [B, T, H, ..] into [B, T, H size], padded."""
    x = pad(x, 1, sizes.chunks * sizes.chunk - x.shape[1])
    x = pad(x, 3, size - x.shape[3])
    return x.reshape(*x.shape[:2], -1)


class _Cuts:
    """The grid of a call, and how it cuts the arrays.

    Args:
        backwards: from the last chunk to the first.
    """

    def __init__(self, sizes: Sizes, *, backwards: bool) -> None:
        self.grid = (sizes.rows, sizes.heads // sizes.group, sizes.chunks)
        self.parameters = pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        )
        length = sizes.chunks * sizes.chunk

        def number(step: Any) -> Any:
            return sizes.chunks - 1 - step if backwards else step

        def channels(size: int) -> pl.BlockSpec:
            shape = (None, sizes.chunk, sizes.group * size)
            return pl.BlockSpec(shape, lambda b, h, step: (b, number(step), h))

        # What stays for a whole row has one buffer: two of a long row would not fit.
        once = pl.Buffered(1)
        in_scalars = pl.BlockSpec(
            (None, 1, length),
            lambda b, h, step: (b, 0, 0),
            memory_space=pltpu.SMEM,
            pipeline_mode=once,
        )
        ends = pl.BlockSpec(
            (None, sizes.chunks, 1, sizes.chunk),
            lambda b, h, step: (b, 0, 0, 0),
            pipeline_mode=once,
        )
        of_all_chunks = pl.BlockSpec(
            (None, None, sizes.chunks, sizes.group, sizes.chunk),
            lambda b, h, step: (b, h, 0, 0, 0),
            pipeline_mode=once,
        )
        self.keys = channels(sizes.key)
        self.values = channels(sizes.value)
        self.marks = ForestMarks(in_scalars, in_scalars, in_scalars, ends)
        self.row = TokenRow(self.keys, self.keys, self.values, of_all_chunks, of_all_chunks)
        self.numbers = pl.BlockSpec(
            (None, None, None, sizes.group, sizes.chunk),
            lambda b, h, step: (b, h, number(step), 0, 0),
        )
        self.starts = pl.BlockSpec(
            (None, None, sizes.group, sizes.key, sizes.value),
            lambda b, h, step: (b, number(step), h, 0, 0),
        )


def _buffer(shape: tuple[int, ...]) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def _walk_buffers(sizes: Sizes) -> Walk:
    return Walk(
        chunk=History(*(_buffer(shape) for shape in sizes.part)),
        scale=_buffer((sizes.group, 1, sizes.chunk)),
        semaphores=pltpu.SemaphoreType.DMA((3,)),
    )


def _levels(sizes: Sizes) -> int:
    """Return the passes that build an inverse, of two products each."""
    return (sizes.chunk - 1).bit_length() - 1


def _cost(sizes: Sizes, *, plain: int, exact: int, arrays: int) -> pl.CostEstimate:
    """Return the cost of a call over plain rows.

    Args:
        plain: products of a chunk of a head in bfloat16.
        exact: those in float32.
        arrays: arrays of keys' or values' size that are read or written.
    """
    chunks = sizes.rows * sizes.heads * sizes.chunks
    tokens = chunks * sizes.chunk
    size = max(sizes.key, sizes.value)
    products = plain + EXACT_PASSES * exact
    starts = chunks * sizes.key * sizes.value
    return pl.CostEstimate(
        flops=2 * tokens * sizes.chunk * size * products,
        transcendentals=tokens * sizes.chunk,
        bytes_accessed=4 * (arrays * tokens * size + starts),
    )


# --- a chunk of a head ----------------------------------------------------------------------------


class Fading(NamedTuple):
    """How one head fades in a chunk.

    Attributes:
        is_ancestor: bool [c, c].
        column: float32 [c, 1], sum of ``log_decay`` since the start of a token's run.
        row: float32 [1, c], the same.
    """

    is_ancestor: jax.Array
    column: jax.Array
    row: jax.Array


class SolvedChunk(NamedTuple):
    """One head's chunk up to the states it starts from, see ``delta_net.SolvedChunks``.

    Attributes:
        fading: of the chunk.
        decay: float32 [c, c], from token j to i.
        start: float32 [c, 1], from a run's start to the token.
        beta: float32 [c, 1].
        key_products: float32 [c, c].
        query_products: float32 [c, c].
        inverse: float32 [c, c].
        reads: float32 [c, k].
        new_values: float32 [c, v].
    """

    fading: Fading
    decay: jax.Array
    start: jax.Array
    beta: jax.Array
    key_products: jax.Array
    query_products: jax.Array
    inverse: jax.Array
    reads: jax.Array
    new_values: jax.Array


def _indices(size: int) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of rows and columns of a square, int32 [c, c]."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    columns = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return rows, columns


def _as_column(row: jax.Array) -> jax.Array:
    rows, columns = _indices(row.shape[1])
    return jnp.sum(jnp.where(rows == columns, row, 0.0), axis=1, keepdims=True)


def _as_row(column: jax.Array) -> jax.Array:
    rows, columns = _indices(column.shape[0])
    return jnp.sum(jnp.where(rows == columns, column, 0.0), axis=0, keepdims=True)


def _fading(log_decay: jax.Array, end: jax.Array) -> Fading:
    """Return how a head fades; both arguments are [1, c]."""
    rows, columns = _indices(end.shape[1])
    is_ancestor = (columns <= rows) & (rows < end)
    column = jnp.sum(jnp.where(is_ancestor, log_decay, 0.0), axis=1, keepdims=True)
    return Fading(is_ancestor, column, _as_row(column))


def _solve(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    end: jax.Array,
) -> SolvedChunk:
    """Solve a chunk; see ``delta_net.solve_chunks``. The last three are [1, c]."""
    fading = _fading(log_decay, end)
    beta = _as_column(beta)
    difference = jnp.where(fading.is_ancestor, fading.column - fading.row, 0.0)
    decay = jnp.where(fading.is_ancestor, jnp.exp(difference), 0.0)
    start = jnp.exp(fading.column)

    key_products = _product(k, k, _ROWS_BY_ROWS)
    rows, columns = _indices(end.shape[1])
    overlap = jnp.where(rows == columns, 0.0, key_products * decay * beta)
    inverse = unit_lower_inverse(overlap)
    return SolvedChunk(
        fading=fading,
        decay=decay,
        start=start,
        beta=beta,
        key_products=key_products,
        query_products=_product(q, k, _ROWS_BY_ROWS),
        inverse=inverse,
        reads=_exact_product(inverse, k * (start * beta)),
        new_values=_exact_product(inverse, v * beta),
    )


def _product(a: jax.Array, b: jax.Array, contract: tuple = (((1,), (0,)), ((), ()))) -> jax.Array:
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _exact_product(
    a: jax.Array, b: jax.Array, contract: tuple = (((1,), (0,)), ((), ()))
) -> jax.Array:
    return jax.lax.dot_general(
        a, b, contract, precision="highest", preferred_element_type=jnp.float32
    )


# --- forward --------------------------------------------------------------------------------------


def _forward_kernel(step: ChunkStep, out: Any, work: ForwardWork) -> None:
    sizes = step.sizes
    marks = step.marks
    row = step.row
    number = pl.program_id(2)
    first = number * sizes.chunk
    turn = jax.lax.rem(number, 2)
    corrections = work.corrections.at[turn]
    entry = marks.entry[0, first]
    run_count = marks.run[0, first + sizes.chunk - 1] + 1
    goes_on = entry == first - 1
    is_plain = goes_on & (run_count == 1)

    def writes(number: Any) -> tuple[Any, Any]:
        turn = jax.lax.rem(number, 2)
        target = step.in_memory(step.history, number)
        return (
            pltpu.make_async_copy(work.corrections.at[turn], target.corrections, work.writes.at[0]),
            pltpu.make_async_copy(work.starts.at[turn], target.starts, work.writes.at[1]),
        )

    def finish_last_writes() -> None:
        for copy in writes(number - 1):
            copy.wait()

    # Other starts may need what the last chunk left.
    pl.when(~is_plain & (number > 0))(finish_last_writes)

    @pl.when(number == 0)
    def begin() -> None:
        work.state[...] = jnp.zeros_like(work.state)

    @pl.when(~goes_on)
    def start_elsewhere() -> None:
        _state_after(step, entry, work.state)

    work.starts[turn] = work.state[...]
    slots = jax.lax.broadcasted_iota(jnp.int32, (sizes.chunk, 1), 0)
    is_in_first_run = slots < _run_end(step, first, 0)
    last_weights = []
    last_factors = []
    for head in range(sizes.group):
        of_key = sizes.of_key(head)
        of_value = sizes.of_value(head)
        solved = _solve_head(step, number, head)
        queries = row.q[of_key] * solved.start
        state = work.state[head]
        corrections[of_value] = solved.new_values - jnp.where(
            is_in_first_run, _product(solved.reads, state), 0.0
        )
        out[of_value] = jnp.where(is_in_first_run, _product(queries, state), 0.0)
        work.reads[of_key] = solved.reads
        work.queries[of_key] = queries
        work.mixing[head] = solved.query_products * solved.decay
        last_weights.append(_as_column(solved.decay[-1:]))
        last_factors.append(solved.start[-1:])

    def add_run(run: Any, _: Any) -> None:
        begin = marks.begin[0, first + run]
        is_in_run = (slots >= begin) & (slots < _run_end(step, first, run))
        entry = marks.entry[0, first + begin]
        _state_after(step, entry, work.state)
        for head in range(sizes.group):
            of_value = sizes.of_value(head)
            state = work.state[head]
            read = _product(work.reads[sizes.of_key(head)], state)
            corrections[of_value] -= jnp.where(is_in_run, read, 0.0)
            answer = _product(work.queries[sizes.of_key(head)], state)
            out[of_value] += jnp.where(is_in_run, answer, 0.0)

    jax.lax.fori_loop(1, run_count, add_run, None)

    for head in range(sizes.group):
        of_value = sizes.of_value(head)
        correction = corrections[of_value]
        out[of_value] += _product(work.mixing[head], correction)
        keys = row.k[sizes.of_key(head)] * last_weights[head]
        added = _product(keys, correction, _COLUMNS_BY_COLUMNS)
        work.state[head] = work.state[head] * last_factors[head] + added

    pl.when(is_plain & (number > 0))(finish_last_writes)
    for copy in writes(number):
        copy.start()

    @pl.when(number == sizes.chunks - 1)
    def end() -> None:
        for copy in writes(number):
            copy.wait()


def _solve_head(step: ChunkStep, number: Any, head: int) -> SolvedChunk:
    sizes = step.sizes
    row = step.row
    return _solve(
        row.q[sizes.of_key(head)],
        row.k[sizes.of_key(head)],
        row.v[sizes.of_value(head)],
        row.log_decay[number, head : head + 1],
        row.beta[number, head : head + 1],
        step.marks.end[number],
    )


def _run_end(step: ChunkStep, first: Any, run: Any) -> Any:
    """Return the slot after a run."""
    chunk = step.sizes.chunk
    next_run = jnp.minimum(run + 1, chunk - 1)
    return jnp.where(run + 1 < chunk, step.marks.begin[0, first + next_run], chunk)


def _state_after(step: ChunkStep, entry: Any, state: Any) -> None:
    """Set ``state`` to the state after a token of an earlier chunk; zeros for ``NO_TOKEN``."""
    sizes = step.sizes
    chunk = step.walk.chunk
    state[...] = jnp.zeros_like(state)

    def add_chunk(number: Any, steps: list[_StepBack]) -> None:
        for head, back in enumerate(steps):
            keys = chunk.keys[sizes.of_key(head)] * back.weights
            corrections = chunk.corrections[sizes.of_value(head)]
            added = _product(keys, corrections, _COLUMNS_BY_COLUMNS)
            state[head] += added + back.start_scale * chunk.starts[head]

    _walk_back(step, entry, add_chunk)


class _StepBack(NamedTuple):
    """One head's chunk on the way to a token's state, see ``delta_tree``.

    Attributes:
        fading: of the chunk.
        is_slot: bool [1, c], the token in the chunk.
        weights: float32 [c, 1], by which corrections have faded at the end of the way.
        start_scale: float32 [1, 1], the same for the chunk's start; 0 if it is not used.
    """

    fading: Fading
    is_slot: jax.Array
    weights: jax.Array
    start_scale: jax.Array


def _walk_back(step: ChunkStep, entry: Any, visit: Callable[[Any, list[_StepBack]], None]) -> None:
    """Call ``visit(number, steps)`` for each chunk on the way to a token's state."""
    sizes = step.sizes
    marks = step.marks
    walk = step.walk
    walk.scale[...] = jnp.ones_like(walk.scale)

    def step_back(token: Any) -> Any:
        number = jax.lax.div(token, sizes.chunk)
        slot = jax.lax.rem(token, sizes.chunk)
        is_last = marks.run[0, token] == 0

        _copy(step.in_memory(step.history, number), walk.chunk, walk.semaphores)
        slots = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.chunk), 1)
        end = marks.end[number]
        is_on_path = (slots <= slot) & (slot < end)
        is_slot = slots == slot
        steps = []
        for head in range(sizes.group):
            fading = _fading(step.row.log_decay[number, head : head + 1], end)
            faded = jnp.sum(jnp.where(is_slot, fading.row, 0.0), axis=1, keepdims=True)
            difference = jnp.where(is_on_path, faded - fading.row, 0.0)
            scale = walk.scale[head]  # the same number everywhere
            weights = jnp.where(is_on_path, jnp.exp(difference) * scale, 0.0)
            scale = scale * jnp.exp(faded)
            walk.scale[head] = scale
            start_scale = jnp.where(is_last, scale[:, :1], 0.0)
            steps.append(_StepBack(fading, is_slot, _as_column(weights), start_scale))
        visit(number, steps)
        return jnp.where(is_last, NO_TOKEN, marks.entry[0, token])

    jax.lax.while_loop(lambda token: token >= 0, step_back, entry)


# --- backward -------------------------------------------------------------------------------------


def _backward_kernel(
    step: ChunkStep,
    saved: tuple[Any, Any, Any],
    outputs: tuple[Any, Any, Any],
    gradients: History,
    work: BackwardWork,
) -> None:
    sizes = step.sizes
    marks = step.marks
    row = step.row
    corrections, d_out, starts = saved
    d_q, d_log_decay, d_beta = outputs
    number = sizes.chunks - 1 - pl.program_id(2)
    first = number * sizes.chunk
    turn = jax.lax.rem(number, 2)
    entry = marks.entry[0, first]
    run_count = marks.run[0, first + sizes.chunk - 1] + 1
    d_keys = work.d_keys.at[turn]
    d_corrections = work.d_corrections.at[turn]
    slots = jax.lax.broadcasted_iota(jnp.int32, (sizes.chunk, 1), 0)

    def writes(number: Any) -> tuple[Any, Any]:
        turn = jax.lax.rem(number, 2)
        target = step.in_memory(gradients, number)
        return (
            pltpu.make_async_copy(work.d_keys.at[turn], target.keys, work.writes.at[0]),
            pltpu.make_async_copy(
                work.d_corrections.at[turn], target.corrections, work.writes.at[1]
            ),
        )

    @pl.when(number == sizes.chunks - 1)
    def begin() -> None:
        work.d_state[...] = jnp.zeros_like(work.d_state)
        work.d_faded[...] = jnp.zeros_like(work.d_faded)

        def clear(number: Any, _: Any) -> None:
            work.has_gradients[number] = 0

        jax.lax.fori_loop(0, sizes.chunks, clear, None)

    # What later chunks, other than the next, have from this one.
    _read_waiting(step, number, gradients, work)
    d_keys[...] = work.waiting.keys[...]
    d_corrections[...] = work.waiting.corrections[...]
    work.d_first[...] = work.waiting.starts[...]

    solved_heads = []
    d_faded_columns = []
    for head in range(sizes.group):
        of_key = sizes.of_key(head)
        of_value = sizes.of_value(head)
        solved = _solve_head(step, number, head)
        solved_heads.append(solved)
        work.reads[of_key] = solved.reads
        work.queries[of_key] = row.q[of_key] * solved.start

        # What the next chunk has from the state after the last token.
        d_state = work.d_state[head]
        last_weights = _as_column(solved.decay[-1:])
        keys = row.k[of_key] * last_weights
        d_added = _product(corrections[of_value], d_state, _ROWS_BY_ROWS) * last_weights
        d_keys[of_key] += d_added
        added = jnp.sum(d_added * row.k[of_key], axis=1, keepdims=True)
        total = jnp.sum(added, axis=0, keepdims=True)
        column = _as_column(work.d_faded[number, head : head + 1]) - added
        column += jnp.where(slots == sizes.chunk - 1, total, 0.0)
        d_faded_columns.append(column)

        mixing = solved.query_products * solved.decay
        d_corrections[of_value] += _product(keys, d_state)
        d_corrections[of_value] += _product(mixing, d_out[of_value], _COLUMNS_BY_COLUMNS)

    def add_run(run: Any, state: Any, d_start: Any) -> None:
        """Add a run's part of gradients; that of its start to ``d_start``."""
        begin = marks.begin[0, first + run]
        is_in_run = (slots >= begin) & (slots < _run_end(step, first, run))
        is_last = run == run_count - 1
        for head in range(sizes.group):
            of_key = sizes.of_key(head)
            d_read = jnp.where(is_in_run, d_out[sizes.of_value(head)], 0.0)
            d_correct = jnp.where(is_in_run, d_corrections[sizes.of_value(head)], 0.0)
            work.d_queries[of_key] += _product(d_read, state[head], _ROWS_BY_ROWS)
            work.d_reads[of_key] -= _product(d_correct, state[head], _ROWS_BY_ROWS)
            d_start[head] += _product(work.queries[of_key], d_read, _COLUMNS_BY_COLUMNS)
            d_start[head] -= _product(work.reads[of_key], d_correct, _COLUMNS_BY_COLUMNS)

            # The state after the last token has what is left of its run's start.
            factor = jnp.where(is_last, solved_heads[head].start[-1:], 0.0)
            d_left = factor * work.d_state[head]
            d_start[head] += d_left
            d_fading = _total(d_left * state[head])
            is_last_slot = slots == sizes.chunk - 1
            d_faded = _as_row(jnp.where(is_last_slot, d_fading, 0.0))
            work.d_faded[number, head : head + 1] += d_faded

    # Columns start from here on with what was there.
    for head in range(sizes.group):
        work.d_faded[number, head : head + 1] = jnp.zeros((1, sizes.chunk), jnp.float32)
    work.d_queries[...] = jnp.zeros_like(work.d_queries)
    work.d_reads[...] = jnp.zeros_like(work.d_reads)
    add_run(0, starts, work.d_first)

    def add_later_run(run: Any, _: Any) -> None:
        entry = marks.entry[0, first + marks.begin[0, first + run]]
        _state_after(step, entry, work.state)
        work.d_start[...] = jnp.zeros_like(work.d_start)
        add_run(run, work.state, work.d_start)
        _add_gradients(step, entry, gradients, work.d_start, work.state, work)

    jax.lax.fori_loop(1, run_count, add_later_run, None)

    for head, solved in enumerate(solved_heads):
        of_key = sizes.of_key(head)
        of_value = sizes.of_value(head)
        found = _solve_gradients(
            solved,
            row.q[of_key],
            row.k[of_key],
            row.v[of_value],
            corrections[of_value],
            d_out[of_value],
            d_corrections[of_value],
            work.d_reads[of_key],
            work.d_queries[of_key],
        )
        d_q[of_key] = found.q
        d_keys[of_key] += found.k
        d_corrections[of_value] = found.v
        column = d_faded_columns[head] + _as_column(work.d_faded[number, head : head + 1])
        column += found.log_decay
        d_log_decay[head : head + 1] = jnp.sum(
            jnp.where(solved.fading.is_ancestor, column, 0.0), axis=0, keepdims=True
        )
        d_beta[head : head + 1] = _as_row(found.beta)

    goes_on = entry == first - 1

    @pl.when(goes_on)
    def pass_to_last_chunk() -> None:
        work.d_state[...] = work.d_first[...]

    @pl.when(~goes_on)
    def pass_elsewhere() -> None:
        work.d_state[...] = jnp.zeros_like(work.d_state)
        _add_gradients(step, entry, gradients, work.d_first, starts, work)

    @pl.when(number < sizes.chunks - 1)
    def finish_last_writes() -> None:
        for copy in writes(number + 1):
            copy.wait()

    for copy in writes(number):
        copy.start()

    @pl.when(number == 0)
    def end() -> None:
        for copy in writes(number):
            copy.wait()


def _total(x: jax.Array) -> jax.Array:
    """Return the sum of a matrix, [1, 1]."""
    return jnp.sum(jnp.sum(x, axis=1, keepdims=True), axis=0, keepdims=True)


def _solve_gradients(
    solved: SolvedChunk,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    corrections: jax.Array,
    d_out: jax.Array,
    d_new_values: jax.Array,
    d_reads: jax.Array,
    d_queries: jax.Array,
) -> DeltaTokens:
    """Return the gradients of what a chunk was solved from.

    Args:
        corrections: [c, v].
        d_out: [c, v].
        d_new_values: [c, v].
        d_reads: [c, k].
        d_queries: [c, k].

    Returns:
        Gradients; of the sums of ``log_decay`` in place of ``log_decay``, and as columns [c, 1].
    """
    decay = solved.decay
    beta = solved.beta
    d_key_sides = _exact_product(solved.inverse, d_reads, _COLUMNS_BY_COLUMNS)
    d_value_sides = _exact_product(solved.inverse, d_new_values, _COLUMNS_BY_COLUMNS)
    d_overlap = -_exact_product(d_key_sides, solved.reads, _ROWS_BY_ROWS)
    d_overlap -= _exact_product(d_value_sides, solved.new_values, _ROWS_BY_ROWS)
    rows, columns = _indices(decay.shape[0])
    d_overlap = jnp.where(columns < rows, d_overlap, 0.0)
    d_mixing = _product(d_out, corrections, _ROWS_BY_ROWS)

    d_key_products = d_overlap * decay * beta
    d_query_products = d_mixing * decay
    d_k = _product(d_query_products, q, _COLUMNS_BY_COLUMNS)
    d_k += _product(d_key_products, k)
    d_k += _product(d_key_products, k, _COLUMNS_BY_COLUMNS)
    d_k += d_key_sides * (solved.start * beta)
    d_q = _product(d_query_products, k) + d_queries * solved.start

    d_difference = d_key_products * solved.key_products
    d_difference += d_query_products * solved.query_products
    d_faded = jnp.sum(d_difference, axis=1, keepdims=True)
    d_faded -= _as_column(jnp.sum(d_difference, axis=0, keepdims=True))
    d_key_scale = jnp.sum(d_key_sides * k, axis=1, keepdims=True)
    d_start = d_key_scale * beta + jnp.sum(d_queries * q, axis=1, keepdims=True)
    d_faded += d_start * solved.start

    d_beta = jnp.sum(d_overlap * solved.key_products * decay, axis=1, keepdims=True)
    d_beta += d_key_scale * solved.start
    d_beta += jnp.sum(d_value_sides * v, axis=1, keepdims=True)
    return DeltaTokens(q=d_q, k=d_k, v=d_value_sides * beta, log_decay=d_faded, beta=d_beta)


def _read_waiting(step: ChunkStep, number: Any, gradients: History, work: BackwardWork) -> None:
    """Set ``work.waiting`` to the gradients in the memory for a chunk; zeros if there are none."""
    has_gradients = work.has_gradients[number] > 0

    @pl.when(has_gradients)
    def read() -> None:
        _copy(step.in_memory(gradients, number), work.waiting, step.walk.semaphores)

    @pl.when(~has_gradients)
    def clear() -> None:
        for buffer in work.waiting:
            buffer[...] = jnp.zeros_like(buffer)


def _copy(source: History, target: History, semaphores: Any) -> None:
    """Copy a chunk's part of arrays, and wait for it."""
    copies = []
    for i, (part, buffer) in enumerate(zip(source, target, strict=True)):
        copies.append(pltpu.make_async_copy(part, buffer, semaphores.at[i]))
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def _add_gradients(
    step: ChunkStep, entry: Any, gradients: History, d_state: Any, state: Any, work: BackwardWork
) -> None:
    """Add the gradients of what the state after a token of an earlier chunk was made of.

    Args:
        d_state: gradient of the state.
        state: as :func:`_state_after` sets it.
    """
    sizes = step.sizes
    for head in range(sizes.group):
        # By the log of a factor of the whole state.
        d_fading = _total(state[head] * d_state[head])
        work.d_fading[head] = jnp.broadcast_to(d_fading, (1, sizes.chunk))

    def add_chunk(number: Any, steps: list[_StepBack]) -> None:
        _read_waiting(step, number, gradients, work)
        chunk = step.walk.chunk
        for head, back in enumerate(steps):
            of_key = sizes.of_key(head)
            of_value = sizes.of_value(head)
            keys = chunk.keys[of_key]
            d_corrections = _product(keys, d_state[head]) * back.weights
            d_keys = _product(chunk.corrections[of_value], d_state[head], _ROWS_BY_ROWS)
            d_keys *= back.weights
            work.waiting.keys[of_key] += d_keys
            work.waiting.corrections[of_value] += d_corrections
            work.waiting.starts[head] += back.start_scale * d_state[head]

            # Each part of the state fades until the token, from where it was added.
            d_added = jnp.sum(keys * d_keys, axis=1, keepdims=True)
            d_fading = work.d_fading[head]
            d_faded = jnp.where(back.is_slot, d_fading, 0.0) - _as_row(d_added)
            work.d_faded[number, head : head + 1] += d_faded
            work.d_fading[head] = d_fading - jnp.sum(d_added, axis=0, keepdims=True)

        _copy(work.waiting, step.in_memory(gradients, number), step.walk.semaphores)
        work.has_gradients[number] = 1

    _walk_back(step, entry, add_chunk)
