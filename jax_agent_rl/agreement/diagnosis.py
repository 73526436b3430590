"""Diagnosis of a gap between engine and learner: every hypothesis tried on a few contexts.

::

    contexts ─► the worst few ─► the engine's tensors and layers, where it can be inspected
                             ─► what follows the hidden states: head, logits, temperature, support
                             ─► families of hypotheses within a time limit (``search``)
                             ─► verdict ─► one line to act on

What was read off the engine counts more than what merely explains the numbers. Of several
explanations, the one that leaves the smallest gap counts. The result lists the hypotheses for which
there was not enough time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jax_agent_rl.agreement import forward
from jax_agent_rl.agreement.hypotheses import (
    FAMILIES,
    PER_CONTEXT,
    tensors_of_all_layers,
    tensors_of_one_layer,
    weights_in,
    with_one_in_memory,
)
from jax_agent_rl.agreement.inspection import (
    MAX_IDS,
    LayerDifference,
    Samples,
    TensorFault,
    first_difference,
    outputs_of_layers,
    sample_tensors,
    tensor_faults,
)
from jax_agent_rl.agreement.report import Cause, Diagnosis, HypothesisResult, Tolerance, coarsest
from jax_agent_rl.agreement.search import (
    SECONDS,
    Examined,
    Search,
    TimeLimit,
    examine,
    order_families,
)
from jax_agent_rl.agreement.subject import Context, DiagnosisSubject
from jax_agent_rl.learner.comparison import Comparison
from jax_agent_rl.models.hf import hf_tensors
from jax_agent_rl.models.tensors import LayerOutput, TensorSample
from jax_agent_rl.utils.text import counted

ROUNDING_COSTS = 2.0
"""Allowed multiple of the gap that the engine's own precision was measured to make."""
LAST = 0.3
"""Largest share of the time that is reserved for the comparison with a coarser dtype."""
FIRST_TOKENS = 2
"""Number of a turn's first tokens of which one disagrees if what precedes the turn does.

The very first one may be certain under both.
"""
ALL_LAYERS = "tensors in every layer"
ONE_LAYER = "one wrong tensor"


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What a diagnosis can read off an engine; the defaults are of one that cannot be inspected.

    Attributes:
        precision: the declared compute precision.
        tensors: a sample of each tensor.
        replicas: samples of the tensors of further engines that serve the same weights.
        layers: returns the layers' outputs for a context.
    """

    precision: str = "float32"
    tensors: Samples = field(default_factory=dict)
    replicas: Sequence[Samples] = ()
    layers: Callable[[Sequence[int]], Sequence[LayerOutput]] = lambda token_ids: ()


def diagnose(
    subject: DiagnosisSubject,
    *,
    tolerance: Tolerance,
    engine: EngineView | None = None,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """Test every hypothesis.

    Args:
        subject: has all comparable contexts; the worst are examined.
        engine: what can be read off the engine; None: nothing.
        seconds: time after which no other hypothesis is tried.
        clock: a monotonic clock, in seconds.
    """
    limit = TimeLimit(seconds, clock)
    examined = examine(subject, tolerance, limit)
    return explain(subject, examined, tolerance=tolerance, engine=engine, limit=limit)


def explain(
    subject: DiagnosisSubject,
    examined: Examined,
    *,
    tolerance: Tolerance,
    engine: EngineView | None,
    limit: TimeLimit,
) -> Diagnosis:
    """Test every hypothesis on contexts that have been examined; arguments as :func:`diagnose`."""
    older = with_one_in_memory(subject.older)
    subject = replace(subject, older=older)
    examined = replace(examined, subject=replace(examined.subject, older=older))
    if engine is None:
        engine = EngineView()
    return _DiagnosisRun(subject, examined, engine, tolerance, limit).run()


class _DiagnosisRun:
    """One diagnosis, top to bottom.

    Args:
        subject: has all contexts.
        examined: the worst of them.
    """

    def __init__(
        self,
        subject: DiagnosisSubject,
        examined: Examined,
        engine: EngineView,
        tolerance: Tolerance,
        limit: TimeLimit,
    ) -> None:
        self._subject = subject
        self._examined = examined
        self._engine = engine
        self._tolerance = tolerance
        self._limit = limit
        self._findings: list[HypothesisResult] = []

    def run(self) -> Diagnosis:
        """Check what can be told at once, then what can be read off the engine, then search."""
        drift = _check_ids(self._subject)
        self._findings.append(drift)
        if drift.verdict == "found":
            return self._conclude(Cause.TOKEN_DRIFT, drift.detail)

        if self._tolerance.holds(self._examined.gap_of_all):
            packed_pass = _check_learner(self._subject, self._examined)
            self._findings.append(packed_pass)
            if packed_pass.verdict == "found":
                return self._conclude(Cause.LEARNER, packed_pass.detail)
            return self._conclude(Cause.ROUNDING, packed_pass.detail)

        faults = _find_tensor_faults(self._examined.subject, self._engine)
        self._findings.append(_check_tensors(self._engine, faults))
        search = Search(examined=self._examined, tolerance=self._tolerance, limit=self._limit)
        difference, layers = _check_layers(search, self._engine)
        self._findings.append(layers)
        if faults:
            causes = [fault.cause for fault in faults]
            commonest = max(dict.fromkeys(causes), key=causes.count)
            of_commonest = [fault for fault in faults if fault.cause is commonest]
            detail = _describe_faults(of_commonest, len(self._engine.tensors))
            return self._conclude(commonest, detail)

        if difference is None and self._limit.allows():
            rounding = _check_rounding(self._examined, self._engine.precision)
            if rounding is not None:
                self._findings.append(rounding)
                if rounding.verdict == "explains":
                    return self._conclude(Cause.ROUNDING, rounding.detail)
        return self._search(search, difference, layers)

    def _search(
        self, search: Search, difference: LayerDifference | None, layers: HypothesisResult
    ) -> Diagnosis:
        """Search for a setting that explains the numbers."""
        is_late = difference is not None and difference.is_late
        if difference is not None and difference.is_late:
            search.note_where_it_begins(difference.begin)
        may_be_rounding = _may_be_rounding(self._examined) and not is_late
        rounding_seconds = 2 * self._examined.seconds  # a pass in each coarser dtype
        if may_be_rounding and rounding_seconds <= LAST * self._limit.seconds:
            self._limit.reserve(rounding_seconds)

        self._try_everything(search, difference, layers)
        self._limit.reserve(0.0)
        self._findings += search.findings

        best = search.best
        if best is not None:
            if search.is_over:
                detail = f"{best.cause} explains everything"
                self._findings.append(HypothesisResult("what was not tried", "not tested", detail))
            return self._conclude(best.cause, f"the engine {best.label}")

        if may_be_rounding and self._limit.allows(rounding_seconds):
            rounding = _describe_rounding(self._examined, self._engine.precision)
            if rounding is not None:
                return self._conclude(Cause.DTYPE, rounding)
        elif may_be_rounding:
            search.untried.append("a coarser dtype in other kernels")
        return self._conclude(Cause.UNKNOWN, self._describe_unknown(search, difference))

    def _try_everything(
        self, search: Search, difference: LayerDifference | None, layers: HypothesisResult
    ) -> None:
        # What follows the layers is tried first if they agree, else after all settings.
        if difference is None:
            search.read()
            search.compare_answers()

        families = self._order_families(difference, layers)
        if difference is None:
            families_before_tensors = len(families) // 2
        else:
            families_before_tensors = len(difference.causes)
        for number, cause in enumerate(families):
            if number == families_before_tensors:
                search.try_family(ALL_LAYERS, tensors_of_all_layers)
            search.try_family(cause, FAMILIES[cause], per_context=cause in PER_CONTEXT)

        if difference is not None:
            search.read()
            search.compare_answers()
        suspects = self._suspect_layers(difference, layers)
        search.try_family(ONE_LAYER, tensors_of_one_layer(suspects))

    def _order_families(
        self, difference: LayerDifference | None, layers: HypothesisResult
    ) -> list[Cause]:
        """Return the families in the order in which they are tried."""
        suggested = []
        if difference is not None:
            suggested = difference.causes
        families = order_families(
            suggested,
            is_late=_is_late(self._examined),
            tensors_agree=bool(self._engine.tensors),
            after_inserted=_is_after_inserted(self._examined),
        )
        if layers.verdict != "ruled out":
            return families
        # The engine prefills contexts correctly, so settings come last: what goes wrong does so
        # between turns, or in decode steps.
        settings = [Cause.SETTING, Cause.ROTARY, Cause.WINDOW, Cause.EXPERTS]
        return [cause for cause in families if cause not in settings] + settings

    def _describe_unknown(self, search: Search, difference: LayerDifference | None) -> str:
        """Describe what is known of a gap that nothing explains."""
        untried = _describe_untried(search.untried, self._limit.seconds)
        if difference is not None:
            return f"{difference.describe()}{untried}"
        detail = "no hypothesis explains the gap"
        nearest = search.nearest()
        if nearest is not None:
            detail += f"; the nearest is {nearest.name} ({nearest.detail})"
        return f"{detail}{untried}"

    def _suspect_layers(
        self, difference: LayerDifference | None, layers: HypothesisResult
    ) -> list[int]:
        """Return the layers that may hold a wrong tensor."""
        if difference is not None:
            return [max(difference.layer, 0)]
        if layers.verdict == "ruled out" or self._engine.tensors:
            return []
        return list(range(self._subject.model.num_layers))

    def _conclude(self, cause: Cause, detail: str) -> Diagnosis:
        return Diagnosis(
            contexts=self._examined.subject.contexts,
            gap=self._examined.gap,
            findings=self._findings,
            cause=cause,
            detail=detail,
            backend=self._subject.backend,
        )


def _describe_untried(untried: Sequence[str], seconds: float) -> str:
    if not untried:
        return ""
    return (
        f"; in {seconds:.0f} seconds there was no time to try all of: {', '.join(untried)}"
        " (`jax-agent-rl diagnose --seconds 600 RUN` does)"
    )


def _is_late(examined: Examined) -> bool:
    """Return whether contexts agree until a later turn than their first."""
    any_breach = False
    for context in examined.subject.contexts:
        if context.breach is None:
            continue
        any_breach = True
        first_turn = context.sampled_from(int(context.at[0]))
        if context.sampled_from(context.breach) <= first_turn:
            return False
    return any_breach


def _is_after_inserted(examined: Examined) -> bool:
    """Return whether contexts agree until a later turn, and disagree in one of its first tokens."""
    if not _is_late(examined):
        return False
    for context in examined.subject.contexts:
        if context.breach is None:
            continue
        if context.breach - context.sampled_from(context.breach) >= FIRST_TOKENS:
            return False
    return True


def _check_ids(subject: DiagnosisSubject) -> HypothesisResult:
    """Test whether the engine saw the ids that are trained on."""
    contexts = counted(len(subject.contexts), "context")
    drifted = [context for context in subject.contexts if context.drifted]
    if not drifted:
        return HypothesisResult(
            "ids", "ruled out", f"{contexts}: the ids are those that the engine reported"
        )
    detail = (
        f"in {len(drifted)} of {contexts} the engine saw other ids than are trained on, first"
        f" in {drifted[0].name}"
    )
    return HypothesisResult("ids", "found", detail)


def _check_learner(subject: DiagnosisSubject, examined: Examined) -> HypothesisResult:
    """Test whether the learner's packed pass disagrees, although a plain pass agrees."""
    gap = examined.gap_of_all
    contexts: Sequence[Context] = subject.contexts
    if subject.packed is not None and all(context.learner is None for context in contexts):
        contexts = subject.packed()
    packed_gaps = []
    for context in contexts:
        if context.learner is not None:
            packed_gaps.append(context.learner - context.rollout)
    if packed_gaps:
        packed = Comparison.of(np.concatenate(packed_gaps))
        if packed.largest > max(10 * gap.largest, 1e-5):
            detail = (
                "a plain pass over the learner's parameters agrees with the engine (mean"
                f" {gap.mean:.1e}, largest {gap.largest:.1e} nats), the learner's packed pass does"
                f" not (mean {packed.mean:.1e}, largest {packed.largest:.1e})"
            )
            return HypothesisResult("learner", "found", detail, gap)

    count = len(subject.contexts)
    examined_part = ""
    if examined.scored != count:
        examined_part = f", {examined.scored} of {count}"
    detail = (
        f"nothing is wrong in the contexts examined{examined_part} (mean {gap.mean:.1e}, largest"
        f" {gap.largest:.1e} nats)"
    )
    return HypothesisResult("learner", "ruled out", detail, gap)


# --- what can be read off the engine --------------------------------------------------------------


def _find_tensor_faults(subject: DiagnosisSubject, engine: EngineView) -> list[TensorFault]:
    """Return the faults of the first engine that has any."""
    if not engine.tensors:
        return []
    model = subject.model
    params = subject.params

    def sample_transpose(name: str) -> TensorSample | None:
        array = next(array for key, array in hf_tensors(model, params) if key == name)
        if array.ndim != 2 or array.shape[0] != array.shape[1]:
            return None
        return TensorSample.of(array.T)

    older: dict[str, Callable[[], Samples]] = {}
    for description, make in subject.older.items():
        older[description] = lambda make=make: sample_tensors(model, make())
    learner_samples = sample_tensors(model, params)
    engines = (engine.tensors, *engine.replicas)
    for number, samples in enumerate(engines, 1):
        faults = tensor_faults(
            samples,
            learner_samples,
            precision=engine.precision,
            transposed=sample_transpose,
            older=older,
        )
        if not faults:
            continue
        if len(engines) == 1:
            return faults
        which = f"of engine {number} of {len(engines)}"
        return [replace(fault, name=f"{fault.name} ({which})") for fault in faults]
    return []


def _check_tensors(engine: EngineView, faults: Sequence[TensorFault]) -> HypothesisResult:
    count = len(engine.tensors)
    if not count:
        return HypothesisResult(
            "tensors", "not tested", "the engine's tensors cannot be read from here"
        )
    if faults:
        return HypothesisResult("tensors", "found", _describe_faults(faults, count))
    engines = "the engine"
    if engine.replicas:
        engines = f"each of {1 + len(engine.replicas)} engines"
    return HypothesisResult(
        "tensors", "ruled out", f"all {count} tensors of {engines} are the learner's"
    )


def _describe_faults(faults: Sequence[TensorFault], count: int) -> str:
    """Describe faults in words, the first three if there are many.

    Args:
        count: the number of the engine's tensors.
    """
    first = faults[0]
    if len(faults) > 3 and all(fault.detail == first.detail for fault in faults):
        return f"{len(faults)} of {count} tensors: each {first.detail}, e.g. {first.name}"
    description = "; ".join(f"{fault.name} {fault.detail}" for fault in faults[:3])
    if len(faults) > 3:
        return f"{len(faults)} of {count} tensors: {description}; …"
    return description


def _check_layers(
    search: Search, engine: EngineView
) -> tuple[LayerDifference | None, HypothesisResult]:
    """Compare the layers' outputs for the excerpt."""
    excerpt = search.excerpt
    context = excerpt.contexts[0]
    ids = context.token_ids[:MAX_IDS]
    engine_outputs = engine.layers(ids)
    if not engine_outputs:
        return None, HypothesisResult(
            "layers", "not tested", "the engine's activations cannot be read from here"
        )

    learner_outputs = outputs_of_layers(excerpt.model, search.activations, len(ids))
    difference = first_difference(engine_outputs, learner_outputs, precision=engine.precision)
    if difference is not None:
        # Measure what the engine's precision costs at each position, and allow for it.
        weights = weights_in(excerpt, engine.precision)
        if weights is not None:
            activations = forward.activations(excerpt.model, weights, excerpt.inputs(excerpt.rows))
            difference = first_difference(
                engine_outputs,
                learner_outputs,
                precision=engine.precision,
                rounded=outputs_of_layers(excerpt.model, activations, len(ids)),
            )
    if difference is not None:
        return difference, HypothesisResult("layers", "found", difference.describe())

    detail = (
        f"the embeddings and all {len(learner_outputs) - 1} layers agree on a prefilled context of"
        f" {len(ids)} ids"
    )
    if context.breach is not None and context.breach >= len(ids):
        return None, HypothesisResult(
            "layers", "not tested", f"{detail}, but all of these are before the gap"
        )
    return None, HypothesisResult("layers", "ruled out", detail)


# --- coarser precision in other kernels -----------------------------------------------------------


def _may_be_rounding(examined: Examined) -> bool:
    """Return whether the gap has no direction, as rounding has none."""
    gap = np.concatenate(examined.subject.gaps(examined.plain))
    return bool(abs(gap.mean()) <= 0.5 * np.abs(gap).mean())


def _check_rounding(examined: Examined, precision: str) -> HypothesisResult | None:
    """Test whether the gap is no larger than what the engine's own precision makes.

    Returns:
        The result; None if that precision is not coarser than the learner's, or cannot be computed
        in.
    """
    subject = examined.subject
    weights = weights_in(subject, precision)
    if weights is None:
        return None

    scores = subject.tokens(subject.hidden(weights=weights), weights).plain
    cost = Comparison.of(scores - examined.tokens.plain)
    gap = examined.gap
    is_as_small = (
        gap.mean <= ROUNDING_COSTS * cost.mean and gap.largest <= 2 * ROUNDING_COSTS * cost.largest
    )
    detail = (
        f"{precision} makes a gap of {cost.mean:.1e} nats on average, {cost.largest:.1e} at most,"
        " in the learner's own pass over these contexts"
    )
    if is_as_small and _may_be_rounding(examined):
        detail += f"; the engine's is {gap.mean:.1e} and {gap.largest:.1e}"
        return HypothesisResult("rounding", "explains", detail)
    return HypothesisResult("rounding", "ruled out", detail)


def _describe_rounding(examined: Examined, precision: str) -> str | None:
    """Describe the gap if it is one that a dtype coarser than ``precision`` makes.

    Other kernels round elsewhere, so no attempt gives the very same numbers. What agrees is how
    large the differences are, and in part where they are.

    Returns:
        The description; None if the gap has another size or lies elsewhere.
    """
    subject = examined.subject
    plain = examined.tokens.plain
    gap = np.concatenate(subject.gaps(examined.plain))

    for name in ("bfloat16", "float16"):
        if name == subject.dtype or coarsest([name, precision]) == precision:
            continue

        weights = subject.weights(dtype=name)
        change = subject.tokens(subject.hidden(weights=weights), weights).plain - plain
        ratio = float(np.abs(gap).mean() / max(np.abs(change).mean(), 1e-30))
        correlation = 0.0
        if gap.std() > 0 and change.std() > 0:
            correlation = float(np.corrcoef(gap, change)[0, 1])

        if 1 / 3 <= ratio <= 3 and correlation > 0.2:
            return (
                f"the gap is {ratio:.1f} times what computing in {name} makes, has no direction,"
                f" and lies where that makes one (correlation {correlation:.2f})"
            )
    return None
