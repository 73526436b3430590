"""Log-probs and entropies of tokens under a linear head, without holding all logits.

Logits exist for one chunk of tokens and one block of the vocabulary at a time. The backward pass
computes them once more and takes the softmax's normalizer from the forward pass, so a block goes
from product to gradient while it is in the cache. The idea is from Wijmans et al. 2024, "Cut
Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.

On a CPU, memory is cheaper than a product: there the logits of the first chunks may be kept for the
backward pass. On a GPU, kernels (``learner.logprob_kernel_cuda``) write no logit at all, and the
gradient of the head one block at a time.

Tokens of restricted draws (top-k, a grammar) are normalized over the ids that were left to them,
given as bits.

To compare whole distributions, :func:`linear_top_k` finds the likeliest ids of one model and their
log-probs, and :func:`linear_logprobs` also computes another model's log-probs of these ids
(*candidates*).

Shapes: C chunks of N tokens, D hidden, V vocabulary, B vocabulary ids of a block, n blocks, k
    candidates.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_agent_rl.learner import logprob_kernel_cuda
from jax_agent_rl.learner.logprob_kernel_cuda import NEGATIVE, Scoring, TokenGradients
from jax_agent_rl.models.layers import softcapped
from jax_agent_rl.models.sharding import by_platform

BLOCK = 2048
"""Ids of a block and shard: their logits for a chunk stay in a CPU core's cache, and fill an
accelerator."""

Arrays = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 10))
def linear_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    temperature: float,
    vocab_shards: int = 1,
    kept_chunks: int = 0,
    softcap: float | None = None,
    support: jax.Array | None = None,
    candidates: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, ...]:
    """Return the log-prob of each token, and the entropy of its distribution.

    The distribution is ``softmax(softcapped(hidden @ head.T) / temperature)``. All results are
    differentiable in ``hidden`` and ``head``.

    Args:
        hidden: [C, N, D].
        head: [V, D].
        ids: int32 [C, N].
        valid: bool [C, N]; a chunk in which nothing is valid costs nothing and gives zeros.
        temperature: divides the logits.
        vocab_shards: parts the head's V axis is split into over devices; each then has its part of
            every block.
        kept_chunks: number of first chunks that keep their N V logits for the backward pass.
        softcap: the model's ``logit_softcap``.
        support: uint32 [C, N, ceil(V / 32)], a bit for each id of the distribution; None: all ids.
        candidates: int32 [C, N, k], further ids to score, each at most once per token; None: none.
        mesh: of the devices that the arrays are split over.

    Returns:
        float32 [C, N] twice, and with candidates their log-probs [C, N, k], ``NEGATIVE`` or less
        for ids that the support excludes. Values where ``valid`` is false mean nothing.
    """
    results, _ = _forward(
        hidden,
        head,
        ids,
        valid,
        temperature,
        vocab_shards,
        kept_chunks,
        softcap,
        support,
        candidates,
        mesh,
    )
    return results


def _has_kernel(
    hidden: jax.Array,
    head: jax.Array,
    support: jax.Array | None,
    candidates: jax.Array | None,
    kept_chunks: int,
) -> bool:
    """Return whether the kernels of GPUs do what is asked for."""
    if support is not None or candidates is not None or kept_chunks:
        return False
    return logprob_kernel_cuda.supports(hidden, head)


def _forward(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    temperature: float,
    vocab_shards: int,
    kept_chunks: int,
    softcap: float | None,
    support: jax.Array | None,
    candidates: jax.Array | None,
    mesh: Mesh | None,
) -> tuple[tuple[jax.Array, ...], tuple]:
    scoring = Scoring(temperature, softcap)

    def by_blocks(*arrays: Any) -> tuple[tuple, jax.Array | None]:
        return forward_by_blocks(
            *arrays, scoring=scoring, vocab_shards=vocab_shards, kept_chunks=kept_chunks
        )

    def by_kernel(*arrays: Any) -> tuple[tuple, None]:
        arrays = arrays[:4]  # neither support nor candidates
        return logprob_kernel_cuda.forward(*arrays, scoring=scoring, mesh=mesh), None

    results, logits = by_platform(
        hidden,
        head,
        ids,
        valid,
        support,
        candidates,
        cuda=by_kernel if _has_kernel(hidden, head, support, candidates, kept_chunks) else None,
        default=by_blocks,
    )
    logprob, entropy, normalizer, *candidate_logprobs = results
    saved = (hidden, head, ids, valid, support, candidates, entropy, normalizer, logits)
    return (logprob, entropy, *candidate_logprobs), saved


def forward_by_blocks(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    support: jax.Array | None,
    candidates: jax.Array | None,
    *,
    scoring: Scoring,
    vocab_shards: int,
    kept_chunks: int,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Compute the results in XLA's operations; see :func:`linear_logprobs`.

    Returns:
        log-probs, entropies, normalizers [C, N], and log-probs of candidates; and the logits of the
            chunks that keep them.
    """
    temperature, softcap = scoring
    blocks = _blocks(head, vocab_shards)
    block_ids = blocks[1]
    # The results of a chunk without a valid token: log-prob, entropy, normalizer, candidates.
    per_token = jnp.zeros(ids.shape[1:], jnp.float32)
    nothing = (per_token, per_token, per_token)
    if candidates is not None:
        nothing += (jnp.zeros(candidates.shape[1:], jnp.float32),)

    def statistics(
        hidden: jax.Array,
        ids: jax.Array,
        support: jax.Array | None,
        candidates: jax.Array | None,
        *,
        keep: bool,
    ) -> tuple[tuple, jax.Array | None]:
        """Compute the results of a chunk: one running softmax over the blocks of the vocabulary.

        Returns:
            log-prob, entropy and normalizer [N], and log-probs of candidates; and the logits
            [n, N, B] if they are kept.
        """

        def add_block(
            carry: tuple,
            part: tuple[jax.Array, Arrays],
        ) -> tuple[tuple, jax.Array | None]:
            peak, total, weighted, *candidate_scores = carry
            number, block = part
            scores = _scores(hidden, block, len(head), temperature, softcap, support)
            if candidates is not None:
                in_block, column = _in_block(candidates, number, block_ids, vocab_shards)
                scores_at_column = jnp.take_along_axis(scores, column, axis=1)
                candidate_scores = [jnp.where(in_block, scores_at_column, candidate_scores[0])]

            # Sums are relative to the highest score so far: a higher one shrinks them.
            shard_scores = scores.reshape(*by_shard, -1)
            higher = jnp.maximum(peak, jnp.max(shard_scores, axis=-1))
            shrink = jnp.exp(peak - higher)
            exponentials = jnp.exp(shard_scores - higher[..., None])
            total = total * shrink + jnp.sum(exponentials, axis=-1)
            weighted = weighted * shrink + jnp.sum(exponentials * shard_scores, axis=-1)
            return (higher, total, weighted, *candidate_scores), scores if keep else None

        # Sums of each shard: devices exchange them at the end. An axis of one shard would make
        # XLA:CPU's reductions, and the whole scan, three times as slow.
        by_shard = (len(hidden),) if vocab_shards == 1 else (len(hidden), vocab_shards)
        zeros = jnp.zeros(by_shard, jnp.float32)
        initial = (zeros + NEGATIVE, zeros, zeros)
        if candidates is not None:
            initial += (jnp.full(candidates.shape, NEGATIVE),)
        numbered_blocks = (jnp.arange(len(block_ids)), blocks)
        sums, scores = jax.lax.scan(add_block, initial, numbered_blocks)

        shards = (len(hidden), vocab_shards)
        peak = sums[0].reshape(shards)
        highest = jnp.max(peak, axis=1)
        shrink = jnp.exp(peak - highest[:, None])
        total = jnp.sum(sums[1].reshape(shards) * shrink, axis=1)
        weighted = jnp.sum(sums[2].reshape(shards) * shrink, axis=1)
        normalizer = highest + jnp.log(total)

        products = jnp.einsum("nd,nd->n", hidden, head[ids], preferred_element_type=jnp.float32)
        logprob = softcapped(products, softcap) / temperature - normalizer
        entropy = normalizer - weighted / total
        candidate_logprobs = [x - normalizer[:, None] for x in sums[3:]]
        return (logprob, entropy, normalizer, *candidate_logprobs), scores

    def chunk(part: tuple, *, keep: bool) -> tuple[tuple, jax.Array | None]:
        hidden, ids, valid, support, candidates = part
        no_logits = None
        if keep:
            no_logits = jnp.zeros((len(block_ids), len(ids), block_ids.shape[1]), jnp.float32)
        return jax.lax.cond(
            jnp.any(valid),
            functools.partial(statistics, keep=keep),
            lambda *_: (nothing, no_logits),
            hidden,
            ids,
            support,
            candidates,
        )

    parts = (hidden, ids, valid, support, candidates)
    return _over_chunks(chunk, parts, kept_chunks)


def _backward(
    temperature: float,
    vocab_shards: int,
    kept_chunks: int,
    softcap: float | None,
    mesh: Mesh | None,
    saved: tuple,
    cotangents: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array, None, None, None, None]:
    hidden, head, ids, valid, support, candidates, entropy, normalizer, _ = saved
    scoring = Scoring(temperature, softcap)

    def by_blocks(saved: tuple, cotangents: tuple[jax.Array, ...]) -> Arrays:
        return backward_by_blocks(
            saved, cotangents, scoring=scoring, vocab_shards=vocab_shards, kept_chunks=kept_chunks
        )

    def by_kernel(saved: tuple, cotangents: tuple[jax.Array, ...]) -> Arrays:
        d_logprob, d_entropy = cotangents
        tokens = TokenGradients(ids, valid, d_logprob, d_entropy, entropy, normalizer)
        return logprob_kernel_cuda.backward(hidden, head, tokens, scoring=scoring, mesh=mesh)

    d_hidden, d_head = by_platform(
        saved,
        cotangents,
        cuda=by_kernel if _has_kernel(hidden, head, support, candidates, kept_chunks) else None,
        default=by_blocks,
    )
    return d_hidden, d_head, None, None, None, None


def backward_by_blocks(
    saved: tuple,
    cotangents: tuple[jax.Array, ...],
    *,
    scoring: Scoring,
    vocab_shards: int,
    kept_chunks: int,
) -> Arrays:
    """Return the gradients of ``hidden`` and ``head`` in XLA's operations.

    Args:
        saved: of the forward pass.
        cotangents: gradients of its results.
    """
    hidden, head, ids, valid, support, candidates, entropy, normalizer, logits = saved
    temperature, softcap = scoring
    blocks = _blocks(head, vocab_shards)
    d_logprob, d_entropy, *d_candidates = cotangents

    # d log p(id) / d score = [this id] - p, and d H / d score = -p (log p + H).
    # First comes the part of [this id].
    d_own_score = jnp.where(valid, d_logprob, 0.0)[..., None] / temperature
    if softcap is not None:
        products = jnp.einsum("cnd,cnd->cn", hidden, head[ids], preferred_element_type=jnp.float32)
        own_scores = softcapped(products, softcap) / temperature
        d_own_score = d_own_score * _softcap_slope(own_scores, temperature, softcap)[..., None]
    d_hidden = d_own_score * head[ids]

    # The log-probs of a token and of its candidates have the same normalizer.
    for d in d_candidates:
        d_logprob = d_logprob + jnp.sum(d, axis=-1)

    def add_normalizer(
        hidden: jax.Array,
        statistics: jax.Array,
        scores: jax.Array | None,
        support: jax.Array | None,
        candidates: Arrays | None,
        d_blocks: jax.Array,
    ) -> Arrays:
        """Add a chunk's part to d head [n, B, D]; also return d hidden [N, D].

        Args:
            hidden: [N, D].
            statistics: [4, N], see below.
            scores: [n, N, B], the logits if they were kept.
            support: see :func:`linear_logprobs`.
            candidates: their ids and the gradients of their scores, [N, k] each.
            d_blocks: [n, B, D], sums of the chunks before.
        """
        d_logprob, d_entropy, entropy, normalizer = statistics[..., None]

        def add_block(d_hidden: jax.Array, part: tuple) -> Arrays:
            number, block, scores, d_block = part
            if scores is None:
                scores = _scores(hidden, block, len(head), temperature, softcap, support)

            logprobs = scores - normalizer
            d_softmax = d_logprob + d_entropy * (logprobs + entropy)
            d_scores = jnp.exp(logprobs) * d_softmax / -temperature

            if candidates is not None:
                candidate_ids, d_candidate_scores = candidates
                in_block, column = _in_block(candidate_ids, number, blocks[1], vocab_shards)
                d_in_block = jnp.where(in_block, d_candidate_scores, 0.0)
                d_scores = jax.vmap(_add_at)(d_scores, column, d_in_block)

            if softcap is not None:
                d_scores = d_scores * _softcap_slope(scores, temperature, softcap)

            d_scores = d_scores.astype(hidden.dtype)
            d_hidden = d_hidden + jnp.einsum(
                "nb,bd->nd", d_scores, block[0], preferred_element_type=jnp.float32
            )
            d_block = d_block + jnp.einsum(
                "nb,nd->bd", d_scores, hidden, preferred_element_type=jnp.float32
            )
            return d_hidden, d_block

        parts = (jnp.arange(len(blocks[1])), blocks, scores, d_blocks)
        return jax.lax.scan(add_block, jnp.zeros(hidden.shape, jnp.float32), parts)

    def skip(hidden: jax.Array, *arguments: Any) -> Arrays:
        """Return what ``add_normalizer`` does for a chunk without a valid token."""
        d_blocks = arguments[-1]
        return jnp.zeros(hidden.shape, jnp.float32), d_blocks

    def chunk(d_blocks: jax.Array, part: tuple) -> Arrays:
        hidden, valid, *arguments = part
        d_hidden, d_blocks = jax.lax.cond(
            jnp.any(valid),
            add_normalizer,
            skip,
            hidden,
            *arguments,
            d_blocks,
        )
        return d_blocks, d_hidden

    statistics = jnp.stack([d_logprob, d_entropy, entropy, normalizer], axis=1)  # [C, 4, N]
    scored_candidates = None
    if candidates is not None:
        scored_candidates = (candidates, d_candidates[0] / temperature)
    d_blocks = jnp.zeros(blocks[0].shape, jnp.float32)
    d_hidden_parts = []
    # First the chunks whose logits were kept, then the others.
    for chunks, scores in ((slice(kept_chunks), logits), (slice(kept_chunks, None), None)):
        if not len(hidden[chunks]):
            continue
        parts = (
            hidden[chunks],
            valid[chunks],
            statistics[chunks],
            scores,
            None if support is None else support[chunks],
            jax.tree.map(operator.itemgetter(chunks), scored_candidates),
        )
        d_blocks, d_hidden_part = jax.lax.scan(chunk, d_blocks, parts)
        d_hidden_parts.append(d_hidden_part)

    d_head = _unblock(d_blocks, vocab_shards)[: len(head)].at[ids].add(d_own_score * hidden)
    d_hidden = (d_hidden + jnp.concatenate(d_hidden_parts)).astype(hidden.dtype)
    return d_hidden, d_head.astype(head.dtype)


def _add_at(row: jax.Array, columns: jax.Array, values: jax.Array) -> jax.Array:
    return row.at[columns].add(values)


linear_logprobs.defvjp(_forward, _backward)


def linear_top_k(
    hidden: jax.Array,
    head: jax.Array,
    valid: jax.Array,
    temperature: float,
    k: int,
    *,
    vocab_size: int,
    vocab_shards: int = 1,
    softcap: float | None = None,
    support: jax.Array | None = None,
) -> Arrays:
    """Return each token's k likeliest ids and their log-probs, the likeliest first.

    They are int32 and float32 [C, N, k].

    Args:
        hidden: [C, N, D].
        head: [V, D].
        valid: bool [C, N]; a chunk in which nothing is valid costs nothing and gives zeros.
        temperature: divides the logits.
        k: at most V.
        vocab_size: ids beyond are not returned, although they count in the normalizer.
        vocab_shards: parts the head's V axis is split into over devices; each finds its likeliest
            ids first.
        softcap: the model's ``logit_softcap``.
        support: uint32 [C, N, ceil(V / 32)], a bit for each id of the distribution; None: all ids.
            Ids that it excludes come last, with a log-prob of ``NEGATIVE`` or less.
    """
    blocks = _blocks(head, vocab_shards)

    def likeliest(hidden: jax.Array, support: jax.Array | None) -> Arrays:
        def add_block(
            carry: tuple[jax.Array, ...],
            block: Arrays,
        ) -> tuple[tuple[jax.Array, ...], None]:
            total, top_scores, top_ids = carry  # [N, shards], [N, shards, k] twice
            scores = _scores(hidden, block, len(head), temperature, softcap, support)
            scores = scores.reshape(len(scores), vocab_shards, -1)
            total = jnp.logaddexp(total, jax.nn.logsumexp(scores, axis=-1))

            ids = jnp.broadcast_to(block[1].reshape(1, vocab_shards, -1), scores.shape)
            scores = jnp.where(ids < vocab_size, scores, 2 * NEGATIVE)
            scores = jnp.concatenate([top_scores, scores], axis=-1)
            ids = jnp.concatenate([top_ids, ids], axis=-1)
            top_scores, indices = jax.lax.top_k(scores, k)
            return (total, top_scores, jnp.take_along_axis(ids, indices, axis=-1)), None

        empty = jnp.full((len(hidden), vocab_shards, k), 3 * NEGATIVE)
        initial = (empty[..., 0], empty, jnp.zeros(empty.shape, jnp.int32))
        (total, scores, ids), _ = jax.lax.scan(add_block, initial, blocks)

        # The likeliest of all shards.
        scores, indices = jax.lax.top_k(scores.reshape(len(scores), -1), k)
        ids = jnp.take_along_axis(ids.reshape(len(ids), -1), indices, axis=1)
        return ids, scores - jax.nn.logsumexp(total, axis=1)[:, None]

    def nothing(hidden: jax.Array, support: jax.Array | None) -> Arrays:
        shape = (len(hidden), k)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    def chunk(part: tuple) -> Arrays:
        hidden, valid, support = part
        return jax.lax.cond(jnp.any(valid), likeliest, nothing, hidden, support)

    return jax.lax.map(chunk, (hidden, valid, support))


def _over_chunks(
    chunk: Callable[..., tuple],
    parts: tuple,
    kept_chunks: int,
) -> tuple[tuple, jax.Array | None]:
    """Map ``chunk`` over the chunks of the parts.

    Returns:
        the results of all chunks, stacked, and the logits of the first ``kept_chunks``.
    """
    results = []
    kept_logits = None
    for chunks, keep in ((slice(kept_chunks), True), (slice(kept_chunks, None), False)):
        selected = jax.tree.map(operator.itemgetter(chunks), parts)
        if not len(selected[0]):
            continue
        result, logits = jax.lax.map(functools.partial(chunk, keep=keep), selected)
        results.append(result)
        if keep:
            kept_logits = logits
    return jax.tree.map(lambda *x: jnp.concatenate(x), *results), kept_logits


def _blocks(head: jax.Array, shards: int) -> Arrays:
    """Return the head [n, B, D], zero-padded, and the ids of its rows [n, B].

    A block has rows of every shard.
    """
    count = -(-len(head) // (BLOCK * shards))
    padded = jnp.pad(head, ((0, -len(head) % (count * shards)), (0, 0)))
    ids = jnp.arange(len(padded), dtype=jnp.int32)

    def split(x: jax.Array) -> jax.Array:
        return (
            x.reshape(shards, count, -1, *x.shape[1:])
            .swapaxes(0, 1)
            .reshape(count, -1, *x.shape[1:])
        )

    return split(padded), split(ids)


def _unblock(blocks: jax.Array, shards: int) -> jax.Array:
    """Invert :func:`_blocks`, padding included."""
    count, _, hidden = blocks.shape
    return blocks.reshape(count, shards, -1, hidden).swapaxes(0, 1).reshape(-1, hidden)


def _in_block(ids: jax.Array, number: jax.Array, block_ids: jax.Array, shards: int) -> Arrays:
    """Return whether ids [N, k] are in a block, and their columns in it.

    The column of an id that is in another block means nothing.

    Args:
        ids: of the vocabulary.
        number: of the block.
        block_ids: [n, B], see :func:`_blocks`.
        shards: number of parts of the vocabulary.
    """
    num_blocks = block_ids.shape[0]
    width = block_ids.shape[1] // shards  # columns of a shard in a block
    shard, index_in_shard = jnp.divmod(ids, num_blocks * width)
    in_block = index_in_shard // width == number
    return in_block, shard * width + index_in_shard % width


def _softcap_slope(scores: jax.Array, temperature: float, softcap: float) -> jax.Array:
    """Return the derivative of softcapped logits by the logits before, from scaled logits.

    It is 0 at ids whose score is ``NEGATIVE``.
    """
    tanh = jnp.clip(scores * (temperature / softcap), -1.0, 1.0)
    return 1.0 - tanh * tanh


def _scores(
    hidden: jax.Array,
    block: Arrays,
    vocab_size: int,
    temperature: float,
    softcap: float | None,
    support: jax.Array | None,
) -> jax.Array:
    """Return the scaled logits of a block of the vocabulary, float32 [N, B].

    Ids that pad the vocabulary, or that a support [N, V / 32] excludes, get ``NEGATIVE``.
    """
    weight, ids = block
    products = jnp.einsum("nd,bd->nb", hidden, weight, preferred_element_type=jnp.float32)
    scores = softcapped(products, softcap) / temperature
    is_allowed = ids < vocab_size
    if support is not None:
        words = jnp.take(support, ids >> 5, axis=1, mode="fill", fill_value=0)
        is_allowed &= (words >> (ids & 31).astype(jnp.uint32)) & 1 == 1
    return jnp.where(is_allowed, scores, NEGATIVE)
