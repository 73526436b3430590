"""From hidden states to the log-probs of compared tokens, under other temperatures, supports and changes of the logits.

Shapes: S compared tokens, N of them at a time, D hidden, V vocabulary, C settings, T ids of a
context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    hidden: np.ndarray
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
            hidden=self.hidden[at],
            ids=self.ids[at],
            rollout=self.rollout[at],
            plain=self.plain[at],
            supports=[self.supports[i] for i in at] if self.supports else (),
            before=self.before[at],
            sampled_before=self.sampled_before[at],
        )

    def logprobs(
        self, *, params: Params | None = None, hidden: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute log-probs float64 [S] with another head, or of other hidden states."""
        states = self.hidden if hidden is None else hidden
        return logprobs(
            params or self.params, states, self.ids, (self.temperature,), self.supports
        )[0]

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
        columns = {
            name: jnp.asarray([row[name] for row in table], jnp.float32) for name in table[0]
        }
        head = head_of(self.params)
        is_forbidden = np.zeros(len(head), bool)
        is_forbidden[[i for i in forbidden if i < len(head)]] = True
        parts = (
            _chunks(self.hidden),
            _chunks(self.ids.astype(np.int32)),
            _masks(self.supports, len(head)),
        )
        before = (_chunks(self.before), _chunks(self.sampled_before))
        found = _changed_logprobs(
            (*parts, *before), head, columns, jnp.asarray(is_forbidden), self.temperature
        )
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
    hidden: np.ndarray,
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
    parts = (_chunks(hidden), head, _chunks(ids.astype(np.int32)), _masks(supports, len(head)))
    return np.asarray(_chosen_logprobs(*parts, jnp.asarray(temperatures, jnp.float32)), np.float64)[
        :, : len(ids)
    ]


def sorted_mass(
    params: Params, hidden: np.ndarray, temperature: float, ks: np.ndarray, mass: np.ndarray
) -> np.ndarray:
    """Compute the probability mass of the likeliest ids.

    Args:
        params: of the output head.
        hidden: [S, D].
        temperature: divides the logits.
        ks: int [C].
        mass: float [S].

    Returns:
        float64 [C + 4, S]: that of the k likeliest ids for each k; then of the number of ids whose
        mass is nearest to ``mass`` that number, their mass, the mass of one id less, and the
        probability of the last of them relative to that of the likeliest.
    """
    columns = []
    for probabilities_SV, mass_S in _probabilities(params, hidden, temperature, mass):
        # On the host: XLA's sort is slow on CPUs.
        sorted_SV = -np.sort(-probabilities_SV, axis=-1)
        total_SV = np.cumsum(sorted_SV, axis=-1, dtype=np.float64)
        nearest_S1 = np.argmin(np.abs(total_SV - mass_S[:, None]), axis=-1)[:, None]
        reached_S1 = np.take_along_axis(total_SV, nearest_S1, axis=1)
        less_S1 = np.take_along_axis(total_SV, np.maximum(nearest_S1 - 1, 0), axis=1)
        below_S1 = np.where(nearest_S1 > 0, less_S1, 0.0)
        share_S1 = np.take_along_axis(sorted_SV, nearest_S1, axis=1) / sorted_SV[:, :1]
        by_k_SC = total_SV[:, np.clip(ks - 1, 0, total_SV.shape[1] - 1)]
        columns.append(
            np.concatenate([by_k_SC, nearest_S1 + 1.0, reached_S1, below_S1, share_S1], axis=1).T
        )
    return np.concatenate(columns, axis=1)


def likely_mass(
    params: Params, hidden: np.ndarray, temperature: float, shares: Sequence[float]
) -> np.ndarray:
    """Compute the mass float64 [C, S] of the ids at least ``shares`` [C] times as likely as the likeliest."""
    columns = []
    for probabilities_SV, _ in _probabilities(params, hidden, temperature, np.zeros(len(hidden))):
        relative_SV = probabilities_SV / probabilities_SV.max(axis=-1, keepdims=True)
        by_share = []
        for share in shares:
            by_share.append(
                np.sum(probabilities_SV, axis=-1, where=relative_SV >= share, dtype=np.float64)
            )
        columns.append(np.stack(by_share))
    return np.concatenate(columns, axis=1)


def _probabilities(
    params: Params, hidden: np.ndarray, temperature: float, values: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a few tokens' probabilities float32 [N, V], and what ``values`` has of them."""
    head = head_of(params)
    for number, chunk in enumerate(_chunks(hidden)):
        begin = number * TOKENS_PER_CHUNK
        some_values = values[begin : begin + TOKENS_PER_CHUNK]
        probabilities = np.asarray(_softmax(chunk, head, jnp.float32(temperature)))
        yield probabilities[: len(some_values)], some_values


def _chunks(x: np.ndarray) -> np.ndarray:
    """Reshape [S, ...] to [chunks, TOKENS_PER_CHUNK, ...], padded with zeros.

    On the host: each number of tokens would be a shape to compile for.
    """
    missing = -len(x) % TOKENS_PER_CHUNK
    padded = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
    return padded.reshape(-1, TOKENS_PER_CHUNK, *x.shape[1:])


def _masks(supports: Sequence[Support | None], vocabulary: int) -> np.ndarray | None:
    if not supports:
        return None
    return _chunks(decode_supports(supports, vocabulary))


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
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    masks: jax.Array | None,
    temperatures: jax.Array,
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
    parts: tuple[Any, ...],
    head: jax.Array,
    changes: dict[str, jax.Array],
    forbidden: jax.Array,
    temperature: float,
) -> jax.Array:
    def chunk(part: tuple[Any, ...]) -> jax.Array:
        hidden, ids, mask, before, sampled = part
        scores = _logits(hidden, head)
        vocabulary = len(head)
        rows = jnp.arange(len(ids))[:, None]
        empty = jnp.zeros((len(ids), vocabulary))
        seen = empty.at[rows, jnp.where(before < 0, vocabulary, before)].add(1.0, mode="drop")
        drawn = empty.at[rows, jnp.where(sampled, before, vocabulary)].add(1.0, mode="drop")

        def under(change: dict[str, jax.Array]) -> jax.Array:
            cap = change["cap"]
            penalty = change["repetition"]
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
def _softmax(hidden: jax.Array, head: jax.Array, temperature: jax.Array) -> jax.Array:
    return jax.nn.softmax(_logits(hidden, head) / temperature, axis=-1)
