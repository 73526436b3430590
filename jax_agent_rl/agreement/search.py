"""The search for a setting that explains a gap, within a time limit.

::

    contexts ─► the shortest beginning that shows the gap ─► every trial, family by family
                                                    └─ the best of a family ─► all contexts, whole ─► explains or not

A pass over few ids is cheap, so trials are made on the probe: one context, cut a few tokens after
the first one that disagrees. What explains the probe is confirmed on all contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.hypotheses import FAMILIES, OVER, Family, Trial
from jax_agent_rl.agreement.logits import Tokens
from jax_agent_rl.agreement.readings import FEW, readings
from jax_agent_rl.agreement.report import Cause, HypothesisResult, Tolerance
from jax_agent_rl.agreement.subject import ROWS, Context, DiagnosisSubject, Scores
from jax_agent_rl.learner.metrics import Comparison

T = TypeVar("T")
SECONDS = 45.0
"""How long a diagnosis may search, beside a pass that has begun."""
MAX_EXAMINED = 4
"""Contexts that hypotheses are confirmed on."""
QUICK = 0.05
"""Share of the time after which that look ends with fewer contexts that disagree."""
MARGIN = 8
"""Compared tokens of the probe after the first that disagrees."""
EXPLAINED = 0.05
"""Share of the gap that an attempt may leave and still explain it, where rounding leaves less."""
MAX_CONFIRMATIONS = 8
"""Trials of a family that are confirmed on all contexts."""
READINGS = "head, temperature, support and logits"
"""Name of what follows the last hidden states."""
SHOWS = 0.3
"""Share of a context's largest gap that a token has to have for the probe to end after it."""


class TimeLimit:
    """The time that is left for a diagnosis.

    Args:
        seconds: in all.
        clock: seconds, monotonic.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._end = clock() + seconds
        self._reserved = 0.0

    def reserve(self, seconds: float) -> None:
        """Keep time for what comes last."""
        self._reserved = seconds

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether something that takes so long can still be done."""
        return self._clock() + seconds + self._reserved <= self._end

    def part(self, share: float) -> TimeLimit:
        """Return a limit that begins now and has this share of the time."""
        return TimeLimit(share * self.seconds, self._clock)

    def measure(self, run: Callable[[], T]) -> tuple[T, float]:
        """Return what a call returns, and the seconds it took."""
        began = self._clock()
        found = run()
        return found, self._clock() - began


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The log-probs of all contexts under one setting, and what is left of the gap."""

    cause: Cause
    label: str
    scores: Scores
    left: Comparison


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The contexts of a diagnosis, scored by a plain pass.

    Attributes:
        subject: those that disagree most, at most ``MAX_EXAMINED``, each with its first breach.
        tokens: of these, with their hidden states.
        plain: their scores.
        scored: how many were scored.
        others: scores of all that were scored.
        seconds: that a pass over two of them took, at most.
        gap_of_all: between engine and learner in all that were scored. The tolerance of a mean is
            one of many tokens: the worst of many healthy contexts are beyond it.
    """

    subject: DiagnosisSubject
    tokens: Tokens
    plain: Scores
    scored: int
    others: Scores
    seconds: float
    gap_of_all: Comparison

    @property
    def gap(self) -> Comparison:
        """The gap between engine and learner in the examined contexts."""
        return self.subject.compare(self.plain)


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """A context with what a plain pass made of it."""

    context: Context
    hidden: np.ndarray
    scores: np.ndarray
    mean_gap: float


def examine(subject: DiagnosisSubject, tolerance: Tolerance, limit: TimeLimit) -> Examined:
    """Score contexts until enough disagree, all have been scored, or half of the time is gone.

    Those with the largest known gaps come first. Two that disagree are enough where passes are
    slow.
    """

    def known_gap(context: Context) -> float:
        return (
            0.0
            if context.learner is None
            else float(np.abs(context.learner - context.rollout).mean())
        )

    half = limit.part(0.5)
    quick = limit.part(QUICK)
    contexts = sorted(subject.contexts, key=known_gap, reverse=True)
    subject = replace(subject, longest=max(len(context.token_ids) for context in contexts))
    examined: list[_Scored] = []
    breaches = 0
    seconds = 0.0
    for begin in range(0, len(contexts), ROWS):
        enough = MAX_EXAMINED if quick.allows() else ROWS
        if breaches >= enough or (examined and not half.allows()):
            break
        batch = replace(subject, contexts=contexts[begin : begin + ROWS])
        hidden, pass_seconds = limit.measure(batch.hidden)
        seconds = max(seconds, pass_seconds)
        scores = batch.split(batch.tokens(hidden).plain)
        states = np.split(hidden, np.cumsum([len(one) for one in scores])[:-1])
        gaps = batch.gaps(scores)
        for context, own, gap, part in zip(batch.contexts, scores, gaps, states, strict=True):
            breach = _first_breach(context, gap, tolerance)
            if breach is not None:
                breaches += 1
            mean_gap = float(np.abs(gap).mean())
            examined.append(
                _Scored(
                    context=replace(context, breach=breach),
                    hidden=part,
                    scores=own,
                    mean_gap=mean_gap,
                )
            )

    by_gap = sorted(examined, key=lambda scored: -scored.mean_gap)
    worst = [scored for scored in by_gap if scored.context.breach is not None] or by_gap
    worst = worst[:MAX_EXAMINED]
    chosen = replace(subject, contexts=[scored.context for scored in worst])
    plain = [scored.scores for scored in worst]
    hidden = np.concatenate([scored.hidden for scored in worst])
    return Examined(
        subject=chosen,
        tokens=chosen.tokens(hidden, plain=np.concatenate(plain)),
        plain=plain,
        scored=len(examined),
        others=[scored.scores for scored in examined],
        seconds=seconds,
        gap_of_all=Comparison.of(
            np.concatenate([scored.context.rollout - scored.scores for scored in examined])
        ),
    )


def _first_breach(context: Context, gap: np.ndarray, tolerance: Tolerance) -> int | None:
    """Return the index of the first token with a gap that rounding does not make; None if there is none."""
    sizes = np.abs(gap)
    over = np.flatnonzero(sizes > tolerance.token)
    if len(over):
        return int(context.at[over[0]])
    if len(sizes) and sizes.mean() > tolerance.mean:
        return int(context.at[0])
    return None


def probe_of(examined: Examined) -> DiagnosisSubject:
    """Return the shortest beginning of one context that shows the gap."""
    cuts = []
    for context, gap in zip(
        examined.subject.contexts, examined.subject.gaps(examined.plain), strict=True
    ):
        sizes = np.abs(gap)
        shows = int(np.argmax(sizes >= SHOWS * sizes.max()))
        last = min(shows + MARGIN, len(sizes) - 1)
        cuts.append(context.cut(int(context.at[last]) + 1))
    return replace(
        examined.subject, contexts=[min(cuts, key=lambda context: len(context.token_ids))]
    )


@dataclass(kw_only=True)
class Search:
    """Tries families of trials on the probe, and confirms what explains it.

    Attributes:
        examined: the contexts.
        tolerance: of the run.
        limit: on time.
        findings: one for each family.
        explaining: attempts that explain the gap.
        untried: families that time did not suffice for, with how many of their trials were made.
    """

    examined: Examined
    tolerance: Tolerance
    limit: TimeLimit
    findings: list[HypothesisResult] = field(default_factory=list)
    explaining: list[Attempt] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.subject = self.examined.subject
        self.gap = self.examined.gap
        self.probe = probe_of(self.examined)
        self._activations: forward.Activations | None = None
        self._probe_plain = self._plain_of(self.probe.contexts[0])
        self._pass_seconds = 0.0
        self.probe_gap = self.probe.compare(self._probe_plain)
        self.probe = replace(self.probe, gap=self.probe_gap.mean)

    def _plain_of(self, probe: Context) -> Scores:
        """Return the plain scores of the probe: those of its context, as far as it goes."""
        names = [
            (context.name, context.token_ids[: len(probe.token_ids)])
            for context in self.subject.contexts
        ]
        number = names.index((probe.name, probe.token_ids))
        return [self.examined.plain[number][: len(probe.at)]]

    @property
    def activations(self) -> forward.Activations:
        """The learner's activations in the probe."""
        if self._activations is None:
            probe = self.probe
            self._activations = forward.activations(
                probe.model, probe.weights(), probe.inputs(probe.rows)
            )
        return self._activations

    def note_where_it_begins(self, index: int) -> None:
        """Let what begins somewhere be tried from an index on first."""

        def noted(subject: DiagnosisSubject) -> DiagnosisSubject:
            contexts = [replace(context, differs_from=index) for context in subject.contexts]
            return replace(subject, contexts=contexts)

        self.subject = noted(self.subject)
        self.probe = noted(self.probe)

    @property
    def is_over(self) -> bool:
        """Whether an attempt leaves so little that no other needs to be made: others may leave little, too."""
        least = min(2 * self.tolerance.mean, OVER * self.gap.mean)
        return any(attempt.left.mean <= least for attempt in self.explaining)

    @property
    def best(self) -> Attempt | None:
        """The attempt that explains the gap best."""
        return min(self.explaining, key=lambda attempt: attempt.left.mean, default=None)

    def explains(self, left: Comparison, gap: Comparison) -> bool:
        """Return whether what an attempt leaves of a gap is rounding."""
        mean = left.mean <= max(2 * self.tolerance.mean, EXPLAINED * gap.mean)
        largest = left.largest <= max(2 * self.tolerance.token, 2 * EXPLAINED * gap.largest)
        return mean and largest and left.mean < gap.mean / 2

    # --- readings ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Try everything that follows the last hidden states."""
        if self.is_over:
            return
        if not self.limit.allows():
            self.untried.append(READINGS)
            return
        few = self.examined.tokens.some(FEW)
        gap = Comparison.of(few.rollout - few.plain)
        best: dict[Cause, tuple[Comparison, str]] = {}
        count: dict[Cause, int] = {}
        for reading in readings(self.subject, few):
            left = Comparison.of(few.rollout - reading.few)
            count[reading.cause] = count.get(reading.cause, 0) + 1
            if self.explains(left, gap):
                scores = self.subject.split(reading.read(self.examined.tokens))
                left = self._record(reading.cause, reading.label, scores)
            if reading.cause not in best or left.mean < best[reading.cause][0].mean:
                best[reading.cause] = (left, reading.label)
            if self.is_over:
                break
            if not self.limit.allows():
                self.untried.append(READINGS)
                break
        for cause, (left, label) in best.items():
            self._add_finding(cause, label, count[cause], left)

    def compare_answers(self) -> None:
        """Try log-probs that were returned with a neighbouring token, or to another request."""
        if self.is_over:
            return
        for step, name in ((1, "after"), (-1, "before")):
            shifted = [np.roll(own, -step) for own in self.examined.plain]
            for own, context in zip(shifted, self.subject.contexts, strict=True):
                last = -1 if step > 0 else 0
                own[last] = context.rollout[last]  # nothing to compare it with
            label = f"returns with each token the log-prob of the one {name} it"
            left = self._record(Cause.POSITION, label, shifted)
            self._add_finding(Cause.POSITION, label, 1, left)
        exchanged = [self._best_other(context) for context in self.subject.contexts]
        label = "returns the log-probs of another request"
        left = self._record(Cause.MIXED_ANSWERS, label, exchanged)
        self._add_finding(Cause.MIXED_ANSWERS, label, 1, left)

    def _best_other(self, context: Context) -> np.ndarray:
        """Return the scores of the tokens of another context that are nearest to what the engine reported."""
        candidates = [
            other[: len(context.at)]
            for other in self.examined.others
            if len(other) >= len(context.at)
        ]
        return min(candidates, key=lambda other: float(np.abs(context.rollout - other).mean()))

    def _record(self, cause: Cause, label: str, scores: Scores) -> Comparison:
        left = self.subject.compare(scores)
        if self.explains(left, self.gap):
            self.explaining.append(Attempt(cause=cause, label=label, scores=scores, left=left))
        return left

    # --- families ---------------------------------------------------------------------------------

    def try_family(self, name: str, family: Family, *, per_context: bool = False) -> None:
        """Try the trials of a family on the probe, and confirm the best of them."""
        if self.is_over:
            return
        outcome = _Outcome(left=self.probe_gap)
        for trial, left in self._trials(family, self.probe, self._probe_plain, outcome):
            # Other trials may explain the probe as well: a window as long as it is none.
            if self.explains(left, self.probe_gap) and outcome.confirmations < MAX_CONFIRMATIONS:
                outcome.confirmations += 1
                confirmed, label = self._confirm(family, trial, per_context=per_context)
                if self.explains(confirmed, self.gap):
                    outcome.best = replace(trial, label=label)
                    outcome.left = confirmed
                if self.is_over:
                    break
        if outcome.stopped:
            self.untried.append(f"{name} ({outcome.count} tried)" if outcome.count else name)
        if outcome.best is None:
            detail = "there was no time" if outcome.stopped else "there is nothing to try"
            self.findings.append(HypothesisResult(name, "not tested", detail))
            return
        self._add_finding(name, outcome.best.label, outcome.count, outcome.left)

    def _trials(
        self, family: Family, probe: DiagnosisSubject, plain: Scores, outcome: _Outcome
    ) -> Iterator[tuple[Trial, Comparison]]:
        """Yield the trials of a family with what they leave, until there are no more, or there is no time for one."""
        trials = family(probe)
        answer: float | None = None
        while True:
            if not self.limit.allows(self._pass_seconds):
                outcome.stopped = True
                return
            try:
                trial = next(trials) if answer is None else trials.send(answer)
            except StopIteration:
                return
            reuses = trial.change is not None or trial.changes_places_only
            activations = self.activations if reuses and probe is self.probe else None
            scores, seconds = self.limit.measure(
                lambda trial=trial, activations=activations: trial.scores(probe, plain, activations)
            )
            self._pass_seconds = seconds
            left = probe.compare(scores)
            outcome.add(trial, left)
            yield trial, left
            answer = left.mean

    def _confirm(
        self, family: Family, trial: Trial, *, per_context: bool
    ) -> tuple[Comparison, str]:
        """Score all contexts, each by the trial that explains it if they may differ.

        Returns:
            What is left of the gap, and the label of the trial that most contexts were scored by.
            The one that explains the probe, which ends early, need not explain its whole context.
        """
        scores = trial.scores(self.subject, self.examined.plain)
        left = self.subject.compare(scores)
        labels = [trial.label]
        if per_context and not self.explains(left, self.gap):
            labels = []
            alone = []
            for number, (context, own) in enumerate(
                zip(self.subject.contexts, scores, strict=True)
            ):
                best_scores, best = self._score_alone(family, number, context, own)
                alone.append(best_scores)
                labels.append(trial.label if best is None else best.label)
            scores = alone
        label = max(dict.fromkeys(labels), key=labels.count)
        return self._record(trial.cause, label, scores), label

    def _score_alone(
        self, family: Family, number: int, context: Context, scores: np.ndarray
    ) -> tuple[np.ndarray, Trial | None]:
        """Return a context's scores under the family's trial that explains it best, and that, if these do not."""
        alone = replace(self.subject, contexts=[context])
        plain = [self.examined.plain[number]]
        gap = alone.compare(plain)
        alone = replace(alone, gap=gap.mean)
        if self.explains(alone.compare([scores]), gap):
            return scores, None
        outcome = _Outcome(left=alone.compare([scores]))
        for _, left in self._trials(family, alone, plain, outcome):
            if self.explains(left, gap):
                break
        if outcome.best is None:
            return scores, None
        return outcome.best.scores(alone, plain)[0], outcome.best

    def _add_finding(self, name: str, label: str, count: int, left: Comparison) -> None:
        confirmed = any(attempt.label == label for attempt in self.explaining)
        tried = f"best of {count} settings" if count > 1 else "best setting"
        verdict = "explains" if confirmed else "ruled out"
        self.findings.append(HypothesisResult(name, verdict, f"{tried}: the engine {label}", left))

    def nearest(self) -> HypothesisResult | None:
        """Return the finding that leaves the smallest part of its gap."""
        tried = [finding for finding in self.findings if finding.left is not None]
        return min(
            tried, key=lambda finding: finding.left.mean if finding.left else 0.0, default=None
        )


@dataclass
class _Outcome:
    """What became of a family: its best trial, what that left, how many were made, whether time ended it."""

    left: Comparison
    best: Trial | None = None
    count: int = 0
    confirmations: int = 0
    stopped: bool = False

    def add(self, trial: Trial, left: Comparison) -> None:
        """Count a trial, and keep it if it leaves least."""
        self.count += 1
        if self.best is None or left.mean < self.left.mean:
            self.best, self.left = trial, left


def order_families(
    suggested: Sequence[Cause], *, is_late: bool, tensors_agree: bool, after_inserted: bool = False
) -> list[Cause]:
    """Return the families in the order in which they are tried.

    Args:
        suggested: causes that the layers speak for.
        is_late: earlier turns of the contexts agree, so that something began to go wrong between
            turns.
        tensors_agree: the engine's tensors were read, and are the learner's.
        after_inserted: contexts disagree as soon as something was inserted between turns.
    """
    versions = (Cause.STALE_VERSION, Cause.ADAPTER)
    first: list[Cause] = []
    if after_inserted:
        first += [Cause.TOKEN_DRIFT, Cause.PADDING]
    if is_late:
        # Only the last ids are computed again for these, but whole contexts, twice, for a stale
        # prefix.
        first += [Cause.POSITION, Cause.MASK, Cause.TOKEN_DRIFT, Cause.PADDING, Cause.STALE_PREFIX]
    # Layers are compared on the same ids, so what makes them differ is nothing that went wrong
    # between turns.
    order = list(dict.fromkeys([*suggested, *first, *FAMILIES]))
    others = [cause for cause in order if cause not in versions]
    if tensors_agree:
        return [*others, *versions]
    return [*versions, *others]
