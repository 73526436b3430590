"""From hidden states to the log-probs of compared tokens, under other temperatures, supports and changes of the logits.

Shapes: S compared tokens, N of them at a time, D hidden, V vocabulary, C settings, T ids of a context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.generation import decode_supports
from jax_agent_rl.learner.linear_logprobs import NEGATIVE
from jax_agent_rl.models.config import Params
from jax_agent_rl.types import Support

TOKENS_PER_CHUNK = 32  # whose logits are in memory together


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Compared tokens, with what their log-probs are read from.

    Attributes:
        params: of the output head, in the dtype of the products.
        temperature: of the rollout.
        hidden: [S, D].
        ids: int [S].
        rollout: float64 [S], the engine's log-probs.
        plain: float64 [S], the learner's.
        supports: of the draws, S of them; empty if none was restricted.
        before: int32 [S, T], the ids before each, -1 in unused places.
        sampled_before: bool [S, T], those of them that the same generation sampled.
    """

    params: Params
    temperature: float
    hidden: jax.Array
    ids: np.ndarray
    rollout: np.ndarray
    plain: np.ndarray
    supports: Sequence[Support | None]
    before: np.ndarray
    sampled_before: np.ndarray

    def some(self, count: int) -> Tokens:
        """Return at most ``count`` of the tokens, evenly spread."""
        if len(self.ids) <= count:
            return self
        at = np.linspace(0, len(self.ids) - 1, count).astype(int)
        return replace(
            self,
            hidden=self.hidden[jnp.asarray(at)],
            ids=self.ids[at],
            rollout=self.rollout[at],
            plain=self.plain[at],
            supports=[self.supports[i] for i in at] if self.supports else (),
            before=self.before[at],
            sampled_before=self.sampled_before[at],
        )

    def logprobs(self, *, params: Params | None = None, hidden: jax.Array | None = None) -> np.ndarray:
        """Compute log-probs float64 [S] with another head, or of other hidden states."""
        states = self.hidden if hidden is None else hidden
        return logprobs(params or self.params, states, self.ids, (self.temperature,), self.supports)[0]

    def at_temperatures(self, temperatures: Sequence[float] | np.ndarray) -> np.ndarray:
        """Compute log-probs float64 [C, S] at several temperatures."""
        return logprobs(self.params, self.hidden, self.ids, temperatures, self.supports)

    def changed(self, changes: Sequence[LogitChange], forbidden: Sequence[int]) -> np.ndarray:
        """Compute log-probs float64 [C, S] under changes of the logits.

        Args:
            changes: C of them.
            forbidden: ids that a change may forbid.
        """
        table = [asdict(change) for change in changes]
        columns = {name: jnp.asarray([row[name] for row in table], jnp.float32) for name in table[0]}
        head = head_of(self.params)
        is_forbidden = np.zeros(len(head), bool)
        is_forbidden[[i for i in forbidden if i < len(head)]] = True
        parts = (_chunks(self.hidden), _chunks(jnp.asarray(self.ids, jnp.int32)), _masks(self.supports, len(head)))
        before = (_chunks(jnp.asarray(self.before)), _chunks(jnp.asarray(self.sampled_before)))
        found = _changed_logprobs((*parts, *before), head, columns, jnp.asarray(is_forbidden), self.temperature)
        return np.asarray(found, np.float64)[:, : len(self.ids)]


@dataclass(frozen=True, kw_only=True)
class LogitChange:
    """What an engine may do to logits before it samples, in this order; the defaults change nothing.

    Attributes:
        cap: logits become ``cap * tanh(logits / cap)``; 0 for no cap.
        repetition: logits of ids seen before are divided by it, or multiplied if they are negative.
        presence: subtracted from those of ids that were sampled before.
        frequency: the same, as often as they were.
        forbids: 1 if ids are forbidden.
        zero_rows: further ids, with logits of 0.
    """

    cap: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    forbids: float = 0.0
    zero_rows: float = 0.0


def head_of(params: Params) -> jax.Array:
    """Return the output head [V, D], which may be the embedding."""
    return params.get("lm_head", params["embed"])


def logprobs(
    params: Params,
    hidden: jax.Array,
    ids: np.ndarray,
    temperatures: Sequence[float] | np.ndarray,
    supports: Sequence[Support | None] = (),
) -> np.ndarray:
    """Compute log-probs at several temperatures.

    Args:
        params: of the output head.
        hidden: [S, D].
        ids: int [S].
        temperatures: C numbers that divide the logits.
        supports: of the draws, S of them; empty if none was restricted.

    Returns:
        float64 [C, S].
    """
    head = head_of(params)
    parts = (_chunks(hidden), head, _chunks(jnp.asarray(ids, jnp.int32)), _masks(supports, len(head)))
    return np.asarray(_chosen_logprobs(*parts, jnp.asarray(temperatures, jnp.float32)), np.float64)[:, : len(ids)]


def sorted_mass(params: Params, hidden: jax.Array, temperature: float, ks: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Compute the probability mass of the likeliest ids.

    Args:
        params: of the output head.
        hidden: [S, D].
        temperature: divides the logits.
        ks: int [C].
        mass: float [S].

    Returns:
        float64 [C + 4, S]: that of the k likeliest ids for each k; then of the number of ids whose mass is nearest to
        ``mass`` that number, their mass, the mass of one id less, and the probability of the last of them relative to
        that of the likeliest.
    """
    arguments = (_chunks(hidden), head_of(params), jnp.float32(temperature), jnp.asarray(ks, jnp.int32))
    return np.asarray(_mass(*arguments, _chunks(jnp.asarray(mass, jnp.float32))), np.float64)[:, : len(hidden)]


def likely_mass(params: Params, hidden: jax.Array, temperature: float, shares: Sequence[float]) -> np.ndarray:
    """Compute the mass float64 [C, S] of the ids at least ``shares`` [C] times as likely as the likeliest."""
    arguments = (_chunks(hidden), head_of(params), jnp.float32(temperature), jnp.asarray(shares, jnp.float32))
    return np.asarray(_likely_mass(*arguments), np.float64)[:, : len(hidden)]


def _chunks(x: jax.Array) -> jax.Array:
    """Reshape [S, ...] to [chunks, TOKENS_PER_CHUNK, ...], padded with zeros."""
    padded = jnp.pad(x, ((0, -len(x) % TOKENS_PER_CHUNK),) + ((0, 0),) * (x.ndim - 1))
    return padded.reshape(-1, TOKENS_PER_CHUNK, *x.shape[1:])


def _masks(supports: Sequence[Support | None], vocabulary: int) -> jax.Array | None:
    return _chunks(jnp.asarray(decode_supports(supports, vocabulary))) if supports else None


def _joined(chunks: jax.Array) -> jax.Array:
    """Reshape [chunks, C, N] to [C, S]."""
    return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1)


def _logits(hidden: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.einsum("sd,vd->sv", hidden, head, preferred_element_type=jnp.float32)


def _within(scores: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Return scores [N, V] of the ids of a support; the others are far below all."""
    if mask is None:
        return scores
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(len(mask), -1)[:, : scores.shape[1]] == 1, scores, NEGATIVE)


@jax.jit
def _chosen_logprobs(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, masks: jax.Array | None, temperatures: jax.Array
) -> jax.Array:
    def chunk(part: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        hidden, ids, mask = part
        scores = _logits(hidden, head)
        chosen = jnp.take_along_axis(scores, ids[:, None], axis=1)[:, 0]
        scores = _within(scores, mask)

        def at(temperature: jax.Array) -> jax.Array:
            return chosen / temperature - jax.nn.logsumexp(scores / temperature, axis=-1)

        return jax.lax.map(at, temperatures)

    return _joined(jax.lax.map(chunk, (hidden, ids, masks)))


@jax.jit
def _changed_logprobs(
    parts: tuple[Any, ...], head: jax.Array, changes: dict[str, jax.Array], forbidden: jax.Array, temperature: float
) -> jax.Array:
    def chunk(part: tuple[Any, ...]) -> jax.Array:
        hidden, ids, mask, before, sampled = part
        scores, vocabulary = _logits(hidden, head), len(head)
        rows = jnp.arange(len(ids))[:, None]
        empty = jnp.zeros((len(ids), vocabulary))
        seen = empty.at[rows, jnp.where(before < 0, vocabulary, before)].add(1.0, mode="drop")
        drawn = empty.at[rows, jnp.where(sampled, before, vocabulary)].add(1.0, mode="drop")

        def under(change: dict[str, jax.Array]) -> jax.Array:
            cap, penalty = change["cap"], change["repetition"]
            x = jnp.where(cap > 0, cap * jnp.tanh(scores / jnp.where(cap > 0, cap, 1.0)), scores)
            x = jnp.where(seen > 0, jnp.where(x > 0, x / penalty, x * penalty), x)
            x = x - change["presence"] * (drawn > 0) - change["frequency"] * drawn
            x = jnp.where((change["forbids"] > 0) & forbidden, NEGATIVE, x) / temperature
            chosen = jnp.take_along_axis(x, ids[:, None], axis=1)[:, 0]
            total = jax.nn.logsumexp(_within(x, mask), axis=-1)
            return chosen - jnp.logaddexp(total, jnp.log(change["zero_rows"]))

        return jax.lax.map(under, changes)

    return _joined(jax.lax.map(chunk, parts))


@jax.jit
def _mass(hidden: jax.Array, head: jax.Array, temperature: jax.Array, ks: jax.Array, mass: jax.Array) -> jax.Array:
    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        probabilities = -jnp.sort(-jax.nn.softmax(_logits(part[0], head) / temperature, axis=-1), axis=-1)
        total = jnp.cumsum(probabilities, axis=-1)
        nearest = jnp.argmin(jnp.abs(total - part[1][:, None]), axis=-1)[:, None]
        reached = jnp.take_along_axis(total, nearest, axis=1)
        below = jnp.where(nearest > 0, jnp.take_along_axis(total, jnp.maximum(nearest - 1, 0), axis=1), 0.0)
        share = jnp.take_along_axis(probabilities, nearest, axis=1) / probabilities[:, :1]
        by_k = total[:, jnp.clip(ks - 1, 0, total.shape[1] - 1)]
        return jnp.concatenate([by_k, nearest + 1.0, reached, below, share], axis=1).T

    return _joined(jax.lax.map(chunk, (hidden, mass)))


@jax.jit
def _likely_mass(hidden: jax.Array, head: jax.Array, temperature: jax.Array, shares: jax.Array) -> jax.Array:
    def chunk(hidden: jax.Array) -> jax.Array:
        probabilities = jax.nn.softmax(_logits(hidden, head) / temperature, axis=-1)
        relative = probabilities / jnp.max(probabilities, axis=-1, keepdims=True)
        return jax.lax.map(lambda share: jnp.sum(probabilities * (relative >= share), axis=-1), shares)

    return _joined(jax.lax.map(chunk, hidden))
