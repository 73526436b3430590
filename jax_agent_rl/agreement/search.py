"""The search for a setting that explains a gap, within a time limit.

::

    contexts ─► excerpt ─► every trial, family by family
                           └─ the best of a family ─► all contexts ─► explains the gap, or not

A pass over few ids is cheap, so trials are made on the excerpt: the shortest beginning of one
context that shows the gap, cut a few tokens after the first one that disagrees. What explains the
excerpt is confirmed on all contexts in full.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.hypotheses import FAMILIES, OVER, Family, Trial
from jax_agent_rl.agreement.logits import Tokens
from jax_agent_rl.agreement.readings import SAMPLE_SIZE, readings
from jax_agent_rl.agreement.report import Cause, HypothesisResult, Tolerance
from jax_agent_rl.agreement.subject import ROWS, Context, DiagnosisSubject, Scores
from jax_agent_rl.learner.comparison import Comparison

T = TypeVar("T")
SECONDS = 45.0
"""How long a diagnosis may search; a pass that runs at its end is finished."""
MAX_EXAMINED = 4
"""Contexts that hypotheses are confirmed on."""
QUICK = 0.05
"""Share of the time after which fewer contexts that disagree are enough to examine."""
MARGIN = 8
"""Compared tokens of the excerpt after the first that disagrees."""
EXPLAINED = 0.05
"""Share of the gap that an attempt may leave and still explain it, unless rounding leaves more."""
MAX_CONFIRMATIONS = 8
"""Trials of a family that are confirmed on all contexts."""
READINGS = "head, temperature, support and logits"
"""Name of the hypotheses about what follows the last hidden states."""
SHOWS = 0.3
"""Share of a context's largest gap that a token has to have for the excerpt to end after it."""


class TimeLimit:
    """The time that remains for a diagnosis.

    Args:
        seconds: the time for all of it.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
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
        start = self._clock()
        result = run()
        return result, self._clock() - start


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The log-probs of all contexts under one setting, and the gap that it leaves."""

    cause: Cause
    label: str
    scores: Scores
    remaining: Comparison


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The contexts of a diagnosis, scored by a plain pass.

    Attributes:
        subject: has the contexts that disagree most, at most ``MAX_EXAMINED``, each with its first
            breach.
        tokens: the compared tokens of these contexts.
        plain: the scores of these contexts.
        scored: how many contexts were scored.
        all_scores: the scores of all contexts that were scored.
        seconds: the longest time that a pass over two contexts took.
        gap_of_all: the gap in all contexts that were scored. A tolerance of means holds for many
            tokens: the worst of many healthy contexts exceed it.
    """

    subject: DiagnosisSubject
    tokens: Tokens
    plain: Scores
    scored: int
    all_scores: Scores
    seconds: float
    gap_of_all: Comparison

    @property
    def gap(self) -> Comparison:
        """The gap between engine and learner in the examined contexts."""
        return self.subject.compare(self.plain)


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """A context with the result of a plain pass."""

    context: Context
    hidden: np.ndarray
    scores: np.ndarray
    mean_gap: float


def examine(subject: DiagnosisSubject, tolerance: Tolerance, limit: TimeLimit) -> Examined:
    """Score contexts until enough disagree, all have been scored, or half of the time has passed.

    Contexts with the largest known gaps come first. Two that disagree are enough where passes are
    slow.
    """
    half = limit.part(0.5)
    quick = limit.part(QUICK)
    contexts = sorted(subject.contexts, key=_known_gap, reverse=True)
    subject = replace(subject, longest=max(len(context.token_ids) for context in contexts))

    all_scored: list[_Scored] = []
    breaches = 0
    seconds = 0.0
    for begin in range(0, len(contexts), ROWS):
        enough_breaches = MAX_EXAMINED if quick.allows() else ROWS
        if breaches >= enough_breaches or (all_scored and not half.allows()):
            break
        batch = replace(subject, contexts=contexts[begin : begin + ROWS])
        hidden, pass_seconds = limit.measure(batch.hidden)
        seconds = max(seconds, pass_seconds)
        scores = batch.split(batch.tokens(hidden).plain)
        ends = np.cumsum([len(context_scores) for context_scores in scores])
        states = np.split(hidden, ends[:-1])
        for i, context in enumerate(batch.contexts):
            gap = context.rollout - scores[i]
            breach = _first_breach(context, gap, tolerance)
            if breach is not None:
                breaches += 1
            scored = _Scored(
                context=replace(context, breach=breach),
                hidden=states[i],
                scores=scores[i],
                mean_gap=float(np.abs(gap).mean()),
            )
            all_scored.append(scored)

    by_gap = sorted(all_scored, key=lambda scored: -scored.mean_gap)
    breached = [scored for scored in by_gap if scored.context.breach is not None]
    worst = (breached or by_gap)[:MAX_EXAMINED]
    worst_subject = replace(subject, contexts=[scored.context for scored in worst])
    plain = [scored.scores for scored in worst]
    hidden = np.concatenate([scored.hidden for scored in worst])
    all_gaps = [scored.context.rollout - scored.scores for scored in all_scored]
    return Examined(
        subject=worst_subject,
        tokens=worst_subject.tokens(hidden, plain=np.concatenate(plain)),
        plain=plain,
        scored=len(all_scored),
        all_scores=[scored.scores for scored in all_scored],
        seconds=seconds,
        gap_of_all=Comparison.of(np.concatenate(all_gaps)),
    )


def _known_gap(context: Context) -> float:
    """Return the mean gap to the learner's own log-probs, where these are known."""
    if context.learner is None:
        return 0.0
    return float(np.abs(context.learner - context.rollout).mean())


def _first_breach(context: Context, gap: np.ndarray, tolerance: Tolerance) -> int | None:
    """Return the index of the first token with a gap that rounding does not make, if any."""
    sizes = np.abs(gap)
    over = np.flatnonzero(sizes > tolerance.token)
    if len(over):
        return int(context.at[over[0]])
    if len(sizes) and sizes.mean() > tolerance.mean:
        return int(context.at[0])
    return None


def excerpt_of(examined: Examined) -> DiagnosisSubject:
    """Return the shortest beginning of one context that shows the gap."""
    subject = examined.subject
    beginnings = []
    for context, gap in zip(subject.contexts, subject.gaps(examined.plain), strict=True):
        sizes = np.abs(gap)
        first_large = int(np.argmax(sizes >= SHOWS * sizes.max()))
        last = min(first_large + MARGIN, len(sizes) - 1)
        beginnings.append(context.cut(int(context.at[last]) + 1))
    shortest = min(beginnings, key=lambda context: len(context.token_ids))
    return replace(subject, contexts=[shortest])


@dataclass(kw_only=True)
class Search:
    """Tries families of trials on the excerpt, and confirms what explains it.

    Attributes:
        findings: results, one for each family.
        explaining: attempts that explain the gap.
        untried: families for which there was not enough time, with the number of their trials that
            were made.
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
        self.excerpt = excerpt_of(self.examined)
        self._activations: forward.Activations | None = None
        self._excerpt_scores = self._plain_of(self.excerpt.contexts[0])
        self._pass_seconds = 0.0
        self.excerpt_gap = self.excerpt.compare(self._excerpt_scores)
        self.excerpt = replace(self.excerpt, gap=self.excerpt_gap.mean)

    def _plain_of(self, excerpt: Context) -> Scores:
        """Return the plain scores of the excerpt, a part of its whole context's."""
        length = len(excerpt.token_ids)
        for context, scores in zip(self.subject.contexts, self.examined.plain, strict=True):
            if context.name == excerpt.name and context.token_ids[:length] == excerpt.token_ids:
                return [scores[: len(excerpt.at)]]
        raise AssertionError("the excerpt is the beginning of an examined context")

    @property
    def activations(self) -> forward.Activations:
        """The learner's activations in the excerpt."""
        if self._activations is None:
            excerpt = self.excerpt
            self._activations = forward.activations(
                excerpt.model, excerpt.weights(), excerpt.inputs(excerpt.rows)
            )
        return self._activations

    def note_where_it_begins(self, index: int) -> None:
        """Let trials that begin somewhere try this index first."""

        def with_note(subject: DiagnosisSubject) -> DiagnosisSubject:
            contexts = [replace(context, differs_from=index) for context in subject.contexts]
            return replace(subject, contexts=contexts)

        self.subject = with_note(self.subject)
        self.excerpt = with_note(self.excerpt)

    @property
    def is_over(self) -> bool:
        """Whether an attempt leaves so little that no other needs to be made.

        An attempt that merely explains the gap does not suffice: a later one may explain it better.
        """
        negligible = min(2 * self.tolerance.mean, OVER * self.gap.mean)
        return any(attempt.remaining.mean <= negligible for attempt in self.explaining)

    @property
    def best(self) -> Attempt | None:
        """The attempt that explains the gap best."""
        return min(self.explaining, key=lambda attempt: attempt.remaining.mean, default=None)

    def explains(self, remaining: Comparison, gap: Comparison) -> bool:
        """Return whether what an attempt leaves of a gap is rounding."""
        allowed_mean = max(2 * self.tolerance.mean, EXPLAINED * gap.mean)
        allowed_largest = max(2 * self.tolerance.token, 2 * EXPLAINED * gap.largest)
        return (
            remaining.mean <= allowed_mean
            and remaining.largest <= allowed_largest
            and remaining.mean < gap.mean / 2
        )

    # --- readings ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Try everything that follows the last hidden states."""
        if self.is_over:
            return
        if not self.limit.allows():
            self.untried.append(READINGS)
            return

        sample = self.examined.tokens.sample(SAMPLE_SIZE)
        gap = Comparison.of(sample.rollout - sample.plain)
        smallest: dict[Cause, Comparison] = {}
        best_labels: dict[Cause, str] = {}
        counts: dict[Cause, int] = {}
        for reading in readings(self.subject, sample):
            cause = reading.cause
            remaining = Comparison.of(sample.rollout - reading.sample_scores)
            counts[cause] = counts.get(cause, 0) + 1
            if self.explains(remaining, gap):
                scores = self.subject.split(reading.read(self.examined.tokens))
                remaining = self._record(cause, reading.label, scores)
            if cause not in smallest or remaining.mean < smallest[cause].mean:
                smallest[cause] = remaining
                best_labels[cause] = reading.label
            if self.is_over:
                break
            if not self.limit.allows():
                self.untried.append(READINGS)
                break
        for cause, remaining in smallest.items():
            self._add_finding(cause, best_labels[cause], counts[cause], remaining)

    def compare_answers(self) -> None:
        """Try log-probs that were returned with a neighbouring token, or to another request."""
        if self.is_over:
            return

        for step, edge, name in ((1, -1, "after"), (-1, 0, "before")):
            shifted_scores = []
            for context, scores in zip(self.subject.contexts, self.examined.plain, strict=True):
                shifted = np.roll(scores, -step)
                shifted[edge] = context.rollout[edge]  # its neighbour is unknown
                shifted_scores.append(shifted)
            label = f"returns with each token the log-prob of the one {name} it"
            remaining = self._record(Cause.POSITION, label, shifted_scores)
            self._add_finding(Cause.POSITION, label, 1, remaining)

        exchanged = [self._best_of_all(context) for context in self.subject.contexts]
        label = "returns the log-probs of another request"
        remaining = self._record(Cause.MIXED_ANSWERS, label, exchanged)
        self._add_finding(Cause.MIXED_ANSWERS, label, 1, remaining)

    def _best_of_all(self, context: Context) -> np.ndarray:
        """Return the scores of whichever context are nearest to what the engine reported."""
        count = len(context.at)
        candidates = []
        for scores in self.examined.all_scores:
            if len(scores) >= count:
                candidates.append(scores[:count])
        return min(candidates, key=lambda scores: float(np.abs(context.rollout - scores).mean()))

    def _record(self, cause: Cause, label: str, scores: Scores) -> Comparison:
        remaining = self.subject.compare(scores)
        if self.explains(remaining, self.gap):
            self.explaining.append(
                Attempt(cause=cause, label=label, scores=scores, remaining=remaining)
            )
        return remaining

    # --- families ---------------------------------------------------------------------------------

    def try_family(self, name: str, family: Family, *, per_context: bool = False) -> None:
        """Try the trials of a family on the excerpt, and confirm the best of them."""
        if self.is_over:
            return

        outcome = _Outcome(remaining=self.excerpt_gap)
        for trial, remaining in self._trials(family, self.excerpt, self._excerpt_scores, outcome):
            if not self.explains(remaining, self.excerpt_gap):
                continue
            # Several trials may explain the excerpt: a window may be longer than it.
            if outcome.confirmations == MAX_CONFIRMATIONS:
                continue
            outcome.confirmations += 1
            confirmed, label = self._confirm(family, trial, per_context=per_context)
            if self.explains(confirmed, self.gap):
                outcome.best = replace(trial, label=label)
                outcome.remaining = confirmed
            if self.is_over:
                break

        if outcome.stopped and outcome.count:
            self.untried.append(f"{name} ({outcome.count} tried)")
        elif outcome.stopped:
            self.untried.append(name)
        if outcome.best is None:
            detail = "there was no time" if outcome.stopped else "there is nothing to try"
            self.findings.append(HypothesisResult(name, "not tested", detail))
            return
        self._add_finding(name, outcome.best.label, outcome.count, outcome.remaining)

    def _trials(
        self, family: Family, excerpt: DiagnosisSubject, plain: Scores, outcome: _Outcome
    ) -> Iterator[tuple[Trial, Comparison]]:
        """Yield the trials of a family with the gap that they leave, as long as there is time."""
        trials = family(excerpt)
        previous_gap: float | None = None
        while True:
            # The pass before tells how long the next one takes.
            if not self.limit.allows(self._pass_seconds):
                outcome.stopped = True
                return
            try:
                if previous_gap is None:
                    trial = next(trials)
                else:
                    trial = trials.send(previous_gap)
            except StopIteration:
                return
            if not trial.can_be_computed(excerpt):
                previous_gap = math.inf
                continue

            activations = None
            can_reuse = trial.change is not None or trial.only_edits_rows
            can_reuse = can_reuse and forward.remembers_ids_apart(excerpt.model)
            if can_reuse and excerpt is self.excerpt:
                activations = self.activations
            score = functools.partial(trial.scores, excerpt, plain, activations)
            scores, self._pass_seconds = self.limit.measure(score)
            remaining = excerpt.compare(scores)
            outcome.add(trial, remaining)
            yield trial, remaining
            previous_gap = remaining.mean

    def _confirm(
        self, family: Family, trial: Trial, *, per_context: bool
    ) -> tuple[Comparison, str]:
        """Score all contexts by a trial that explains the excerpt.

        With ``per_context``, contexts that it does not explain are scored by other trials of the
        family: it need not even explain the context that the excerpt is the beginning of.

        Returns:
            The gap that remains, and the label of the trial that most contexts were scored by.
        """
        scores = trial.scores(self.subject, self.examined.plain)
        remaining = self.subject.compare(scores)
        label = trial.label
        if per_context and not self.explains(remaining, self.gap):
            labels = []
            for number, context in enumerate(self.subject.contexts):
                best_scores, best = self._score_alone(family, number, context, scores[number])
                scores[number] = best_scores
                labels.append(trial.label if best is None else best.label)
            label = max(dict.fromkeys(labels), key=labels.count)
        return self._record(trial.cause, label, scores), label

    def _score_alone(
        self, family: Family, number: int, context: Context, scores: np.ndarray
    ) -> tuple[np.ndarray, Trial | None]:
        """Search for the family's trial that explains one context best.

        Returns:
            The context's scores under that trial, and the trial; ``scores`` and None if these
            explain the context already.
        """
        single = replace(self.subject, contexts=[context])
        plain = [self.examined.plain[number]]
        gap = single.compare(plain)
        single = replace(single, gap=gap.mean)
        remaining = single.compare([scores])
        if self.explains(remaining, gap):
            return scores, None

        outcome = _Outcome(remaining=remaining)
        for _, remaining in self._trials(family, single, plain, outcome):
            if self.explains(remaining, gap):
                break
        if outcome.best is None:
            return scores, None
        best_scores = outcome.best.scores(single, plain)
        return best_scores[0], outcome.best

    def _add_finding(self, name: str, label: str, count: int, remaining: Comparison) -> None:
        verdict = "ruled out"
        if any(attempt.label == label for attempt in self.explaining):
            verdict = "explains"
        best_of = "best setting"
        if count > 1:
            best_of = f"best of {count} settings"
        detail = f"{best_of}: the engine {label}"
        self.findings.append(HypothesisResult(name, verdict, detail, remaining))

    def nearest(self) -> HypothesisResult | None:
        """Return the finding that leaves the smallest gap."""
        nearest: HypothesisResult | None = None
        smallest = float("inf")
        for finding in self.findings:
            if finding.left is None:
                continue
            if nearest is None or finding.left.mean < smallest:
                nearest = finding
                smallest = finding.left.mean
        return nearest


@dataclass
class _Outcome:
    """The outcome of a family.

    Attributes:
        remaining: the gap that the best trial leaves.
        count: how many trials were made.
        confirmations: how many of them were confirmed on all contexts.
        stopped: whether time ended it.
    """

    remaining: Comparison
    best: Trial | None = None
    count: int = 0
    confirmations: int = 0
    stopped: bool = False

    def add(self, trial: Trial, remaining: Comparison) -> None:
        """Count a trial, and keep it if it leaves least."""
        self.count += 1
        if self.best is None or remaining.mean < self.remaining.mean:
            self.best = trial
            self.remaining = remaining


def order_families(
    suggested: Sequence[Cause], *, is_late: bool, tensors_agree: bool, after_inserted: bool = False
) -> list[Cause]:
    """Return the families in the order in which they are tried.

    Args:
        suggested: causes that the comparison of layers speaks for.
        is_late: whether earlier turns of the contexts agree, so that something began to go wrong
            between turns.
        tensors_agree: whether the engine's tensors were read, and are the learner's.
        after_inserted: whether contexts disagree as soon as something was inserted between turns.
    """
    between_turns: list[Cause] = []
    if after_inserted:
        between_turns += [Cause.TOKEN_DRIFT, Cause.PADDING]
    if is_late:
        between_turns += [Cause.POSITION, Cause.MASK, Cause.TOKEN_DRIFT, Cause.PADDING]
        # The others compute only the last ids again; a stale prefix takes two passes over whole
        # contexts.
        between_turns.append(Cause.STALE_PREFIX)

    # Layers are compared on one prefilled context, so nothing that happens between turns makes them
    # differ: what they suggest comes first.
    order = list(dict.fromkeys([*suggested, *between_turns, *FAMILIES]))
    versions = [Cause.STALE_VERSION, Cause.ADAPTER]
    others = [cause for cause in order if cause not in versions]
    if tensors_agree:
        return others + versions
    return versions + others
