"""Sampling on the device: temperature, top-k, top-p and a seed per request, without sorting the vocabulary.

Shapes: V vocabulary, B slots. Logits arrive as [V, B] (the layout the decode step computes them in).

Sorting V ids per slot and step is what makes top-p slow on CPUs and TPUs alike. Instead, the threshold that top-k or
top-p would cut at is found by bisection over the ordered integer image of float32: 32 counting passes give it exactly.
Drawing uses one uniform number per slot and a two-level inverse CDF, so randomness costs O(B), not O(V·B).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_BLOCK = 128  # ids per block of the two-level inverse CDF


def sample(
    logits_VB: jax.Array,
    *,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    forced: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one id per slot.

    Args:
        logits_VB: [V, B] raw logits.
        temperature: float32 [B]; 0 takes the most likely id.
        top_p: float32 [B] in (0, 1]; 1 is off.
        top_k: int32 [B]; 0 is off. Ids that tie with the k-th are kept.
        seed: uint32 [B].
        position: int32 [B], index in the context of the id being drawn. Seed and position fix the draw, so an
            interrupted generation continues with the same ids.
        forced: int32 [B], ids that replace drawn ones; -1 draws.

    Returns:
        Ids int32 [B], and log-probs float32 [B] under the sampled distribution (greedy slots: temperature 1).
    """
    logits_VB = logits_VB.astype(jnp.float32)
    greedy = temperature == 0
    scaled = logits_VB / jnp.where(greedy, 1.0, temperature)
    restricted = ((top_p < 1) | (top_k > 0)) & ~greedy
    scaled = jax.lax.cond(
        jnp.any(restricted),
        lambda z: jnp.where(restricted, _truncate(z, top_p, top_k), z),
        lambda z: z,
        scaled,
    )
    peak = jnp.max(scaled, axis=0)
    weights = jnp.exp(scaled - peak)
    drawn, total = _inverse_cdf(weights, _uniform(seed, position))
    ids = jax.lax.cond(  # an arg max over [V, B] is slow on CPUs, so only if needed
        jnp.any(greedy),
        lambda z: jnp.where(greedy, jnp.argmax(z, axis=0).astype(jnp.int32), drawn),
        lambda z: drawn,
        logits_VB,
    )
    if forced is not None:
        ids = jnp.where(forced >= 0, forced, ids)
    chosen = jnp.take_along_axis(scaled, ids[None], axis=0)[0]
    return ids, chosen - peak - jnp.log(total)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Return one number in [0, 1) per slot from (seed, position)."""

    def one(s: jax.Array, p: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(s), p))

    return jax.vmap(one)(seed, position)


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the ids where the running sum of ``weights`` [V, B] passes ``uniform`` of its total, and totals [B]."""
    vocab, slots = weights.shape
    blocks = jnp.pad(weights, ((0, -vocab % _BLOCK), (0, 0))).reshape(-1, _BLOCK, slots)
    block_cdf = jnp.cumsum(blocks.sum(axis=1), axis=0)  # [V / _BLOCK, B]
    total = block_cdf[-1]
    target = uniform * total
    block = jnp.minimum(jnp.sum(block_cdf <= target, axis=0), blocks.shape[0] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(block_cdf, jnp.maximum(block - 1, 0)[None], axis=0)[0], 0.0)
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]  # [_BLOCK, B]
    offset = jnp.sum(jnp.cumsum(inside, axis=0) <= target - before, axis=0)
    # Rounding may push the target past the block's own sum; the last id with any weight is then the answer.
    last = _BLOCK - 1 - jnp.argmax(inside[::-1] > 0, axis=0)
    return (block * _BLOCK + jnp.minimum(offset, last)).astype(jnp.int32), total


def _truncate(scaled: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Set logits outside top-k, then outside the nucleus of the rest, to -inf."""
    keys = _ordered(scaled)
    k = jnp.where(top_k > 0, top_k, scaled.shape[0])
    kth = _largest_key(keys, lambda kept: jnp.sum(kept, axis=0) >= k)
    scaled = jnp.where(keys >= kth, scaled, -jnp.inf)
    probs = jax.nn.softmax(scaled, axis=0)
    nucleus = _largest_key(keys, lambda kept: jnp.sum(jnp.where(kept, probs, 0.0), axis=0) >= top_p)
    # top_p = 1 keeps everything: rounding of the mass must not cut the tail.
    return jnp.where((keys >= nucleus) | (top_p >= 1), scaled, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Map float32 to int32 so that integers compare as the floats do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, jnp.int32(-(2**31)) - bits)


def _largest_key(keys: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the largest threshold t [B] for which the monotone ``enough(keys >= t)`` holds."""
    slots = keys.shape[1]
    low = jnp.full((slots,), -(2**31), jnp.int32)
    high = jnp.full((slots,), 2**31 - 1, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # ceil((low + high) / 2) without overflow
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        good = enough(keys >= middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
