"""Delta nets over packed token trees: a branch starts from the state of the token it leaves.

A row is a forest of tokens in depth-first order, cut into chunks of c tokens. Within a chunk the
ancestor mask takes the place of the causal one (``delta_net.solve_chunks``). Between chunks go
states::

    prompt and first answer      second answer, it leaves the prompt at f
    [ . . . . ][ . f . . ][ . . . x ][ . . . . ]
     chunk 0    chunk 1    chunk 2    chunk 3
                └── state of f: the start of chunk 1, faded, and the corrections of chunk 1 up to f

Tokens of one chunk that are in different branches start from different states. Depth-first order
puts those with the same start next to each other: a *run*. Only the start of each chunk's first run
is kept, one state per chunk. The state of any token follows from the start of its chunk and the
corrections in it; if the token is in a later run of its chunk, from the state of a token of an
earlier chunk, and so on. Plain rows have one run per chunk and need one step back. Every token is
computed once, however many branches it has.

TPU programs use ``models.delta_kernel`` instead.

Shapes as in ``models.delta_net``; N chunks of c tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_agent_rl.models import delta_kernel
from jax_agent_rl.models.attention import ATTENTION_OUTPUT
from jax_agent_rl.models.delta_net import (
    DeltaTokens,
    SolvedChunks,
    convolved,
    cut_into_chunks,
    exact_einsum,
    solve_chunks,
)
from jax_agent_rl.models.sharding import by_platform, compiles_for
from jax_agent_rl.models.token_forest import NO_TOKEN, TokenForest


def tree_conv(x: jax.Array, weight: jax.Array, parent: jax.Array) -> jax.Array:
    """Convolve each channel along paths, then apply SiLU; see ``delta_net.causal_conv``.

    Args:
        x: [B, T, F].
        weight: [F, n].
        parent: int32 [B, T].
    """
    shifted = [x]
    ancestor = parent
    for step in range(weight.shape[-1] - 1):
        if step > 0:
            above = jnp.take_along_axis(parent, jnp.maximum(ancestor, 0), axis=1)
            ancestor = jnp.where(ancestor >= 0, above, NO_TOKEN)
        inputs = jnp.take_along_axis(x, jnp.maximum(ancestor, 0)[..., None], axis=1)
        shifted.insert(0, jnp.where(ancestor[..., None] >= 0, inputs, 0))
    return convolved(jnp.stack(shifted, axis=-1), weight)


def tree_delta_rule(tokens: DeltaTokens, forest: TokenForest) -> jax.Array:
    """Apply the delta rule along every path of the rows' trees.

    Args:
        tokens: [B, T, H, ..].

    Returns:
        Outputs float32 [B, T, H, v].
    """
    if not compiles_for("tpu"):
        return delta_rule_by_chunks(tokens, forest)
    return _on_platform(tokens, forest)


@jax.custom_vjp
def _on_platform(tokens: DeltaTokens, forest: TokenForest) -> jax.Array:
    """Apply the rule by the kernel on TPUs, and by chunks elsewhere."""
    return _platform_forward(tokens, forest)[0]


def _platform_forward(
    tokens: DeltaTokens, forest: TokenForest
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return outputs, and what only the kernel's backward pass needs."""
    shapes = jax.eval_shape(delta_kernel.forward, tokens, forest)

    def by_chunks(
        tokens: DeltaTokens, forest: TokenForest
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        _, corrections, starts = shapes
        empty = jnp.zeros(corrections.shape, corrections.dtype)
        return delta_rule_by_chunks(tokens, forest), empty, jnp.zeros(starts.shape, starts.dtype)

    return by_platform(tokens, forest, tpu=delta_kernel.forward, default=by_chunks)


def _platform_save(tokens: DeltaTokens, forest: TokenForest) -> tuple[jax.Array, tuple]:
    outputs, corrections, starts = _platform_forward(tokens, forest)
    outputs = checkpoint_name(outputs, ATTENTION_OUTPUT)
    corrections = checkpoint_name(corrections, ATTENTION_OUTPUT)
    starts = checkpoint_name(starts, ATTENTION_OUTPUT)
    return outputs, (tokens, forest, corrections, starts)


def _platform_backward(saved: tuple, d_outputs: jax.Array) -> tuple[DeltaTokens, None]:
    def by_chunks(
        tokens: DeltaTokens,
        forest: TokenForest,
        corrections: jax.Array,
        starts: jax.Array,
        d_outputs: jax.Array,
    ) -> DeltaTokens:
        _, pull = jax.vjp(lambda tokens: delta_rule_by_chunks(tokens, forest), tokens)
        return pull(d_outputs)[0]

    d_tokens = by_platform(*saved, d_outputs, tpu=delta_kernel.backward, default=by_chunks)
    return d_tokens, None


_on_platform.defvjp(_platform_save, _platform_backward)


def delta_rule_by_chunks(tokens: DeltaTokens, forest: TokenForest) -> jax.Array:
    """Apply the rule by XLA's operations; see :func:`tree_delta_rule`."""
    rows, count = tokens.beta.shape[:2]
    solved = solve_chunks(cut_into_chunks(tokens, forest.chunk), forest.is_ancestor)
    outputs, corrections = _between_chunks(solved._replace(mixing=None), forest)
    outputs += exact_einsum("bnhij,bnhjv->bnhiv", solved.mixing, corrections)
    outputs = jnp.moveaxis(outputs, 2, 3)  # [B, N, c, H, v]
    return outputs.reshape(rows, -1, *outputs.shape[3:])[:, :count]


@jax.custom_vjp
def _between_chunks(solved: SolvedChunks, forest: TokenForest) -> tuple[jax.Array, jax.Array]:
    """Add what tokens have from before their chunk.

    Args:
        solved: without ``mixing``.

    Returns:
        Of every token what it reads of the state its run starts from, and its correction, both
        float32 [B, N, H, c, v].
    """
    outputs, corrections, _ = _forward(solved, forest)
    return outputs, corrections


def _forward(solved: SolvedChunks, forest: TokenForest) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Also return the start of each chunk's first run, float32 [B, N, H, k, v]."""
    new_values = solved.new_values
    rows, num_chunks, heads, _, value_size = new_values.shape
    key_size = solved.keys.shape[-1]
    starts = jnp.zeros((rows, num_chunks, heads, key_size, value_size), jnp.float32)

    def visit(carry: tuple, number: jax.Array) -> tuple[tuple, jax.Array]:
        corrections, starts = carry
        reads = solved.reads[:, number]
        queries = solved.queries[:, number]

        def add_run(run: jax.Array, sums: tuple) -> tuple:
            outputs, correction, start = sums
            entry, is_in_run = _run(forest, number, run)
            state = _state_after(entry, solved, corrections, starts, forest)
            outputs += is_in_run * exact_einsum("bhck,bhkv->bhcv", queries, state)
            correction -= is_in_run * exact_einsum("bhck,bhkv->bhcv", reads, state)
            return outputs, correction, jnp.where(run == 0, state, start)

        sums = (jnp.zeros_like(new_values[:, 0]), new_values[:, number], starts[:, 0])
        sums = _for_each_run(forest, number, add_run, sums)
        outputs, correction, start = sums
        carry = (corrections.at[:, number].set(correction), starts.at[:, number].set(start))
        return carry, outputs

    initial = (jnp.zeros_like(new_values), starts)
    (corrections, starts), outputs = jax.lax.scan(visit, initial, jnp.arange(num_chunks))
    return jnp.moveaxis(outputs, 0, 1), corrections, starts


def _save(solved: SolvedChunks, forest: TokenForest) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    outputs, corrections, starts = _forward(solved, forest)
    outputs = checkpoint_name(outputs, ATTENTION_OUTPUT)
    corrections = checkpoint_name(corrections, ATTENTION_OUTPUT)
    starts = checkpoint_name(starts, ATTENTION_OUTPUT)
    return (outputs, corrections), (solved, forest, corrections, starts)


class _Gradients(NamedTuple):
    """Gradients of what states are made of, added up from the last chunk to the first.

    Attributes:
        keys: [B, N, H, c, k].
        corrections: [B, N, H, c, v].
        faded: [B, N, H, c].
        starts: [B, N, H, k, v].
    """

    keys: jax.Array
    corrections: jax.Array
    faded: jax.Array
    starts: jax.Array


def _backward(saved: tuple, cotangents: tuple[jax.Array, jax.Array]) -> tuple[SolvedChunks, None]:
    solved, forest, corrections, starts = saved
    d_outputs, d_corrections = cotangents
    num_chunks = d_outputs.shape[1]

    def visit(gradients: _Gradients, number: jax.Array) -> tuple[_Gradients, tuple]:
        reads = solved.reads[:, number]
        queries = solved.queries[:, number]
        d_output = d_outputs[:, number]
        # Later chunks have added all that they have from this one's corrections and start.
        d_correction = gradients.corrections[:, number]

        def add_run(run: jax.Array, sums: tuple) -> tuple:
            gradients, d_reads, d_queries = sums
            entry, is_in_run = _run(forest, number, run)
            is_first = run == 0
            # The first run's start was kept: nothing to go back for.
            state = _state_after(
                jnp.where(is_first, NO_TOKEN, entry), solved, corrections, starts, forest
            )
            state = jnp.where(is_first, starts[:, number], state)

            d_read = is_in_run * d_output
            d_correct = is_in_run * d_correction
            d_state = exact_einsum("bhck,bhcv->bhkv", queries, d_read)
            d_state -= exact_einsum("bhck,bhcv->bhkv", reads, d_correct)
            d_state += jnp.where(is_first, gradients.starts[:, number], 0.0)
            d_queries += exact_einsum("bhcv,bhkv->bhck", d_read, state)
            d_reads -= exact_einsum("bhcv,bhkv->bhck", d_correct, state)
            gradients = _add_gradients(
                gradients, d_state, state, entry, solved, corrections, forest
            )
            return gradients, d_reads, d_queries

        sums = (gradients, jnp.zeros_like(reads), jnp.zeros_like(queries))
        gradients, d_reads, d_queries = _for_each_run(forest, number, add_run, sums)
        return gradients, (d_reads, d_queries)

    initial = _Gradients(
        keys=jnp.zeros_like(solved.keys),
        corrections=d_corrections,
        faded=jnp.zeros_like(solved.faded),
        starts=jnp.zeros_like(starts),
    )
    gradients, (d_reads, d_queries) = jax.lax.scan(
        visit, initial, jnp.arange(num_chunks), reverse=True
    )
    d_solved = solved._replace(
        reads=jnp.moveaxis(d_reads, 0, 1),
        new_values=gradients.corrections,
        queries=jnp.moveaxis(d_queries, 0, 1),
        keys=gradients.keys,
        faded=gradients.faded,
    )
    return d_solved, None


_between_chunks.defvjp(_save, _backward)


def _run(forest: TokenForest, number: jax.Array, run: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a run's entry, int32 [B], and whether tokens are in it, float32 [B, 1, c, 1].

    A chunk that has no such run has no entry.
    """
    is_in_run = forest.run[:, number] == run
    first = jnp.argmax(is_in_run, axis=-1)
    entry = jnp.take_along_axis(forest.entry[:, number], first[:, None], axis=1)[:, 0]
    entry = jnp.where(jnp.any(is_in_run, axis=-1), entry, NO_TOKEN)
    return entry, is_in_run[:, None, :, None].astype(jnp.float32)


def _for_each_run(
    forest: TokenForest, number: jax.Array, add_run: Callable[[jax.Array, Any], Any], sums: Any
) -> Any:
    """Call ``add_run(run, sums)`` for as many runs as any row has in a chunk."""
    count = jnp.max(forest.run[:, number]) + 1
    # With a begin of a fixed type: the count is only known when the program runs.
    return jax.lax.fori_loop(jnp.int32(0), count, add_run, sums)


class _Step(NamedTuple):
    """One step back on the way to a token's state, for each row.

    The state is the sum over steps of ``scale keys^T corrections``, and of the start of the chunk
    where the way ends.

    Attributes:
        place: chunk and slot in it, int32 [B] each.
        weights: float32 [B, H, c], by which corrections have faded at the token, 0 for those that
            are not on the path.
        scale: float32 [B, H], by which this chunk's part has faded at the end of the way; 0 where
            the way is over.
        start_scale: float32 [B, H], the same for the start of this chunk; 0 if it is not used.
        next_entry: int32 [B], ``NO_TOKEN`` where the way ends.
        next_faded: float32 [B, H], log of the next step's ``scale``.
    """

    place: tuple[jax.Array, jax.Array]
    weights: jax.Array
    scale: jax.Array
    start_scale: jax.Array
    next_entry: jax.Array
    next_faded: jax.Array


def _step_back(
    entry: jax.Array, faded: jax.Array, solved: SolvedChunks, forest: TokenForest
) -> _Step:
    rows = jnp.arange(entry.shape[0])
    token = jnp.maximum(entry, 0)
    number = token // forest.chunk
    slot = token % forest.chunk
    is_on_path = forest.is_ancestor[rows, number, slot][:, None]  # [B, 1, c]

    chunk_faded = solved.faded[rows, number]  # [B, H, c]
    token_faded = jnp.take_along_axis(chunk_faded, slot[:, None, None], axis=2)
    difference = jnp.where(is_on_path, token_faded - chunk_faded, 0.0)
    weights = jnp.where(is_on_path, jnp.exp(difference), 0.0)

    is_under_way = entry >= 0
    is_last = forest.run[rows, number, slot] == 0
    next_entry = jnp.where(is_under_way & ~is_last, forest.entry[rows, number, slot], NO_TOKEN)
    next_faded = faded + token_faded[..., 0]
    return _Step(
        place=(number, slot),
        weights=weights,
        scale=jnp.where(is_under_way[:, None], jnp.exp(faded), 0.0),
        start_scale=jnp.where((is_under_way & is_last)[:, None], jnp.exp(next_faded), 0.0),
        next_entry=next_entry,
        next_faded=next_faded,
    )


def _state_after(
    entry: jax.Array,
    solved: SolvedChunks,
    corrections: jax.Array,
    starts: jax.Array,
    forest: TokenForest,
) -> jax.Array:
    """Return the state after a token of each row, float32 [B, H, k, v]; zeros for ``NO_TOKEN``.

    Args:
        entry: int32 [B].
        solved: ``keys`` and ``faded`` are used.
        corrections: of the chunks up to the token's.
        starts: of the chunks up to the token's.
    """
    rows = jnp.arange(entry.shape[0])
    state = jnp.zeros_like(starts[:, 0])
    faded = jnp.zeros(state.shape[:2], jnp.float32)

    def add_step(carry: tuple) -> tuple:
        entry, faded, state = carry
        step = _step_back(entry, faded, solved, forest)
        number, _ = step.place
        weights = (step.weights * step.scale[..., None])[..., None]
        keys = solved.keys[rows, number] * weights
        state += exact_einsum("bhck,bhcv->bhkv", keys, corrections[rows, number])
        state += step.start_scale[..., None, None] * starts[rows, number]
        return step.next_entry, step.next_faded, state

    initial = (entry, faded, state)
    _, _, state = jax.lax.while_loop(_is_under_way, add_step, initial)
    return state


def _is_under_way(carry: tuple) -> jax.Array:
    """Return whether the first of a loop's values, tokens int32 [B], has any left."""
    return jnp.any(carry[0] >= 0)


def _add_gradients(
    gradients: _Gradients,
    d_state: jax.Array,
    state: jax.Array,
    entry: jax.Array,
    solved: SolvedChunks,
    corrections: jax.Array,
    forest: TokenForest,
) -> _Gradients:
    """Add the gradients of what the state after a token was made of.

    Args:
        gradients: so far.
        d_state: gradient of the state.
        state: as :func:`_state_after` returns it, of which the other arguments are.
    """
    rows = jnp.arange(entry.shape[0])

    def add_step(carry: tuple) -> tuple:
        entry, faded, d_fading, gradients = carry
        step = _step_back(entry, faded, solved, forest)
        number, slot = step.place
        keys = solved.keys[rows, number]
        weights = (step.weights * step.scale[..., None])[..., None]

        d_corrections = weights * exact_einsum("bhck,bhkv->bhcv", keys, d_state)
        d_keys = weights * exact_einsum("bhcv,bhkv->bhck", corrections[rows, number], d_state)
        # Each part of the state fades until the token, from where it was added.
        d_added = jnp.sum(keys * d_keys, axis=-1)
        d_faded = gradients.faded.at[rows, number].add(-d_added)
        d_faded = d_faded.at[rows, number, :, slot].add(d_fading)

        gradients = _Gradients(
            keys=gradients.keys.at[rows, number].add(d_keys),
            corrections=gradients.corrections.at[rows, number].add(d_corrections),
            faded=d_faded,
            starts=gradients.starts.at[rows, number].add(
                step.start_scale[..., None, None] * d_state
            ),
        )
        d_fading = jnp.where(
            (step.next_entry >= 0)[:, None], d_fading - jnp.sum(d_added, axis=-1), 0.0
        )
        return step.next_entry, step.next_faded, d_fading, gradients

    # By the log of a factor of the whole state.
    d_fading = jnp.where((entry >= 0)[:, None], jnp.sum(state * d_state, axis=(-2, -1)), 0.0)
    initial = (entry, jnp.zeros_like(d_fading), d_fading, gradients)
    carry = jax.lax.while_loop(_is_under_way, add_step, initial)
    return carry[-1]
