"""Hypotheses about what follows the last hidden states: the head, logits, temperature and support.

They need no further pass of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.agreement.logits import LogitChange, Tokens, likely_mass, sorted_mass
from jax_agent_rl.agreement.report import Cause
from jax_agent_rl.agreement.subject import DiagnosisSubject
from jax_agent_rl.models.hf import tensor_names

SAMPLE_SIZE = 48
"""Tokens that readings are tried on first: a vocabulary is long."""
REFINEMENTS = 7
"""Refinements of a temperature, each seven times as fine as the one before.

What the last digit then leaves of a gap is less than rounding does.
"""
FIRST_KS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100)
MIN_PS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
TINIEST = 1e-30
"""A mass that stands for none."""
CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)
REPETITIONS = (1.01, 1.02, 1.03, 1.05, 1.08, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 2.0)
PENALTIES = (0.1, 0.2, 0.3, 0.5, 1.0, 1.5, 2.0)
MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
"""Numbers that engines pad the size of a vocabulary to a multiple of."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Log-probs that the engine may have read from the same hidden states.

    Attributes:
        cause: what would be wrong.
        label: describes it, after the words "the engine".
        sample_scores: float64 [S], log-probs of the tokens that readings are tried on first.
        read: returns the log-probs of other tokens.
    """

    cause: Cause
    label: str
    sample_scores: np.ndarray
    read: Callable[[Tokens], np.ndarray]


def readings(subject: DiagnosisSubject, sample: Tokens) -> Iterator[Reading]:
    """Yield every reading of a few of the subject's tokens, the most likely readings first."""
    yield from _temperature(sample)
    yield from _heads(subject, sample)
    yield from _supports(sample)
    yield from _changed_logits(subject, sample)


def _temperature(sample: Tokens) -> Iterator[Reading]:
    """Try temperatures, coarsely at first, then around the best one."""
    configured = sample.temperature
    temperatures = np.geomspace(0.1, 10, 21) * configured
    best_temperature = configured
    for _ in range(REFINEMENTS):
        scores = sample.at_temperatures(temperatures)
        best = int(np.argmin(np.abs(sample.rollout - scores).mean(axis=1)))
        best_temperature = float(temperatures[best])
        low = temperatures[max(best - 1, 0)]
        high = temperatures[min(best + 1, len(temperatures) - 1)]
        temperatures = np.geomspace(low, high, 15)
    if abs(best_temperature / configured - 1) <= 1e-3:
        return

    label = "reports log-probs"
    if abs(best_temperature - 1) < 1e-3:
        label += " from before it is applied"
    label += f" (of temperature {best_temperature:.3g}, not {configured:.3g})"

    def read(tokens: Tokens) -> np.ndarray:
        return tokens.at_temperatures([best_temperature])[0]

    yield Reading(cause=Cause.TEMPERATURE, label=label, sample_scores=read(sample), read=read)


def _heads(subject: DiagnosisSubject, sample: Tokens) -> Iterator[Reading]:
    """Try the embeddings as the head, and a last norm without its weights."""
    names = tensor_names(subject.model)
    if "lm_head" in subject.params:

        def read_embeddings(tokens: Tokens) -> np.ndarray:
            return tokens.logprobs(params={"embed": tokens.params["embed"]})

        label = f"reads logits from {names['embed']}, not {names['lm_head']}"
        yield Reading(
            cause=Cause.MISNAMED_TENSOR,
            label=label,
            sample_scores=read_embeddings(sample),
            read=read_embeddings,
        )

    norm = np.asarray(subject.params["final_norm"], np.float32) + subject.model.norm_offset
    if (norm == 1).all() or (norm == 0).any():
        return

    def read_unscaled(tokens: Tokens) -> np.ndarray:
        return tokens.logprobs(hidden=(tokens.hidden / norm).astype(tokens.hidden.dtype))

    label = f"has no {names['final_norm']}"
    yield Reading(
        cause=Cause.MISSING_TENSOR,
        label=label,
        sample_scores=read_unscaled(sample),
        read=read_unscaled,
    )


def _supports(sample: Tokens) -> Iterator[Reading]:
    """Try top-k, top-p and min-p; each makes sampled ids likelier, by the mass of the support."""
    support_mass = _support_mass(sample)
    is_restricted = support_mass < 1 - 1e-4
    if not is_restricted.any():
        return

    # Where k is none of the usual ones, it is the median number of ids that the masses speak for.
    ks = np.array([*FIRST_KS, 1])
    counts = sorted_mass(sample, ks, support_mass)[len(ks)]
    ks[-1] = max(int(np.median(counts[is_restricted])), 1)
    *by_k, _, nucleus_mass, mass_without_last, last_share = sorted_mass(sample, ks, support_mass)
    for k, mass in zip(ks, by_k, strict=True):
        label = f"samples from the {int(k)} likeliest ids (top_k={int(k)})"
        yield _restricted(
            sample, label, mass, lambda tokens, k=k: _sorted_mass(tokens, [int(k)])[0]
        )

    low = float(mass_without_last.max())
    high = float(nucleus_mass.min())
    if low < high < 1:
        label = f"samples from a nucleus (top_p between {low:.3g} and {high:.3g})"
        yield _restricted(sample, label, nucleus_mass, lambda tokens: _sorted_mass(tokens, [1])[2])

    smallest = float(np.median(last_share[is_restricted]))
    min_ps = sorted({*MIN_PS, float(f"{smallest:.3g}")})
    by_min_p = likely_mass(sample, min_ps)
    for min_p, mass in zip(min_ps, by_min_p, strict=True):

        def compute_mass(tokens: Tokens, min_p: float = min_p) -> np.ndarray:
            return likely_mass(tokens, [min_p])[0]

        label = (
            f"samples from ids at least {min_p:g} times as likely as the likeliest"
            f" (min_p={min_p:g})"
        )
        yield _restricted(sample, label, mass, compute_mass)


def _support_mass(tokens: Tokens) -> np.ndarray:
    """Return the mass [S] of the support that would explain each engine log-prob."""
    return np.exp(np.minimum(tokens.plain - tokens.rollout, 0.0))


def _sorted_mass(tokens: Tokens, ks: Sequence[int]) -> np.ndarray:
    return sorted_mass(tokens, np.asarray(ks), _support_mass(tokens))


def _restricted(
    sample: Tokens,
    label: str,
    sample_mass: np.ndarray,
    compute_mass: Callable[[Tokens], np.ndarray],
) -> Reading:
    """Return the reading of draws from a support of this probability mass."""

    def read(tokens: Tokens) -> np.ndarray:
        return tokens.plain - np.log(np.maximum(compute_mass(tokens), TINIEST))

    sample_scores = sample.plain - np.log(np.maximum(sample_mass, TINIEST))
    return Reading(
        cause=Cause.TRUNCATED_SUPPORT, label=label, sample_scores=sample_scores, read=read
    )


def _changed_logits(subject: DiagnosisSubject, sample: Tokens) -> Iterator[Reading]:
    """Try caps, forbidden ids, penalties, and rows that pad the vocabulary."""
    eos = subject.model.eos_token_ids
    changes: dict[str, LogitChange] = {}
    if eos:
        ids = ", ".join(map(str, eos))
        label = f"never samples EOS (id {ids}), as with min_tokens or ignore_eos"
        changes[label] = LogitChange(forbids=1.0)
    if subject.model.logit_softcap is not None:
        changes["does not cap logits"] = LogitChange(cap=0.0)
    for cap in CAPS:
        changes[f"caps logits at {cap:g}"] = LogitChange(cap=cap)
    for penalty in REPETITIONS:
        changes[f"applies a repetition penalty of {penalty:g}"] = LogitChange(repetition=penalty)
    for penalty in PENALTIES:
        changes[f"applies a presence penalty of {penalty:g}"] = LogitChange(presence=penalty)
        changes[f"applies a frequency penalty of {penalty:g}"] = LogitChange(frequency=penalty)
    size = subject.model.vocab_size
    for rows in sorted({-size % multiple for multiple in MULTIPLES} - {0}):
        label = f"also samples from {rows} rows of zeros, which pad the vocabulary of {size} ids"
        changes[label] = LogitChange(zero_rows=float(rows))

    by_change = sample.changed(list(changes.values()), eos)
    for (label, change), scores in zip(changes.items(), by_change, strict=True):

        def read(tokens: Tokens, change: LogitChange = change) -> np.ndarray:
            return tokens.changed([change], eos)[0]

        yield Reading(cause=Cause.LOGITS, label=label, sample_scores=scores, read=read)
