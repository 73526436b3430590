"""Log-probs and entropies of tokens under a linear head, without holding all logits.

Logits exist for one chunk of tokens and one block of the vocabulary at a time; the backward pass computes them once
more and takes the softmax's normalizer from the forward pass, so a block goes from product to gradient while it is in
cache. The idea is that of Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.

On a CPU, memory is cheaper than a product: there the backward pass may find the logits of the first chunks kept.

Tokens of restricted draws (top-k, a grammar) are normalized over the ids that were left to them, given as bits.

To compare whole distributions, :func:`linear_top_k` finds the likeliest ids of one model and their log-probs, and
:func:`linear_logprobs` computes, beside the token's, another model's log-probs of the same ids (*candidates*).

Shapes: C chunks of N tokens, D hidden, V vocabulary, B vocabulary ids of a block, n blocks, k candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # the score of an id that only pads the vocabulary, or that a draw excluded
BLOCK = 2048  # ids of a block and shard: its logits for a chunk stay in a CPU core's cache, and fill an accelerator

Arrays = tuple[jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def linear_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    temperature: float,
    vocab_shards: int = 1,
    kept_chunks: int = 0,
    support: jax.Array | None = None,
    candidates: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Log-prob of each token and entropy of its distribution, ``softmax(hidden @ head.T / temperature)``.

    All results are differentiable in ``hidden`` and ``head``.

    Args:
        hidden: [C, N, D].
        head: [V, D].
        ids: int32 [C, N].
        valid: bool [C, N]; a chunk in which nothing is valid costs nothing and gives zeros.
        temperature: divides the logits.
        vocab_shards: parts the head's V axis is split into over devices; each then has its part of every block.
        kept_chunks: how many of the first chunks keep their N V logits for the backward pass.
        support: uint32 [C, N, ceil(V / 32)], a bit for each id of the distribution; None: all ids.
        candidates: int32 [C, N, k], further ids to score, each at most once a token; None: none.

    Returns:
        float32 [C, N] twice, and with candidates their log-probs [C, N, k], ``NEGATIVE`` or less for ids that the
        support excludes; values where ``valid`` is false mean nothing.
    """
    return _forward(hidden, head, ids, valid, temperature, vocab_shards, kept_chunks, support, candidates)[0]


def _forward(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    valid: jax.Array,
    temperature: float,
    vocab_shards: int,
    kept_chunks: int,
    support: jax.Array | None,
    candidates: jax.Array | None,
) -> tuple[tuple[jax.Array, ...], tuple]:
    blocks = _blocks(head, vocab_shards)
    like = [ids, ids, ids] if candidates is None else [ids, ids, ids, candidates]
    nothing = tuple(jnp.zeros(x.shape[1:], jnp.float32) for x in like)

    def statistics(
        hidden: jax.Array, ids: jax.Array, support: jax.Array | None, candidates: jax.Array | None, *, keep: bool
    ) -> tuple[tuple, jax.Array | None]:
        """Log-prob, entropy and normalizer of a chunk [N], log-probs of candidates, and logits [n, N, B] if kept."""

        def one(carry: tuple, part: tuple[jax.Array, Arrays]) -> tuple[tuple, jax.Array | None]:
            peak, total, weighted, *found = carry  # of each shard: devices exchange them at the end
            number, block = part
            scores = _scores(hidden, block, len(head), temperature, support)
            if candidates is not None:
                there, column = _in_block(candidates, number, blocks[1], vocab_shards)
                found = [jnp.where(there, jnp.take_along_axis(scores, column, axis=1), found[0])]
            own = scores.reshape(*by_shard, -1)
            higher = jnp.maximum(peak, jnp.max(own, axis=-1))
            shrink = jnp.exp(peak - higher)
            terms = jnp.exp(own - higher[..., None])
            total = total * shrink + jnp.sum(terms, axis=-1)
            weighted = weighted * shrink + jnp.sum(terms * own, axis=-1)
            return (higher, total, weighted, *found), scores if keep else None

        # An axis of one shard would make XLA:CPU's reductions, and the whole scan, three times as slow.
        by_shard = (len(hidden),) if vocab_shards == 1 else (len(hidden), vocab_shards)
        zeros = jnp.zeros(by_shard, jnp.float32)
        found = [] if candidates is None else [jnp.full(candidates.shape, NEGATIVE)]
        initial = (zeros + NEGATIVE, zeros, zeros, *found)
        (peak, total, weighted, *found), scores = jax.lax.scan(one, initial, (jnp.arange(len(blocks[1])), blocks))
        peak, total, weighted = (x.reshape(len(hidden), vocab_shards) for x in (peak, total, weighted))
        highest = jnp.max(peak, axis=1)
        shrink = jnp.exp(peak - highest[:, None])
        total, weighted = (jnp.sum(x * shrink, axis=1) for x in (total, weighted))
        normalizer = highest + jnp.log(total)
        chosen = jnp.einsum("nd,nd->n", hidden, head[ids], preferred_element_type=jnp.float32) / temperature
        found = [x - normalizer[:, None] for x in found]
        return (chosen - normalizer, normalizer - weighted / total, normalizer, *found), scores

    def chunk(part: tuple, *, keep: bool) -> tuple[tuple, jax.Array | None]:
        hidden, ids, valid, support, candidates = part
        empty = jnp.zeros((len(blocks[1]), len(ids), blocks[1].shape[1]), jnp.float32) if keep else None
        run = functools.partial(statistics, keep=keep)
        return jax.lax.cond(jnp.any(valid), run, lambda *_: (nothing, empty), hidden, ids, support, candidates)

    parts = (hidden, ids, valid, support, candidates)
    (logprob, entropy, normalizer, *found), kept = _over_chunks(chunk, parts, kept_chunks)
    return (logprob, entropy, *found), (hidden, head, ids, valid, support, candidates, entropy, normalizer, kept)


def _backward(
    temperature: float, vocab_shards: int, kept_chunks: int, saved: tuple, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, None, None, None, None]:
    hidden, head, ids, valid, support, candidates, entropy, normalizer, kept = saved
    blocks = _blocks(head, vocab_shards)
    d_logprob, d_entropy, *d_found = cotangents
    # d log p(id) / d score = [this id] - p and d H / d score = -p (log p + H). The part of the id itself comes first.
    # Every log-prob of a token, its own and those of candidates, has the same normalizer.
    d_chosen = jnp.where(valid, d_logprob, 0.0)[..., None] / temperature
    d_hidden = d_chosen * head[ids]
    for d in d_found:
        d_logprob = d_logprob + jnp.sum(d, axis=-1)

    def add_normalizer(
        hidden: jax.Array,
        statistics: jax.Array,
        scores: jax.Array | None,
        support: jax.Array | None,
        candidates: Arrays | None,
        d_blocks: jax.Array,
    ) -> Arrays:
        """Add a chunk's part to d head [n, B, D]; also return d hidden [N, D]. ``statistics`` [4, N]."""
        d_logprob, d_entropy, entropy, normalizer = statistics[..., None]

        def one(d_hidden: jax.Array, part: tuple) -> Arrays:
            number, block, scores, d_block = part
            logs = _scores(hidden, block, len(head), temperature, support) if scores is None else scores
            logs = logs - normalizer
            d_scores = jnp.exp(logs) * (d_logprob + d_entropy * (logs + entropy)) / -temperature
            if candidates is not None:
                which, d = candidates
                there, column = _in_block(which, number, blocks[1], vocab_shards)
                d_scores = jax.vmap(lambda x, at, d: x.at[at].add(d))(d_scores, column, jnp.where(there, d, 0.0))
            d_scores = d_scores.astype(hidden.dtype)
            d_hidden = d_hidden + jnp.einsum("nb,bd->nd", d_scores, block[0], preferred_element_type=jnp.float32)
            d_block = d_block + jnp.einsum("nb,nd->bd", d_scores, hidden, preferred_element_type=jnp.float32)
            return d_hidden, d_block

        numbered = (jnp.arange(len(blocks[1])), blocks, scores, d_blocks)
        return jax.lax.scan(one, jnp.zeros(hidden.shape, jnp.float32), numbered)

    def chunk(d_blocks: jax.Array, part: tuple) -> Arrays:
        hidden, valid, *others = part
        skip = lambda hidden, *others: (jnp.zeros(hidden.shape, jnp.float32), others[-1])  # noqa: E731
        d_hidden, d_blocks = jax.lax.cond(jnp.any(valid), add_normalizer, skip, hidden, *others, d_blocks)
        return d_blocks, d_hidden

    statistics = jnp.stack([d_logprob, d_entropy, entropy, normalizer], axis=1)  # [C, 4, N]
    scored = None if candidates is None else (candidates, d_found[0] / temperature)
    d_blocks, parts = jnp.zeros(blocks[0].shape, jnp.float32), []
    for which, scores in ((slice(kept_chunks), kept), (slice(kept_chunks, None), None)):
        if len(hidden[which]):
            own = jax.tree.map(lambda x: x[which], (support, scored))  # noqa: B023
            some = (hidden[which], valid[which], statistics[which], scores, *own)
            d_blocks, part = jax.lax.scan(chunk, d_blocks, some)
            parts.append(part)
    d_head = _unblock(d_blocks, vocab_shards)[: len(head)].at[ids].add(d_chosen * hidden)
    d_hidden = (d_hidden + jnp.concatenate(parts)).astype(hidden.dtype)
    return d_hidden, d_head.astype(head.dtype), None, None, None, None


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
    support: jax.Array | None = None,
) -> Arrays:
    """Return each token's k likeliest ids, int32 [C, N, k], the likeliest first, and their log-probs, float32.

    Args:
        hidden: [C, N, D].
        head: [V, D].
        valid: bool [C, N]; a chunk in which nothing is valid costs nothing and gives zeros.
        temperature: divides the logits.
        k: at most V.
        vocab_size: ids beyond are not returned, although they count in the normalizer.
        vocab_shards: parts the head's V axis is split into over devices; each finds its own likeliest ids first.
        support: uint32 [C, N, ceil(V / 32)], a bit for each id of the distribution; None: all ids. Ids that it
            excludes come last, with a log-prob of ``NEGATIVE`` or less.
    """
    blocks = _blocks(head, vocab_shards)

    def likeliest(hidden: jax.Array, support: jax.Array | None) -> Arrays:
        def one(carry: tuple[jax.Array, ...], block: Arrays) -> tuple[tuple[jax.Array, ...], None]:
            total, scores, ids = carry  # [N, shards], [N, shards, k] twice
            new = _scores(hidden, block, len(head), temperature, support)
            new = new.reshape(len(new), vocab_shards, -1)
            total = jnp.logaddexp(total, jax.nn.logsumexp(new, axis=-1))
            new_ids = jnp.broadcast_to(block[1].reshape(1, vocab_shards, -1), new.shape)
            new = jnp.where(new_ids < vocab_size, new, 2 * NEGATIVE)
            scores, ids = (jnp.concatenate(x, axis=-1) for x in ((scores, new), (ids, new_ids)))
            scores, which = jax.lax.top_k(scores, k)
            return (total, scores, jnp.take_along_axis(ids, which, axis=-1)), None

        empty = jnp.full((len(hidden), vocab_shards, k), 3 * NEGATIVE)
        initial = (empty[..., 0], empty, jnp.zeros(empty.shape, jnp.int32))
        (total, scores, ids), _ = jax.lax.scan(one, initial, blocks)
        scores, which = jax.lax.top_k(scores.reshape(len(scores), -1), k)
        ids = jnp.take_along_axis(ids.reshape(len(ids), -1), which, axis=1)
        return ids, scores - jax.nn.logsumexp(total, axis=1)[:, None]

    def chunk(part: tuple) -> Arrays:
        hidden, valid, support = part
        shape = (len(hidden), k)
        nothing = lambda *_: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))  # noqa: E731
        return jax.lax.cond(jnp.any(valid), likeliest, nothing, hidden, support)

    return jax.lax.map(chunk, (hidden, valid, support))


def _over_chunks(chunk: Callable[..., tuple], parts: tuple, kept_chunks: int) -> tuple[tuple, jax.Array | None]:
    """Map ``chunk`` over the parts' chunks; return all results stacked, and the kept logits of the first."""
    results, kept = [], None
    for which, keep in ((slice(kept_chunks), True), (slice(kept_chunks, None), False)):
        some = jax.tree.map(lambda x: x[which], parts)  # noqa: B023
        if len(some[0]):
            result, logits = jax.lax.map(functools.partial(chunk, keep=keep), some)
            results.append(result)
            kept = logits if keep else kept
    return jax.tree.map(lambda *x: jnp.concatenate(x), *results), kept


def _blocks(head: jax.Array, shards: int) -> Arrays:
    """Return the head [n, B, D], zero-padded, and the ids of its rows [n, B]. A block takes from every shard."""
    count = -(-len(head) // (BLOCK * shards))
    padded = jnp.pad(head, ((0, -len(head) % (count * shards)), (0, 0)))
    ids = jnp.arange(len(padded), dtype=jnp.int32)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(shards, count, -1, *x.shape[1:]).swapaxes(0, 1).reshape(count, -1, *x.shape[1:])

    return split(padded), split(ids)


def _unblock(blocks: jax.Array, shards: int) -> jax.Array:
    """Invert :func:`_blocks`, padding included."""
    count, _, hidden = blocks.shape
    return blocks.reshape(count, shards, -1, hidden).swapaxes(0, 1).reshape(-1, hidden)


def _in_block(ids: jax.Array, number: jax.Array, block_ids: jax.Array, shards: int) -> Arrays:
    """Return whether ids [N, k] are in a block, and in which of its columns; any column if they are not.

    Args:
        ids: of the vocabulary.
        number: of the block.
        block_ids: [n, B], see :func:`_blocks`.
        shards: of the vocabulary.
    """
    count, width = block_ids.shape[0], block_ids.shape[1] // shards
    shard, within = jnp.divmod(ids, count * width)
    return within // width == number, shard * width + within % width


def _scores(
    hidden: jax.Array, block: Arrays, vocab_size: int, temperature: float, support: jax.Array | None
) -> jax.Array:
    """Return the scaled logits float32 [N, B] of a block of the vocabulary; of a support's bits [N, V / 32], if any."""
    weight, ids = block
    scores = jnp.einsum("nd,bd->nb", hidden, weight, preferred_element_type=jnp.float32) / temperature
    kept = ids < vocab_size
    if support is not None:
        words = jnp.take(support, ids >> 5, axis=1, mode="fill", fill_value=0)
        kept &= (words >> (ids & 31).astype(jnp.uint32)) & 1 == 1
    return jnp.where(kept, scores, NEGATIVE)
