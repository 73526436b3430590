"""Why engine and learner disagree: every hypothesis tried on a few trajectories, with what each leaves unexplained.

::

    contexts ─► the worst few ─► the engine's tensors, its layers   (where it lets itself be looked into)
                             ─► each hypothesis: best attempt, residual ─► verdict ─► one line to act on

What was read off the engine counts more than what merely explains the numbers, and of explanations the best counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_agent_rl.agreement.causes import ADVICE, Cause
from jax_agent_rl.agreement.hypotheses import HYPOTHESES, Attempt, Hypothesis, tensor_search
from jax_agent_rl.agreement.inspection import (
    IDS,
    Samples,
    TensorFault,
    first_difference,
    learner_outputs,
    samples_of,
    tensor_faults,
)
from jax_agent_rl.agreement.subject import Context, DiagnosisSubject, Scores
from jax_agent_rl.agreement.tolerances import Tolerance
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.models.tensor_samples import LayerOutput, TensorSample

MOST = 4
"""Contexts that hypotheses are tried on."""
EXPLAINED = 0.05
"""Of the gap may be left by an attempt that explains it, where rounding leaves less."""
EVERYTHING = 0.01
"""Of the mean gap is left at most by an attempt after which no other is made."""


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What a diagnosis can read off an engine; empty if nothing.

    Attributes:
        precision: the declared compute precision.
        tensors: a sample of each tensor.
        layers: returns the layers' outputs for a context.
    """

    precision: str = "float32"
    tensors: Samples = field(default_factory=dict)
    layers: Callable[[Sequence[int]], Sequence[LayerOutput]] = lambda token_ids: ()


@dataclass(frozen=True, kw_only=True)
class HypothesisResult:
    """The result of testing one hypothesis.

    Attributes:
        name: of the cause, or of what was inspected.
        verdict: ``found``, ``explains``, ``ruled out``, ``not tested``.
        detail: evidence in words.
        left: the gap left by the best attempt; None without one.
    """

    name: str
    verdict: str
    detail: str
    left: Comparison | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The outcome of a diagnosis.

    Attributes:
        gap: between engine and learner on the contexts looked at.
        findings: in the order of a report.
        cause: the likeliest.
        detail: what exactly, as a sentence about the engine goes on.
        contexts: that were looked at.
    """

    contexts: Sequence[Context]
    gap: Comparison
    findings: Sequence[HypothesisResult]
    cause: Cause
    detail: str

    @property
    def line(self) -> str:
        """The one line to act on."""
        return f"{self.cause}: {self.detail}; {ADVICE[self.cause]}"


def diagnose(subject: DiagnosisSubject, *, tolerance: Tolerance, engine: EngineView | None = None) -> Diagnosis:
    """Test every hypothesis.

    Args:
        subject: with all comparable contexts; the worst are examined.
        tolerance: of the run.
        engine: what can be read off the engine.
    """
    engine, whole = engine or EngineView(), subject
    subject, plain = worst(subject)
    gap, looked = subject.compare(plain), subject.contexts
    findings = [_ids(whole)]
    if findings[0].verdict == "found":
        return Diagnosis(
            contexts=looked, gap=gap, findings=findings, cause=Cause.TOKEN_DRIFT, detail=findings[0].detail
        )
    if tolerance.holds(gap):
        findings.append(_learner(whole, gap))
        found = findings[-1].verdict == "found"
        cause = Cause.LEARNER if found else Cause.ROUNDING
        return Diagnosis(contexts=looked, gap=gap, findings=findings, cause=cause, detail=findings[-1].detail)
    faults = _tensor_faults(subject, engine)
    findings += [_tensors_finding(engine, faults), _layers_finding(subject, engine)]
    attempts: list[tuple[Cause, Attempt]] = []
    done = "the engine has other tensors" if faults else None
    for hypothesis in HYPOTHESES:
        if done is not None:
            findings.append(HypothesisResult(name=str(hypothesis.cause), verdict="not tested", detail=done))
            continue
        finding, best = _tried(subject, hypothesis, gap, tolerance)
        findings.append(finding)
        attempts += [(hypothesis.cause, best)] if best is not None else []
        if finding.left is not None and finding.left.mean <= EVERYTHING * gap.mean:
            done = f"{hypothesis.cause} explains everything"
    explaining = _explaining(subject, attempts, gap, tolerance)
    if not faults and not explaining and not engine.tensors:
        attempts = list(tensor_search(subject))
        explaining = _explaining(subject, attempts, gap, tolerance)
        findings.append(_search_finding(subject, attempts, explaining))
    cause, detail = _verdict(subject, plain, faults, explaining, findings, engine)
    return Diagnosis(contexts=looked, gap=gap, findings=findings, cause=cause, detail=detail)


def worst(subject: DiagnosisSubject, most: int = MOST) -> tuple[DiagnosisSubject, Scores]:
    """Return the contexts with the largest mean gaps, and their scores by a plain pass."""
    scores = []
    for begin in range(0, len(subject.contexts), MOST):
        part = replace(subject, contexts=subject.contexts[begin : begin + MOST])
        scores += part.score()
    means = [np.abs(gap).mean() for gap in subject.gaps(scores)]
    order = sorted(range(len(means)), key=lambda i: -means[i])[:most]
    return replace(subject, contexts=[subject.contexts[i] for i in order]), [scores[i] for i in order]


def _ids(subject: DiagnosisSubject) -> HypothesisResult:
    drifted = [context for context in subject.contexts if context.drifted]
    if drifted:
        first = drifted[0]
        detail = (
            f"in {len(drifted)} of {len(subject.contexts)} contexts the engine saw other ids than are trained on, "
            f"first in {first.name}"
        )
        return HypothesisResult(name="ids", verdict="found", detail=detail)
    detail = f"all {len(subject.contexts)} contexts are those that the engine reported"
    return HypothesisResult(name="ids", verdict="ruled out", detail=detail)


def _learner(subject: DiagnosisSubject, gap: Comparison) -> HypothesisResult:
    """Test, where a plain pass agrees with the engine, whether the learner's own pass does not."""
    scored = [context for context in subject.contexts if context.learner is not None]
    own = [context.learner - context.rollout for context in scored if context.learner is not None]
    apart = Comparison.of(np.concatenate(own)) if own else None
    if apart is not None and apart.largest > max(10 * gap.largest, 1e-5):
        detail = (
            f"a plain pass over the learner's parameters agrees with the engine (mean {gap.mean:.1e}, largest "
            f"{gap.largest:.1e} nats), the learner's packed pass does not (mean {apart.mean:.1e}, largest "
            f"{apart.largest:.1e})"
        )
        return HypothesisResult(name="learner", verdict="found", detail=detail, left=gap)
    detail = f"nothing is wrong in the contexts looked at (mean {gap.mean:.1e}, largest {gap.largest:.1e} nats)"
    return HypothesisResult(name="learner", verdict="ruled out", detail=detail, left=gap)


# --- what can be read off the engine --------------------------------------------------------------------------------


def _tensor_faults(subject: DiagnosisSubject, engine: EngineView) -> list[TensorFault]:
    if not engine.tensors:
        return []
    model, params = subject.model, subject.params

    def transposed(wanted: str) -> TensorSample | None:
        array = next(array for name, array in hf_tensors(model, params) if name == wanted)
        square = array.ndim == 2 and array.shape[0] == array.shape[1]
        return TensorSample.of(array.T) if square else None

    def sampled(make: Callable[[], Params]) -> Callable[[], Samples]:
        return lambda: samples_of(model, make())

    older = {name: sampled(make) for name, make in subject.older.items()}
    own = samples_of(model, params)
    return tensor_faults(engine.tensors, own, precision=engine.precision, transposed=transposed, older=older)


def _tensors_finding(engine: EngineView, faults: Sequence[TensorFault]) -> HypothesisResult:
    if not engine.tensors:
        return HypothesisResult(
            name="tensors", verdict="not tested", detail="the engine's tensors cannot be read from here"
        )
    if not faults:
        detail = f"all {len(engine.tensors)} tensors of the engine are the learner's"
        return HypothesisResult(name="tensors", verdict="ruled out", detail=detail)
    return HypothesisResult(name="tensors", verdict="found", detail=_named(faults, len(engine.tensors)))


def _named(faults: Sequence[TensorFault], count: int) -> str:
    first = faults[0]
    if len(faults) == 1:
        return f"{first.name} {first.detail}"
    details = {fault.detail for fault in faults}
    if len(details) == 1 and len(faults) > 3:
        return f"{len(faults)} of {count} tensors: each {first.detail}, e.g. {first.name}"
    shown = "; ".join(f"{fault.name} {fault.detail}" for fault in faults[:3])
    return shown if len(faults) <= 3 else f"{len(faults)} of {count} tensors: {shown}; …"


def _layers_finding(subject: DiagnosisSubject, engine: EngineView) -> HypothesisResult:
    ids = min((c.token_ids for c in subject.contexts), key=len)[:IDS]
    theirs = engine.layers(ids)
    if not theirs:
        detail = "the engine's activations cannot be read from here"
        return HypothesisResult(name="layers", verdict="not tested", detail=detail)
    own = learner_outputs(subject.model, subject.params, subject.dtype, ids)
    fault = first_difference(theirs, own, precision=engine.precision)
    if fault is None:
        detail = f"the embeddings and all {len(own) - 1} layers agree on a prefilled context of {len(ids)} ids"
        return HypothesisResult(name="layers", verdict="ruled out", detail=detail)
    return HypothesisResult(name="layers", verdict="found", detail=fault.detail)


# --- what explains the numbers --------------------------------------------------------------------------------------


def _tried(
    subject: DiagnosisSubject, hypothesis: Hypothesis, gap: Comparison, tolerance: Tolerance
) -> tuple[HypothesisResult, Attempt | None]:
    attempts = []
    for attempt in hypothesis.attempts(subject):
        attempts.append(attempt)
        if _mean(subject, attempt) <= EVERYTHING * gap.mean:
            break
    if not attempts:
        return HypothesisResult(
            name=str(hypothesis.cause), verdict="not tested", detail="there is nothing to try"
        ), None
    best = _mixed(subject, attempts) if hypothesis.per_context else min(attempts, key=lambda a: _mean(subject, a))
    left = subject.compare(best.scores)
    verdict = "explains" if _explains(left, gap, tolerance) else "ruled out"
    tried = f"best of {len(attempts)} settings" if len(attempts) > 1 else "best setting"
    detail = f"{tried}: the engine {best.label}"
    finding = HypothesisResult(name=str(hypothesis.cause), verdict=verdict, detail=detail, left=left)
    return finding, best


def _mixed(subject: DiagnosisSubject, attempts: Sequence[Attempt]) -> Attempt:
    """Combine the best attempt for each context, named after the most frequent one."""
    gaps = np.array([[np.abs(g).mean() for g in subject.gaps(attempt.scores)] for attempt in attempts])
    chosen = gaps.argmin(axis=0)
    scores = [attempts[pick].scores[i] for i, pick in enumerate(chosen)]
    return Attempt(label=attempts[int(np.bincount(chosen).argmax())].label, scores=scores)


def _mean(subject: DiagnosisSubject, attempt: Attempt) -> float:
    return subject.compare(attempt.scores).mean


def _explains(left: Comparison, gap: Comparison, tolerance: Tolerance) -> bool:
    mean = left.mean <= max(2 * tolerance.mean, EXPLAINED * gap.mean)
    largest = left.largest <= max(2 * tolerance.token, 2 * EXPLAINED * gap.largest)
    return mean and largest and left.mean < gap.mean / 2


def _explaining(
    subject: DiagnosisSubject, attempts: Sequence[tuple[Cause, Attempt]], gap: Comparison, tolerance: Tolerance
) -> list[tuple[Cause, Attempt]]:
    """Return the attempts that explain the gap, the best first."""
    found = [(c, a) for c, a in attempts if _explains(subject.compare(a.scores), gap, tolerance)]
    return sorted(found, key=lambda each: _mean(subject, each[1]))


def _search_finding(
    subject: DiagnosisSubject, attempts: Sequence[tuple[Cause, Attempt]], explaining: Sequence[tuple[Cause, Attempt]]
) -> HypothesisResult:
    _, best = explaining[0] if explaining else min(attempts, key=lambda each: _mean(subject, each[1]))
    verdict = "explains" if explaining else "ruled out"
    detail = f"every tensor taken away, exchanged or transposed, the best: the engine {best.label}"
    return HypothesisResult(name="one wrong tensor", verdict=verdict, detail=detail, left=subject.compare(best.scores))


def _verdict(
    subject: DiagnosisSubject,
    plain: Scores,
    faults: Sequence[TensorFault],
    explaining: Sequence[tuple[Cause, Attempt]],
    findings: Sequence[HypothesisResult],
    engine: EngineView,
) -> tuple[Cause, str]:
    if faults:
        causes = [fault.cause for fault in faults]
        cause = max(dict.fromkeys(causes), key=causes.count)
        return cause, _named([fault for fault in faults if fault.cause is cause], len(engine.tensors))
    if explaining:
        cause, best = explaining[0]
        return cause, f"the engine {best.label}"
    if (rounding := _rounding(subject, plain)) is not None:
        return Cause.DTYPE, rounding
    by_name: Mapping[str, Any] = {finding.name: finding for finding in findings}
    if by_name["layers"].verdict == "found":
        return Cause.UNKNOWN, by_name["layers"].detail
    tried = [f for f in findings if f.left is not None]
    nearest = min(tried, key=lambda f: f.left.mean if f.left is not None else np.inf)
    return Cause.UNKNOWN, f"no hypothesis explains the gap; the nearest is {nearest.name} ({nearest.detail})"


def _rounding(subject: DiagnosisSubject, plain: Scores) -> str | None:
    """Describe the gap if it has the size and kind that a coarser dtype makes, else return None.

    Other kernels round elsewhere, so no attempt gives the very same numbers: what agrees is how large the differences
    are, and in part where they lie.
    """
    gap = np.concatenate(subject.gaps(plain))
    if abs(gap.mean()) > 0.5 * np.abs(gap).mean():
        return None
    for name in ("float16", "bfloat16"):
        if name == subject.dtype:
            continue
        moved = np.concatenate(subject.score(dtype=name)) - np.concatenate(plain)
        times = float(np.abs(gap).mean() / max(np.abs(moved).mean(), 1e-30))
        alike = float(np.corrcoef(gap, moved)[0, 1]) if gap.std() > 0 and moved.std() > 0 else 0.0
        if 1 / 3 <= times <= 3 and alike > 0.2:
            return (
                f"the gap is {times:.1f} times what computing in {name} makes, has no direction, and lies where that "
                f"makes one (correlation {alike:.2f})"
            )
    return None
