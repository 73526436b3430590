"""Sampling on the device: temperature, top-k, top-p and a seed per request, without a sort.

Shapes: V vocabulary, B slots. Logits arrive as [V, B] (the layout the decode step computes them
in).

On a mesh each device keeps its part of the vocabulary. Devices exchange maxima, sums and counts
[B], the sums of blocks of ids [V / 128, B], and the block that an id is drawn from [128, B]; never
logits.

Where any slot is restricted (top-k, top-p, min-p, a grammar), the ids that each draw could choose
from come back as bits, so that a learner can normalize over the same ones. Other batches run a
program without any of it.

Sorting V ids per slot and step is what makes top-p slow on CPUs and TPUs alike. Instead, the
threshold that top-k or top-p would cut at is found by bisection over the ordered integer image of
float32: 32 counting passes give it exactly. Drawing uses one uniform number per slot and a
two-level inverse CDF, so randomness costs O(B), not O(V·B).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.jetstream.attention import DEVICES

_BLOCK = 128  # ids per block of the two-level inverse CDF


class Truncation(NamedTuple):
    """How each slot's distribution is truncated.

    Attributes:
        top_p: float32 [B] in (0, 1]; 1 is off.
        top_k: int32 [B]; 0 is off. Ids that tie with the k-th are kept.
        min_p: float32 [B] in [0, 1]; 0 is off.
    """

    top_p: Any
    top_k: Any
    min_p: Any


def sample(
    logits_VB: jax.Array,
    *,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    truncation: Truncation | None = None,
    forced: jax.Array | None = None,
    allowed: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Draw one id per slot.

    Args:
        logits_VB: [V, B] raw logits, on a mesh split by id.
        temperature: float32 [B]; 0 takes the most likely id.
        seed: uint32 [B].
        position: int32 [B], index in the context of the id being drawn. Seed and position fix the
            draw, so an interrupted generation continues with the same ids.
        truncation: min-p, top-k and top-p of each slot; None where no slot has any. A greedy slot
            has none.
        forced: int32 [B], ids that replace drawn ones; -1 draws.
        allowed: uint32 [B, ceil(V / 32)], a bit for each id that may be drawn; None allows all.
        mesh: the engine's mesh, if it has more than one device.

    Returns:
        Ids int32 [B]; log-probs float32 [B] under the sampled distribution (greedy slots:
        temperature 1); and with ``truncation`` or ``allowed`` a bit for each id that could be
        drawn, uint32 [B, ceil(V / 32)].
    """
    settings = (temperature, seed, position, truncation, forced, allowed)
    if mesh is None:
        return _sample(_Shards(()), logits_VB, *settings)

    split = PartitionSpec(DEVICES)
    replicated = PartitionSpec()
    run = jax.shard_map(
        functools.partial(_sample, _Shards(DEVICES)),
        mesh=mesh,
        in_specs=(split, *[replicated] * len(settings)),
        out_specs=replicated,
        check_vma=False,
    )
    return run(logits_VB, *settings)


class _Shards(NamedTuple):
    """The mesh axes over which ids are split; none on one device, where nothing is exchanged."""

    axes: tuple[str, ...]

    def sum(self, x: Any) -> Any:
        return jax.lax.psum(x, self.axes) if self.axes else x

    def max(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def min(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmin(x, self.axes) if self.axes else x

    def gather(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axes, tiled=True) if self.axes else x

    def index(self) -> jax.Array | int:
        return jax.lax.axis_index(self.axes) if self.axes else 0

    def count(self) -> int:
        return jax.lax.axis_size(self.axes) if self.axes else 1

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """Return x[index[b], ..., b] of an array [N, ..., B] whose N is split.

        ``index`` int32 [B] counts all shards' N.
        """
        local = index - self.index() * len(x)
        is_local = (local >= 0) & (local < len(x))
        row = jnp.clip(local, 0, len(x) - 1).reshape((1,) * (x.ndim - 1) + (-1,))
        return self.sum(jnp.where(is_local, jnp.take_along_axis(x, row, axis=0)[0], 0))


def _sample(
    shards: _Shards,
    logits_VB: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    truncation: Truncation | None,
    forced: jax.Array | None,
    allowed: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Run :func:`sample` on one device's ids."""
    logits_VB = logits_VB.astype(jnp.float32)
    greedy = temperature == 0
    scaled = logits_VB / jnp.where(greedy, 1.0, temperature)
    if allowed is not None:
        allowed_VB = _unpack_allowed(shards, allowed, len(logits_VB))
        logits_VB = jnp.where(allowed_VB, logits_VB, -jnp.inf)
        scaled = jnp.where(allowed_VB, scaled, -jnp.inf)
    if truncation is not None:
        scaled = jnp.where(greedy, scaled, _truncate(shards, scaled, truncation))

    peak = shards.max(jnp.max(scaled, axis=0))
    weights = jnp.exp(scaled - peak)
    drawn, total = _inverse_cdf(shards, weights, uniform(seed, position))
    ids = jax.lax.cond(  # an arg max over [V, B] is slow on CPUs, so only if needed
        jnp.any(greedy),
        lambda z: jnp.where(greedy, _argmax(shards, z), drawn),
        lambda z: drawn,
        logits_VB,
    )
    if forced is not None:
        ids = jnp.where(forced >= 0, forced, ids)
    log_probs = shards.take(scaled, ids) - peak - jnp.log(total)

    if truncation is None and allowed is None:
        return ids, log_probs, None
    return ids, log_probs, _pack_support(shards, scaled > -jnp.inf)


def _pack_support(shards: _Shards, support_VB: jax.Array) -> jax.Array:
    """Return bits uint32 [B, ceil(V / 32)] of all devices' ids.

    ``support_VB`` is bool, of this device's ids.
    """
    bits = shards.gather(_pack(support_VB))
    if shards.axes and len(support_VB) % 32:  # each device's last word is padded
        each = (bits[:, None] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
        unpadded = each.reshape(shards.count(), -1, bits.shape[1])[:, : len(support_VB)]
        bits = _pack(unpadded.reshape(-1, bits.shape[1]))
    return bits.T


def _pack(flags: jax.Array) -> jax.Array:
    """Return flags [N, B] as bits, uint32 [ceil(N / 32), B]."""
    padded = jnp.pad(flags.astype(jnp.uint32), ((0, -len(flags) % 32), (0, 0)))
    words = padded.reshape(-1, 32, flags.shape[1])
    return jnp.sum(words << jnp.arange(32, dtype=jnp.uint32)[:, None], axis=1, dtype=jnp.uint32)


def _unpack_allowed(shards: _Shards, bits: jax.Array, vocab: int) -> jax.Array:
    """Return bits [B, n] of 32 ids each as bool [vocab, B], of this device's ``vocab`` ids."""
    each = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flags = each.reshape(len(bits), -1)
    local = jax.lax.dynamic_slice_in_dim(flags, shards.index() * vocab, vocab, axis=1)
    return local.T.astype(bool)


def _softmax(shards: _Shards, scaled: jax.Array) -> jax.Array:
    weights = jnp.exp(scaled - shards.max(jnp.max(scaled, axis=0)))
    return weights / shards.sum(jnp.sum(weights, axis=0))


def _argmax(shards: _Shards, x: jax.Array) -> jax.Array:
    """Return the first of the largest, int32 [B]."""
    largest = jnp.max(x, axis=0)
    first = jnp.argmax(x, axis=0).astype(jnp.int32)
    none = jnp.iinfo(jnp.int32).max
    has_largest = largest == shards.max(largest)
    return shards.min(jnp.where(has_largest, first + shards.index() * len(x), none))


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Return one number in [0, 1) per slot from (seed, position)."""

    def one(s: jax.Array, p: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(s), p))

    return jax.vmap(one)(seed, position)


def _inverse_cdf(
    shards: _Shards, weights: jax.Array, uniform: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draw ids by their weights.

    Args:
        shards: over which ids are split.
        weights: [V, B], not normalized.
        uniform: [B] in [0, 1).

    Returns:
        The ids where the running sum of the weights passes ``uniform`` of its total, and the
        totals [B].
    """
    vocab, slots = weights.shape
    blocks = jnp.pad(weights, ((0, -vocab % _BLOCK), (0, 0))).reshape(-1, _BLOCK, slots)
    block_cdf = jnp.cumsum(shards.gather(blocks.sum(axis=1)), axis=0)  # [V / _BLOCK, B]
    total = block_cdf[-1]
    target = uniform * total

    block = jnp.minimum(jnp.sum(block_cdf <= target, axis=0), len(block_cdf) - 1)
    sum_before = jnp.where(
        block > 0, jnp.take_along_axis(block_cdf, jnp.maximum(block - 1, 0)[None], axis=0)[0], 0.0
    )
    inside = shards.take(blocks, block)  # [_BLOCK, B]
    offset = jnp.sum(jnp.cumsum(inside, axis=0) <= target - sum_before, axis=0)
    # Rounding may push the target past the block's own sum; the last id with any weight is then the
    # answer.
    last = _BLOCK - 1 - jnp.argmax(inside[::-1] > 0, axis=0)

    # Each shard's last block is padded.
    shard = block // len(blocks)
    local_block = block % len(blocks)
    index = shard * vocab + local_block * _BLOCK + jnp.minimum(offset, last)
    return index.astype(jnp.int32), total


def _truncate(shards: _Shards, scaled: jax.Array, truncation: Truncation) -> jax.Array:
    """Set logits below min-p to -inf, then those outside top-k, then those outside the nucleus."""
    top_p, top_k, min_p = truncation
    peak = shards.max(jnp.max(scaled, axis=0))
    scaled = jnp.where(scaled >= peak + jnp.log(min_p), scaled, -jnp.inf)

    keys = _ordered(scaled)
    k = jnp.where(top_k > 0, top_k, len(scaled) * shards.count())
    kth = _largest_key(keys, lambda above: shards.sum(jnp.sum(above, axis=0)) >= k)
    scaled = jnp.where(keys >= kth, scaled, -jnp.inf)

    probs = _softmax(shards, scaled)

    def holds_top_p(above: jax.Array) -> jax.Array:
        return shards.sum(jnp.sum(jnp.where(above, probs, 0.0), axis=0)) >= top_p

    nucleus = _largest_key(keys, holds_top_p)
    # top_p = 1 keeps everything: rounding of the mass must not cut the tail.
    return jnp.where((keys >= nucleus) | (top_p >= 1), scaled, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Map float32 to int32 so that integers compare as the floats do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, jnp.int32(-(2**31)) - bits)


def _largest_key(keys: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the largest threshold t [B] for which the monotone ``is_enough(keys >= t)`` holds."""
    slots = keys.shape[1]
    low = jnp.full((slots,), -(2**31), jnp.int32)
    high = jnp.full((slots,), 2**31 - 1, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # ceil((low + high) / 2) without overflow
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = is_enough(keys >= middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]
