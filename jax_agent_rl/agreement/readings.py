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

FEW = 48
"""Tokens that readings are tried on first: a vocabulary is long."""
REFINEMENTS = 7
"""Of a temperature, each seven times as fine: what its last digit leaves of a gap is less than
rounding does."""
FIRST_KS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100)
MIN_PS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
TINIEST = 1e-30
"""A mass that stands for none."""
CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)
REPETITIONS = (1.01, 1.02, 1.03, 1.05, 1.08, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 2.0)
PENALTIES = (0.1, 0.2, 0.3, 0.5, 1.0, 1.5, 2.0)
MULTIPLES = (8, 16, 32, 64, 128, 256, 512)
"""Of which engines make vocabularies a multiple."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Log-probs that the engine may have read from the same hidden states.

    Attributes:
        cause: what would be wrong.
        label: describes it, after the words "the engine".
        few: float64 [S], of the tokens that readings are tried on first.
        read: returns those of other tokens.
    """

    cause: Cause
    label: str
    few: np.ndarray
    read: Callable[[Tokens], np.ndarray]


def readings(subject: DiagnosisSubject, few: Tokens) -> Iterator[Reading]:
    """Yield every reading, the most likely ones first.

    Args:
        subject: of the diagnosis.
        few: some of its tokens.
    """
    yield from _temperature(few)
    yield from _heads(subject, few)
    yield from _supports(few)
    yield from _changed_logits(subject, few)


def _temperature(few: Tokens) -> Iterator[Reading]:
    """Try temperatures, first coarsely, then around the best one; and log-probs from before temperature."""
    configured = few.temperature
    tried = np.geomspace(0.1, 10, 21) * configured
    found = configured
    for _ in range(REFINEMENTS):
        scores = few.at_temperatures(tried)
        best = int(np.argmin(np.abs(few.rollout - scores).mean(axis=1)))
        found = float(tried[best])
        tried = np.geomspace(tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)], 15)
    if abs(found / configured - 1) <= 1e-3:
        return
    raw = " from before it is applied" if abs(found - 1) < 1e-3 else ""
    label = f"reports log-probs{raw} (of temperature {found:.3g}, not {configured:.3g})"

    def read(tokens: Tokens) -> np.ndarray:
        return tokens.at_temperatures([found])[0]

    yield Reading(cause=Cause.TEMPERATURE, label=label, few=read(few), read=read)


def _heads(subject: DiagnosisSubject, few: Tokens) -> Iterator[Reading]:
    """Try the embeddings as the head of a model that has another, and a last norm without its weights."""
    names = tensor_names(subject.model)
    if "lm_head" in subject.params:

        def read_embeddings(tokens: Tokens) -> np.ndarray:
            return tokens.logprobs(params={"embed": tokens.params["embed"]})

        label = f"reads logits from {names['embed']}, not {names['lm_head']}"
        yield Reading(
            cause=Cause.MISNAMED_TENSOR, label=label, few=read_embeddings(few), read=read_embeddings
        )
    norm = np.asarray(subject.params["final_norm"], np.float32) + subject.model.norm_offset
    if (norm == 1).all() or (norm == 0).any():
        return

    def read_unscaled(tokens: Tokens) -> np.ndarray:
        return tokens.logprobs(hidden=(tokens.hidden / norm).astype(tokens.hidden.dtype))

    label = f"has no {names['final_norm']}"
    yield Reading(
        cause=Cause.MISSING_TENSOR, label=label, few=read_unscaled(few), read=read_unscaled
    )


def _supports(few: Tokens) -> Iterator[Reading]:
    """Try top-k, top-p and min-p; each makes sampled ids likelier, by the mass that was kept."""
    mass = np.exp(np.minimum(few.plain - few.rollout, 0.0))
    less = mass < 1 - 1e-4
    if not less.any():
        return
    ks = np.array([*FIRST_KS, 1])
    counts = sorted_mass(few.params, few.hidden, few.temperature, ks, mass)[len(ks)]
    ks[-1] = max(int(np.median(counts[less])), 1)
    *by_k, _, reached, below, share = sorted_mass(few.params, few.hidden, few.temperature, ks, mass)
    for k, kept in zip(ks, by_k, strict=True):
        label = f"samples from the {int(k)} likeliest ids (top_k={int(k)})"
        yield _restricted(few, label, kept, lambda tokens, k=k: _mass(tokens, [int(k)])[0])
    low, high = float(below.max()), float(reached.min())
    if low < high < 1:
        label = f"samples from a nucleus (top_p between {low:.3g} and {high:.3g})"
        yield _restricted(few, label, reached, lambda tokens: _mass(tokens, [1])[2])
    smallest = float(np.median(share[less]))
    shares = sorted({*MIN_PS, float(f"{smallest:.3g}")})
    for least, kept in zip(
        shares, likely_mass(few.params, few.hidden, few.temperature, shares), strict=True
    ):

        def read(tokens: Tokens, least: float = least) -> np.ndarray:
            return likely_mass(tokens.params, tokens.hidden, tokens.temperature, [least])[0]

        label = (
            f"samples from ids at least {least:g} times as likely as the likeliest"
            f" (min_p={least:g})"
        )
        yield _restricted(few, label, kept, read)


def _mass(tokens: Tokens, ks: Sequence[int]) -> np.ndarray:
    mass = np.exp(np.minimum(tokens.plain - tokens.rollout, 0.0))
    return sorted_mass(tokens.params, tokens.hidden, tokens.temperature, np.asarray(ks), mass)


def _restricted(
    few: Tokens, label: str, kept: np.ndarray, mass: Callable[[Tokens], np.ndarray]
) -> Reading:
    """Return a reading of draws from ids of that probability mass."""

    def read(tokens: Tokens) -> np.ndarray:
        return tokens.plain - np.log(np.maximum(mass(tokens), TINIEST))

    few_scores = few.plain - np.log(np.maximum(kept, TINIEST))
    return Reading(cause=Cause.TRUNCATED_SUPPORT, label=label, few=few_scores, read=read)


def _changed_logits(subject: DiagnosisSubject, few: Tokens) -> Iterator[Reading]:
    """Try caps, forbidden ids, penalties, and rows that pad the vocabulary."""
    eos = subject.model.eos_token_ids
    tried: dict[str, LogitChange] = {}
    if eos:
        ids = ", ".join(map(str, eos))
        tried[f"never samples EOS (id {ids}), as with min_tokens or ignore_eos"] = LogitChange(
            forbids=1.0
        )
    for cap in CAPS:
        tried[f"caps logits at {cap:g}"] = LogitChange(cap=cap)
    for penalty in REPETITIONS:
        tried[f"applies a repetition penalty of {penalty:g}"] = LogitChange(repetition=penalty)
    for penalty in PENALTIES:
        tried[f"applies a presence penalty of {penalty:g}"] = LogitChange(presence=penalty)
        tried[f"applies a frequency penalty of {penalty:g}"] = LogitChange(frequency=penalty)
    size = subject.model.vocab_size
    for rows in sorted({-size % multiple for multiple in MULTIPLES} - {0}):
        label = f"samples from {rows} rows of zeros, too, which pad the vocabulary of {size} ids"
        tried[label] = LogitChange(zero_rows=float(rows))
    scores = few.changed(list(tried.values()), eos)
    for (label, change), one in zip(tried.items(), scores, strict=True):

        def read(tokens: Tokens, change: LogitChange = change) -> np.ndarray:
            return tokens.changed([change], eos)[0]

        yield Reading(cause=Cause.LOGITS, label=label, few=one, read=read)
