"""From hidden states to log-probs of compared tokens: temperatures, supports, changed logits.

Shapes: S compared tokens, N of them at a time, D hidden, V vocabulary, C settings, T ids of a
context.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.learner.linear_logprobs import NEGATIVE
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.layers import softcapped
from jax_agent_rl.types import Support
from jax_agent_rl.types.supports import decode_supports

TOKENS_PER_CHUNK = 32
"""Tokens whose logits are in memory together."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Compared tokens, with what their log-probs are computed from.

    Attributes:
        params: the output head, in the dtype of the products.
        temperature: the rollout's temperature.
        softcap: the model's ``logit_softcap``.
        hidden: [S, D].
        ids: int [S].
        rollout: float64 [S], the engine's log-probs.
        plain: float64 [S], the learner's log-probs.
        supports: S supports of the draws; empty if none was restricted.
        context_ids: int32 [S, T], the ids before each token, -1 in unused places.
        is_sampled: bool [S, T], which of these ids the same generation sampled.
    """

    params: Params
    temperature: float
    softcap: float | None
    hidden: np.ndarray
    ids: np.ndarray
    rollout: np.ndarray
    plain: np.ndarray
    supports: Sequence[Support | None]
    context_ids: np.ndarray
    is_sampled: np.ndarray

    def sample(self, count: int) -> Tokens:
        """Return at most ``count`` of the tokens, evenly spread."""
        if len(self.ids) <= count:
            return self
        at = np.linspace(0, len(self.ids) - 1, count).astype(int)
        supports: Sequence[Support | None] = ()
        if self.supports:
            supports = [self.supports[i] for i in at]
        return replace(
            self,
            hidden=self.hidden[at],
            ids=self.ids[at],
            rollout=self.rollout[at],
            plain=self.plain[at],
            supports=supports,
            context_ids=self.context_ids[at],
            is_sampled=self.is_sampled[at],
        )

    def logprobs(
        self, *, params: Params | None = None, hidden: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute log-probs float64 [S] with another head, or of other hidden states."""
        if params is None:
            params = self.params
        if hidden is None:
            hidden = self.hidden
        by_temperature = logprobs(
            params, hidden, self.ids, (self.temperature,), self.supports, softcap=self.softcap
        )
        return by_temperature[0]

    def at_temperatures(self, temperatures: Sequence[float] | np.ndarray) -> np.ndarray:
        """Compute log-probs float64 [C, S] at several temperatures."""
        return logprobs(
            self.params, self.hidden, self.ids, temperatures, self.supports, softcap=self.softcap
        )

    def changed(self, changes: Sequence[LogitChange], forbidden: Sequence[int]) -> np.ndarray:
        """Compute log-probs float64 [C, S] under C changes of the logits.

        Args:
            forbidden: ids that a change may forbid.
        """
        columns = {}
        for field in fields(LogitChange):
            values = [getattr(change, field.name) for change in changes]
            if field.name == "cap":
                model_cap = self.softcap or 0.0
                values = [model_cap if value is None else value for value in values]
            columns[field.name] = jnp.asarray(values, jnp.float32)

        head = head_of(self.params)
        is_forbidden = np.zeros(len(head), bool)
        is_forbidden[[i for i in forbidden if i < len(head)]] = True
        chunks = (
            _chunks(self.hidden),
            _chunks(self.ids.astype(np.int32)),
            _masks(self.supports, len(head)),
            _chunks(self.context_ids),
            _chunks(self.is_sampled),
        )
        scores = _changed_logprobs(
            chunks, head, columns, jnp.asarray(is_forbidden), self.temperature
        )
        return np.asarray(scores, np.float64)[:, : len(self.ids)]


@dataclass(frozen=True, kw_only=True)
class LogitChange:
    """What an engine may do to logits before it samples, in this order.

    The defaults change nothing.

    Attributes:
        cap: logits become ``cap * tanh(logits / cap)``; 0 for no cap, None for the model's.
        repetition: logits of ids seen before are divided by it, or multiplied if they are negative.
        presence: subtracted from the logits of ids that were sampled before.
        frequency: the same, once for each time an id was sampled.
        forbids: 1 if ids are forbidden.
        zero_rows: number of further ids, with logits of 0.
    """

    cap: float | None = None
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
    *,
    softcap: float | None = None,
) -> np.ndarray:
    """Compute log-probs at several temperatures.

    Args:
        hidden: [S, D].
        ids: int [S].
        temperatures: C numbers that divide the logits.
        supports: S supports of the draws; empty if none was restricted.
        softcap: the model's ``logit_softcap``.

    Returns:
        float64 [C, S].
    """
    head = head_of(params)
    scores = _chosen_logprobs(
        _chunks(hidden),
        head,
        _chunks(ids.astype(np.int32)),
        _masks(supports, len(head)),
        jnp.asarray(temperatures, jnp.float32),
        softcap,
    )
    return np.asarray(scores, np.float64)[:, : len(ids)]


def sorted_mass(tokens: Tokens, ks: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Compute the probability mass of the likeliest ids.

    Args:
        ks: int [C].
        mass: float [S], the mass of each token's nucleus, as far as it is known.

    Returns:
        float64 [C + 4, S]: first, for each k, the mass of the k likeliest ids. Then four rows about
        the nucleus whose mass is nearest to ``mass``: its number of ids, its mass, its mass without
        the last id, and the probability of the last id relative to the likeliest one.
    """
    columns = []
    for probabilities_SV, mass_S in _probabilities(tokens, mass):
        # On the host: XLA's sort is slow on CPUs.
        sorted_SV = -np.sort(-probabilities_SV, axis=-1)
        total_SV = np.cumsum(sorted_SV, axis=-1, dtype=np.float64)
        nearest_S1 = np.argmin(np.abs(total_SV - mass_S[:, None]), axis=-1)[:, None]
        reached_S1 = np.take_along_axis(total_SV, nearest_S1, axis=1)
        less_S1 = np.take_along_axis(total_SV, np.maximum(nearest_S1 - 1, 0), axis=1)
        below_S1 = np.where(nearest_S1 > 0, less_S1, 0.0)
        share_S1 = np.take_along_axis(sorted_SV, nearest_S1, axis=1) / sorted_SV[:, :1]

        by_k_SC = total_SV[:, np.clip(ks - 1, 0, total_SV.shape[1] - 1)]
        count_S1 = nearest_S1 + 1.0
        rows = np.concatenate([by_k_SC, count_S1, reached_S1, below_S1, share_S1], axis=1)
        columns.append(rows.T)
    return np.concatenate(columns, axis=1)


def likely_mass(tokens: Tokens, shares: Sequence[float]) -> np.ndarray:
    """Compute the probability mass of all ids that are not much less likely than the likeliest.

    Args:
        shares: C least probabilities of such an id, relative to the likeliest.

    Returns:
        float64 [C, S].
    """
    columns = []
    unused_S = np.zeros(len(tokens.hidden))
    for probabilities_SV, _ in _probabilities(tokens, unused_S):
        relative_SV = probabilities_SV / probabilities_SV.max(axis=-1, keepdims=True)
        by_share = []
        for share in shares:
            mass_S = np.sum(probabilities_SV, axis=-1, where=relative_SV >= share, dtype=np.float64)
            by_share.append(mass_S)
        columns.append(np.stack(by_share))
    return np.concatenate(columns, axis=1)


def _probabilities(tokens: Tokens, values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield probabilities float32 [N, V] of a few tokens at a time, with their ``values`` [N]."""
    head = head_of(tokens.params)
    for number, chunk in enumerate(_chunks(tokens.hidden)):
        begin = number * TOKENS_PER_CHUNK
        chunk_values = values[begin : begin + TOKENS_PER_CHUNK]
        probabilities = _softmax(chunk, head, jnp.float32(tokens.temperature), tokens.softcap)
        yield np.asarray(probabilities)[: len(chunk_values)], chunk_values


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
    is_supported = bits.reshape(len(mask), -1)[:, : scores.shape[1]] == 1
    return jnp.where(is_supported, scores, NEGATIVE)


@functools.partial(jax.jit, static_argnames="softcap")
def _chosen_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    masks: jax.Array | None,
    temperatures: jax.Array,
    softcap: float | None,
) -> jax.Array:
    def score_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        hidden, ids, mask = chunk
        scores = softcapped(_logits(hidden, head), softcap)
        chosen = jnp.take_along_axis(scores, ids[:, None], axis=1)[:, 0]
        scores = _within(scores, mask)

        def score(temperature: jax.Array) -> jax.Array:
            return chosen / temperature - jax.nn.logsumexp(scores / temperature, axis=-1)

        return jax.lax.map(score, temperatures)

    return _joined(jax.lax.map(score_chunk, (hidden, ids, masks)))


@jax.jit
def _changed_logprobs(
    chunks: tuple[Any, ...],
    head: jax.Array,
    changes: dict[str, jax.Array],
    forbidden: jax.Array,
    temperature: float,
) -> jax.Array:
    def score_chunk(chunk: tuple[Any, ...]) -> jax.Array:
        hidden, ids, mask, context_ids, is_sampled = chunk
        scores = _logits(hidden, head)
        vocabulary = len(head)
        rows = jnp.arange(len(ids))[:, None]
        empty = jnp.zeros((len(ids), vocabulary))
        # An id beyond the vocabulary is counted nowhere (mode="drop").
        seen_ids = jnp.where(context_ids < 0, vocabulary, context_ids)
        seen_counts = empty.at[rows, seen_ids].add(1.0, mode="drop")
        sampled_ids = jnp.where(is_sampled, context_ids, vocabulary)
        sampled_counts = empty.at[rows, sampled_ids].add(1.0, mode="drop")

        def score(change: dict[str, jax.Array]) -> jax.Array:
            cap = change["cap"]
            penalty = change["repetition"]
            x = jnp.where(cap > 0, cap * jnp.tanh(scores / jnp.where(cap > 0, cap, 1.0)), scores)
            x = jnp.where(seen_counts > 0, jnp.where(x > 0, x / penalty, x * penalty), x)
            x = x - change["presence"] * (sampled_counts > 0)
            x = x - change["frequency"] * sampled_counts
            x = jnp.where((change["forbids"] > 0) & forbidden, NEGATIVE, x) / temperature
            chosen = jnp.take_along_axis(x, ids[:, None], axis=1)[:, 0]
            total = jax.nn.logsumexp(_within(x, mask), axis=-1)
            return chosen - jnp.logaddexp(total, jnp.log(change["zero_rows"]))

        return jax.lax.map(score, changes)

    return _joined(jax.lax.map(score_chunk, chunks))


@functools.partial(jax.jit, static_argnames="softcap")
def _softmax(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, softcap: float | None
) -> jax.Array:
    logits = softcapped(_logits(hidden, head), softcap)
    return jax.nn.softmax(logits / temperature, axis=-1)
