"""Log-probs under a linear head on NVIDIA GPUs, with Pallas kernels by Triton.

Forward, a program has a tile of tokens and a span of the vocabulary. It keeps running sums of its
softmax in registers, so that no logit is written to memory. Backward, one kernel computes the
logits of a block of the vocabulary once more and writes their gradients, in the precision of the
hidden states; two products of cuBLAS take them to the gradients of the hidden states and of the
block. What a block adds to the head's gradient is whole, as all tokens are in it::

    hidden ─┬─► kernel: d scores [N, B] ─┬─► x block  ─► + d hidden [N, D]
    block ──┘                            └─► x hidden ─► d block [B, D] ─► sum-scatter over devices

Shapes: N tokens, D hidden, V vocabulary, B vocabulary ids of a block, S spans.
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
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models.layers import softcapped
from jax_agent_rl.models.sharding import ROWS

NEGATIVE = -1e30
"""The score of an id that only pads a tile or the vocabulary, or that a draw excluded."""
SPAN = 2048
"""Vocabulary ids that a program of the forward pass visits."""
BLOCK_NUMBERS = 1 << 25
"""Numbers of a block's gradients, of all tokens; in bfloat16 64 MiB."""
TILE_TOKENS = 128
TILE_IDS = 128
_NARROWEST = 16  # of Triton's products
_WARPS = 8
_STAGES = 3
TOKEN_AXES = (*ROWS, "context")
"""Axes of the mesh that split the tokens."""


class Scoring(NamedTuple):
    """How products become scores.

    Attributes:
        temperature: divides them.
        softcap: the model's ``logit_softcap``.
    """

    temperature: float
    softcap: float | None


class Statistics(NamedTuple):
    """Sums of each token's scores over spans of the vocabulary, float32 [N, S] each.

    Attributes:
        peak: highest score.
        total: sum of the scores' exponentials, relative to the peak.
        weighted: likewise, each times its score.
        own: score of the token's id, 0 in other spans.
    """

    peak: Any
    total: Any
    weighted: Any
    own: Any


class TokenGradients(NamedTuple):
    """What the backward pass is given of each token, [N] each.

    Attributes:
        ids: int32.
        valid: bool.
        d_logprob: float32.
        d_entropy: float32.
        entropy: float32.
        normalizer: float32, log of the softmax's normalizer.
    """

    ids: Any
    valid: Any
    d_logprob: Any
    d_entropy: Any
    entropy: Any
    normalizer: Any


def supports(hidden: jax.Array, head: jax.Array) -> bool:
    """Return whether tiles divide hidden states of this size, and products are of one precision."""
    return hidden.shape[-1] % _NARROWEST == 0 and hidden.dtype == head.dtype


def forward(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    *,
    scoring: Scoring,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute log-probs, entropies and normalizers, float32 [C, N] each; 0 where not valid.

    Args:
        hidden: [C, N, D]; on a mesh N is split over :data:`TOKEN_AXES`.
        head: [V, D]; on a mesh V is split over ``tensor``.
        ids: int32 [C, N].
        valid: bool [C, N]; a tile in which nothing is valid costs nothing.
        interpret: compute what the kernel does without a GPU.
    """

    def shard(hidden: jax.Array, head: jax.Array, ids: jax.Array, valid: jax.Array) -> Statistics:
        shape = ids.shape
        local_ids = _ids_of_shard(ids.reshape(-1), len(head), mesh)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        sums = _statistics(tokens, head, local_ids, valid.reshape(-1), scoring, interpret)
        return Statistics(*(x.reshape(*shape, -1) for x in sums))

    token_spec = PartitionSpec(None, TOKEN_AXES)
    run = _on_mesh(
        shard,
        mesh,
        in_specs=(token_spec, PartitionSpec("tensor"), token_spec, token_spec),
        out_specs=PartitionSpec(None, TOKEN_AXES, "tensor"),
    )
    sums = run(hidden, head, ids, valid)

    highest = jnp.max(sums.peak, axis=-1)
    shrink = jnp.exp(sums.peak - highest[..., None])
    total = jnp.sum(sums.total * shrink, axis=-1)
    weighted = jnp.sum(sums.weighted * shrink, axis=-1)
    total = jnp.where(valid, total, 1.0)
    normalizer = highest + jnp.log(total)
    logprob = jnp.sum(sums.own, axis=-1) - normalizer
    entropy = normalizer - weighted / total
    results = (logprob, entropy, normalizer)
    return tuple(jnp.where(valid, x, 0.0) for x in results)  # type: ignore[return-value]


def backward(
    hidden: jax.Array,
    head: jax.Array,
    tokens: TokenGradients,
    *,
    scoring: Scoring,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of ``hidden`` and ``head``; see :func:`forward`.

    Args:
        tokens: arrays [C, N].
    """

    def shard(
        hidden: jax.Array, head: jax.Array, tokens: TokenGradients
    ) -> tuple[jax.Array, jax.Array]:
        flat = TokenGradients(*(x.reshape(-1) for x in tokens))
        flat = flat._replace(ids=_ids_of_shard(flat.ids, len(head), mesh))
        flat_hidden = hidden.reshape(-1, hidden.shape[-1])
        d_hidden, d_head = _gradients(flat_hidden, head, flat, scoring, mesh, interpret)
        if mesh is not None:
            d_hidden = jax.lax.psum(d_hidden, "tensor")
        return d_hidden.astype(hidden.dtype).reshape(hidden.shape), d_head

    token_spec = PartitionSpec(None, TOKEN_AXES)
    run = _on_mesh(
        shard,
        mesh,
        in_specs=(token_spec, PartitionSpec("tensor"), token_spec),
        out_specs=(token_spec, PartitionSpec("tensor", "fsdp")),
    )
    return run(hidden, head, tokens)


def _on_mesh(
    shard: Callable[..., Any], mesh: Mesh | None, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    if mesh is None:
        return shard
    return jax.shard_map(shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _ids_of_shard(ids: jax.Array, vocab_size: int, mesh: Mesh | None) -> jax.Array:
    """Return ids within this shard's part of the vocabulary; others are outside of it."""
    if mesh is None:
        return ids
    return ids - jax.lax.axis_index("tensor") * vocab_size


# --- around the kernels ---------------------------------------------------------------------------


def _statistics(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    scoring: Scoring,
    interpret: bool,
) -> Statistics:
    """Compute the sums of tokens [N, D] over all spans of a head [V, D]."""
    count, size = hidden.shape
    vocab_size = len(head)
    spans = -(-vocab_size // SPAN)
    hidden = _pad_tokens(hidden)
    padded_count = len(hidden)

    of_tokens = pl.BlockSpec((TILE_TOKENS,), lambda token, span: (token,))
    of_result = pl.BlockSpec((None, TILE_TOKENS), lambda token, span: (span, token))
    result = jax.ShapeDtypeStruct((spans, padded_count), jnp.float32)
    products = padded_count * vocab_size
    run = pl.pallas_call(
        functools.partial(_statistics_kernel, scoring=scoring),
        grid=(padded_count // TILE_TOKENS, spans),
        in_specs=[
            pl.BlockSpec((TILE_TOKENS, size), lambda token, span: (token, 0)),
            pl.BlockSpec(head.shape, lambda token, span: (0, 0)),
            of_tokens,
            of_tokens,
        ],
        out_specs=Statistics(of_result, of_result, of_result, of_result),
        out_shape=Statistics(result, result, result, result),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * size,
            transcendentals=products,
            bytes_accessed=(hidden.size + head.size) * hidden.dtype.itemsize,
        ),
        interpret=interpret,
        name="logprob_statistics",
    )
    sums = run(hidden, head, _pad_tokens(ids), _pad_tokens(valid))
    return Statistics(*(x.T[:count] for x in sums))


def _gradients(
    hidden: jax.Array,
    head: jax.Array,
    tokens: TokenGradients,
    scoring: Scoring,
    mesh: Mesh | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of hidden states [N, D], float32, and of the head.

    The head's gradient is summed over the devices that have other tokens, and split over ``fsdp``.
    """
    count = len(hidden)
    hidden = _pad_tokens(hidden)
    tokens = TokenGradients(*map(_pad_tokens, tokens))
    vocab_size = len(head)
    block_size = max(TILE_IDS, BLOCK_NUMBERS // len(hidden) // TILE_IDS * TILE_IDS)
    block_size = min(block_size, vocab_size)

    def add_block(sums: tuple, begin: jax.Array | int, *, size: int) -> tuple[tuple, None]:
        d_hidden, d_head = sums
        block = jax.lax.dynamic_slice_in_dim(head, begin, size)
        in_block = tokens._replace(ids=tokens.ids - begin)
        d_scores = _score_gradients(hidden, block, in_block, scoring, interpret)
        d_hidden += jnp.einsum("nb,bd->nd", d_scores, block, preferred_element_type=jnp.float32)
        d_block = jnp.einsum("nb,nd->bd", d_scores, hidden, preferred_element_type=jnp.float32)
        if mesh is not None:
            d_block = jax.lax.psum_scatter(d_block, "fsdp", scatter_dimension=1, tiled=True)
            d_block = jax.lax.psum(d_block, [axis for axis in TOKEN_AXES if axis != "fsdp"])
        d_block = d_block.astype(head.dtype)
        return (d_hidden, jax.lax.dynamic_update_slice_in_dim(d_head, d_block, begin, axis=0)), None

    fsdp_shards = 1 if mesh is None else mesh.shape["fsdp"]
    d_head = jnp.zeros((vocab_size, hidden.shape[1] // fsdp_shards), head.dtype)
    sums = (jnp.zeros(hidden.shape, jnp.float32), d_head)
    begins = jnp.arange(vocab_size // block_size, dtype=jnp.int32) * block_size
    sums, _ = jax.lax.scan(functools.partial(add_block, size=block_size), sums, begins)
    last_size = vocab_size % block_size
    if last_size:
        sums, _ = add_block(sums, vocab_size - last_size, size=last_size)

    d_hidden, d_head = sums
    return d_hidden[:count], d_head


def _score_gradients(
    hidden: jax.Array,
    block: jax.Array,
    tokens: TokenGradients,
    scoring: Scoring,
    interpret: bool,
) -> jax.Array:
    """Return the gradients of the products of tokens [N, D] and a block [B, D] -> [N, B].

    Args:
        tokens: their ids are indices in the block, or outside of it.
    """
    count, size = hidden.shape
    block_size = len(block)
    of_tokens = pl.BlockSpec((TILE_TOKENS,), lambda token, column: (token,))
    result = jax.ShapeDtypeStruct((count, block_size), hidden.dtype)
    products = count * block_size
    arrays = (hidden, block, result)
    run = pl.pallas_call(
        functools.partial(_score_gradient_kernel, scoring=scoring),
        grid=(count // TILE_TOKENS, -(-block_size // TILE_IDS)),
        in_specs=[
            pl.BlockSpec((TILE_TOKENS, size), lambda token, column: (token, 0)),
            pl.BlockSpec(block.shape, lambda token, column: (0, 0)),
            TokenGradients(*[of_tokens] * len(tokens)),
        ],
        out_specs=pl.BlockSpec((TILE_TOKENS, block_size), lambda token, column: (token, 0)),
        out_shape=result,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * size,
            transcendentals=products,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays),
        ),
        interpret=interpret,
        name="logprob_score_gradients",
    )
    return run(hidden, block, tokens)


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pad the first axis to whole tiles, with tokens that are not valid."""
    padding = -len(x) % TILE_TOKENS
    return jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))


# --- in the kernels -------------------------------------------------------------------------------


def _scores(
    hidden_ref: Any, head_ref: Any, begin: jax.Array, any_valid: jax.Array, scoring: Scoring
) -> jax.Array:
    """Return the scores of a tile of tokens and the tile of ids that begins at ``begin``.

    Args:
        any_valid: int32, 1 or 0; at 0 nothing is computed, and scores mean nothing.
    """
    size = hidden_ref.shape[1]
    depth = 128 // hidden_ref.dtype.itemsize
    while size % depth:
        depth //= 2
    rows = pl.ds(begin, TILE_IDS)
    is_id = begin + jnp.arange(TILE_IDS, dtype=jnp.int32) < head_ref.shape[0]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        columns = pl.ds(step * depth, depth)
        x = hidden_ref[:, columns]
        weight = triton.load(head_ref.at[rows, columns], mask=is_id[:, None], other=0)
        product = jax.lax.dot_general(
            x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total + product

    steps = any_valid * (size // depth)
    zeros = jnp.zeros((TILE_TOKENS, TILE_IDS), jnp.float32)
    products = jax.lax.fori_loop(0, steps, add, zeros)
    scores = softcapped(products, scoring.softcap) / scoring.temperature
    return jnp.where(is_id[None, :], scores, NEGATIVE)


def _statistics_kernel(
    hidden_ref: Any, head_ref: Any, ids_ref: Any, valid_ref: Any, *sum_refs: Any, scoring: Scoring
) -> None:
    ids = ids_ref[...]
    any_valid = jnp.max(valid_ref[...].astype(jnp.int32))
    first = pl.program_id(1) * SPAN

    def add(step: jax.Array, carry: Statistics) -> Statistics:
        begin = first + step * TILE_IDS
        scores = _scores(hidden_ref, head_ref, begin, any_valid, scoring)
        columns = begin + jnp.arange(TILE_IDS, dtype=jnp.int32)
        # An id of another device's part may lie where the last tile ends.
        is_own = (columns[None, :] == ids[:, None]) & (columns[None, :] < head_ref.shape[0])

        peak = jnp.maximum(carry.peak, jnp.max(scores, axis=1))
        shrink = jnp.exp(carry.peak - peak)
        exponentials = jnp.exp(scores - peak[:, None])
        return Statistics(
            peak=peak,
            total=carry.total * shrink + jnp.sum(exponentials, axis=1),
            weighted=carry.weighted * shrink + jnp.sum(exponentials * scores, axis=1),
            own=carry.own + jnp.sum(jnp.where(is_own, scores, 0.0), axis=1),
        )

    zeros = jnp.zeros((TILE_TOKENS,), jnp.float32)
    nothing = Statistics(zeros + NEGATIVE, zeros, zeros, zeros)
    tiles = -(-jnp.minimum(head_ref.shape[0] - first, SPAN) // TILE_IDS)
    result = jax.lax.fori_loop(0, tiles, add, nothing)
    for ref, value in zip(sum_refs, result, strict=True):
        ref[...] = value


def _score_gradient_kernel(
    hidden_ref: Any, block_ref: Any, tokens: TokenGradients, out_ref: Any, *, scoring: Scoring
) -> None:
    valid = tokens.valid[...]
    any_valid = jnp.max(valid.astype(jnp.int32))
    begin = pl.program_id(1) * TILE_IDS
    scores = _scores(hidden_ref, block_ref, begin, any_valid, scoring)
    columns = begin + jnp.arange(TILE_IDS, dtype=jnp.int32)

    # d log p(id) / d score = [this id] - p, and d H / d score = -p (log p + H).
    d_logprob = tokens.d_logprob[...][:, None]
    logprobs = scores - tokens.normalizer[...][:, None]
    by_entropy = tokens.d_entropy[...][:, None] * (logprobs + tokens.entropy[...][:, None])
    is_own = columns[None, :] == tokens.ids[...][:, None]
    d_scores = jnp.where(is_own, d_logprob, 0.0) - jnp.exp(logprobs) * (d_logprob + by_entropy)
    d_products = d_scores / scoring.temperature
    if scoring.softcap is not None:
        tanh = scores * (scoring.temperature / scoring.softcap)
        d_products *= 1.0 - tanh * tanh
    d_products = jnp.where(valid[:, None], d_products, 0.0)
    triton.store(
        out_ref.at[:, pl.ds(begin, TILE_IDS)],
        d_products.astype(out_ref.dtype),
        mask=(columns < out_ref.shape[1])[None, :],
    )
