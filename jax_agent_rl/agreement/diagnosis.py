"""Diagnosis of a gap between engine and learner: every hypothesis tried on a few contexts, and what each leaves of it.

::

    contexts ─► the worst few ─► the engine's tensors, its layers   (where it can be inspected)
                             ─► each hypothesis: best attempt, residual ─► verdict ─► one line to act on

What was read off the engine counts more than what merely explains the numbers, and of explanations the best counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jax_agent_rl.agreement.hypotheses import HYPOTHESES, PER_CONTEXT, Attempt, tensor_search
from jax_agent_rl.agreement.inspection import (
    MAX_IDS,
    Samples,
    TensorFault,
    first_difference,
    learner_outputs,
    sample_tensors,
    tensor_faults,
)
from jax_agent_rl.agreement.report import Cause, Diagnosis, HypothesisResult, Tolerance
from jax_agent_rl.agreement.subject import DiagnosisSubject, Scores
from jax_agent_rl.learner.metrics import Comparison
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.models.tensors import LayerOutput, TensorSample

MAX_EXAMINED = 4
"""Contexts that hypotheses are tried on."""
EXPLAINED = 0.05
"""Share of the gap that an attempt may leave and still explain it, where rounding leaves less."""
FULLY_EXPLAINED = 0.01
"""Share of the mean gap below which no further attempt is made."""


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


def diagnose(subject: DiagnosisSubject, *, tolerance: Tolerance, engine: EngineView | None = None) -> Diagnosis:
    """Test every hypothesis.

    Args:
        subject: with all comparable contexts; the worst are examined.
        tolerance: of the run.
        engine: what can be read off the engine.
    """
    engine, whole = engine or EngineView(), subject
    subject, plain = worst(subject)
    search = _Search(subject, subject.compare(plain), tolerance)
    findings = [_check_ids(whole)]

    def conclude(cause: Cause, detail: str) -> Diagnosis:
        return Diagnosis(contexts=subject.contexts, gap=search.gap, findings=findings, cause=cause, detail=detail)

    if findings[0].verdict == "found":
        return conclude(Cause.TOKEN_DRIFT, findings[0].detail)
    if tolerance.holds(search.gap):
        findings.append(_check_learner(whole, search.gap))
        return conclude(Cause.LEARNER if findings[-1].verdict == "found" else Cause.ROUNDING, findings[-1].detail)
    faults = _find_tensor_faults(subject, engine)
    findings += [_check_tensors(engine, faults), layers := _check_layers(subject, engine)]
    attempts: list[tuple[Cause, Attempt]] = []
    done = "the engine has other tensors" if faults else None
    for cause in HYPOTHESES:
        if done is not None:
            findings.append(HypothesisResult(cause, "not tested", done))
            continue
        finding, best = search.test(cause)
        findings.append(finding)
        if best is not None:
            attempts.append((cause, best))
            if search.is_over(best):
                done = f"{cause} explains everything"
    explaining = search.explaining(attempts)
    if not faults and not explaining and not engine.tensors:
        attempts = list(tensor_search(subject))
        explaining = search.explaining(attempts)
        _, best = explaining[0] if explaining else min(attempts, key=lambda each: search.left(each[1]).mean)
        detail = f"every tensor removed, exchanged or transposed, the best: the engine {best.label}"
        verdict = "explains" if explaining else "ruled out"
        findings.append(HypothesisResult("one wrong tensor", verdict, detail, search.left(best)))
    if faults:
        causes = [fault.cause for fault in faults]
        cause = max(dict.fromkeys(causes), key=causes.count)
        return conclude(cause, _describe([fault for fault in faults if fault.cause is cause], len(engine.tensors)))
    if explaining:
        cause, best = explaining[0]
        return conclude(cause, f"the engine {best.label}")
    if (rounding := _describe_rounding(subject, plain)) is not None:
        return conclude(Cause.DTYPE, rounding)
    if layers.verdict == "found":
        return conclude(Cause.UNKNOWN, layers.detail)
    left = {finding.left.mean: finding for finding in reversed(findings) if finding.left is not None}
    nearest = left[min(left)]
    return conclude(Cause.UNKNOWN, f"no hypothesis explains the gap; the nearest is {nearest.name} ({nearest.detail})")


def worst(subject: DiagnosisSubject) -> tuple[DiagnosisSubject, Scores]:
    """Return the ``MAX_EXAMINED`` contexts with the largest mean gaps, and their scores by a plain pass."""
    scores = []
    for begin in range(0, len(subject.contexts), MAX_EXAMINED):
        scores += replace(subject, contexts=subject.contexts[begin : begin + MAX_EXAMINED]).score()
    means = [np.abs(gap).mean() for gap in subject.gaps(scores)]
    order = sorted(range(len(means)), key=lambda i: -means[i])[:MAX_EXAMINED]
    return replace(subject, contexts=[subject.contexts[i] for i in order]), [scores[i] for i in order]


def _check_ids(subject: DiagnosisSubject) -> HypothesisResult:
    count, drifted = len(subject.contexts), [context for context in subject.contexts if context.drifted]
    if not drifted:
        return HypothesisResult("ids", "ruled out", f"all {count} contexts are those that the engine reported")
    detail = (
        f"in {len(drifted)} of {count} contexts the engine saw other ids than are trained on, first in "
        f"{drifted[0].name}"
    )
    return HypothesisResult("ids", "found", detail)


def _check_learner(subject: DiagnosisSubject, gap: Comparison) -> HypothesisResult:
    """Test, where a plain pass agrees with the engine, whether the learner's own pass does not."""
    own = [context.learner - context.rollout for context in subject.contexts if context.learner is not None]
    packed = Comparison.of(np.concatenate(own)) if own else None
    if packed is not None and packed.largest > max(10 * gap.largest, 1e-5):
        detail = (
            f"a plain pass over the learner's parameters agrees with the engine (mean {gap.mean:.1e}, largest "
            f"{gap.largest:.1e} nats), the learner's packed pass does not (mean {packed.mean:.1e}, largest "
            f"{packed.largest:.1e})"
        )
        return HypothesisResult("learner", "found", detail, gap)
    detail = f"nothing is wrong in the contexts examined (mean {gap.mean:.1e}, largest {gap.largest:.1e} nats)"
    return HypothesisResult("learner", "ruled out", detail, gap)


# --- what can be read off the engine --------------------------------------------------------------------------------


def _find_tensor_faults(subject: DiagnosisSubject, engine: EngineView) -> list[TensorFault]:
    if not engine.tensors:
        return []
    model, params = subject.model, subject.params

    def transposed(wanted: str) -> TensorSample | None:
        array = next(array for name, array in hf_tensors(model, params) if name == wanted)
        square = array.ndim == 2 and array.shape[0] == array.shape[1]
        return TensorSample.of(array.T) if square else None

    older = {name: lambda make=make: sample_tensors(model, make()) for name, make in subject.older.items()}
    own = sample_tensors(model, params)
    return tensor_faults(engine.tensors, own, precision=engine.precision, transposed=transposed, older=older)


def _check_tensors(engine: EngineView, faults: Sequence[TensorFault]) -> HypothesisResult:
    count = len(engine.tensors)
    if not count:
        return HypothesisResult("tensors", "not tested", "the engine's tensors cannot be read from here")
    if not faults:
        return HypothesisResult("tensors", "ruled out", f"all {count} tensors of the engine are the learner's")
    return HypothesisResult("tensors", "found", _describe(faults, count))


def _describe(faults: Sequence[TensorFault], count: int) -> str:
    first, details = faults[0], {fault.detail for fault in faults}
    if len(details) == 1 and len(faults) > 3:
        return f"{len(faults)} of {count} tensors: each {first.detail}, e.g. {first.name}"
    shown = "; ".join(f"{fault.name} {fault.detail}" for fault in faults[:3])
    return shown if len(faults) <= 3 else f"{len(faults)} of {count} tensors: {shown}; …"


def _check_layers(subject: DiagnosisSubject, engine: EngineView) -> HypothesisResult:
    ids = min((context.token_ids for context in subject.contexts), key=len)[:MAX_IDS]
    theirs = engine.layers(ids)
    if not theirs:
        return HypothesisResult("layers", "not tested", "the engine's activations cannot be read from here")
    own = learner_outputs(subject.model, subject.params, subject.dtype, ids)
    if (fault := first_difference(theirs, own, precision=engine.precision)) is not None:
        return HypothesisResult("layers", "found", fault)
    detail = f"the embeddings and all {len(own) - 1} layers agree on a prefilled context of {len(ids)} ids"
    return HypothesisResult("layers", "ruled out", detail)


# --- what explains the numbers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Search:
    """The gap of a subject, and what attempts leave of it."""

    subject: DiagnosisSubject
    gap: Comparison
    tolerance: Tolerance

    def left(self, attempt: Attempt) -> Comparison:
        return self.subject.compare(attempt.scores)

    def is_over(self, attempt: Attempt) -> bool:
        """Whether an attempt leaves so little that no other needs to be made."""
        return self.left(attempt).mean <= FULLY_EXPLAINED * self.gap.mean

    def explains(self, attempt: Attempt) -> bool:
        left, gap, allowed = self.left(attempt), self.gap, self.tolerance
        mean = left.mean <= max(2 * allowed.mean, EXPLAINED * gap.mean)
        largest = left.largest <= max(2 * allowed.token, 2 * EXPLAINED * gap.largest)
        return mean and largest and left.mean < gap.mean / 2

    def explaining(self, attempts: Sequence[tuple[Cause, Attempt]]) -> list[tuple[Cause, Attempt]]:
        """Return the attempts that explain the gap, the best first."""
        found = [(cause, attempt) for cause, attempt in attempts if self.explains(attempt)]
        return sorted(found, key=lambda each: self.left(each[1]).mean)

    def test(self, cause: Cause) -> tuple[HypothesisResult, Attempt | None]:
        attempts = []
        for attempt in HYPOTHESES[cause](self.subject):
            attempts.append(attempt)
            if self.is_over(attempt):
                break
        if not attempts:
            return HypothesisResult(cause, "not tested", "there is nothing to try"), None
        mixed = cause in PER_CONTEXT
        best = self._mix(attempts) if mixed else min(attempts, key=lambda attempt: self.left(attempt).mean)
        verdict = "explains" if self.explains(best) else "ruled out"
        tried = f"best of {len(attempts)} settings" if len(attempts) > 1 else "best setting"
        return HypothesisResult(cause, verdict, f"{tried}: the engine {best.label}", self.left(best)), best

    def _mix(self, attempts: Sequence[Attempt]) -> Attempt:
        """Combine the best attempt for each context, named after the most frequent one."""
        gaps = np.array([[np.abs(gap).mean() for gap in self.subject.gaps(attempt.scores)] for attempt in attempts])
        chosen = gaps.argmin(axis=0)
        scores = [attempts[pick].scores[i] for i, pick in enumerate(chosen)]
        return Attempt(attempts[int(np.bincount(chosen).argmax())].label, scores)


def _describe_rounding(subject: DiagnosisSubject, plain: Scores) -> str | None:
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
        change = np.concatenate(subject.score(dtype=name)) - np.concatenate(plain)
        times = float(np.abs(gap).mean() / max(np.abs(change).mean(), 1e-30))
        correlation = float(np.corrcoef(gap, change)[0, 1]) if gap.std() > 0 and change.std() > 0 else 0.0
        if 1 / 3 <= times <= 3 and correlation > 0.2:
            return (
                f"the gap is {times:.1f} times what computing in {name} makes, has no direction, and lies where that "
                f"makes one (correlation {correlation:.2f})"
            )
    return None
