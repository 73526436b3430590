"""The search for an explanation: on the shortest beginning that shows the gap, within a time limit
that is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_agent_rl.agreement.diagnosis import EngineView, diagnose
from jax_agent_rl.agreement.hypotheses import position, weights_in
from jax_agent_rl.agreement.report import JAX_ENGINE, OTHER_ENGINES, Cause, Tolerance, advice
from jax_agent_rl.agreement.search import (
    MARGIN,
    READINGS,
    Search,
    TimeLimit,
    examine,
    excerpt_of,
    order_families,
)
from jax_agent_rl.agreement.subject import Context, DiagnosisSubject
from tests.agreement_testbed import LLAMA
from tests.tiny import logprobs_of, tiny_params

PARAMS = tiny_params(1, LLAMA)
TOLERANCE = JAX_ENGINE["float32"]


class Ticking:
    """A clock that goes on by some seconds whenever it is read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def context(
    seed: int, *, length: int = 40, wrong_from: int | None = 10, error: float = 0.5
) -> Context:
    """A context whose engine is wrong about every token from an index on, for no reason that there
    is.
    """
    rng = np.random.default_rng(seed)
    ids = tuple(rng.integers(3, 97, length).tolist())
    at = np.arange(10, length)
    rollout = logprobs_of(PARAMS, ids[:10], ids[10:])
    if wrong_from is not None:
        noise = error * rng.choice([-1.0, 1.0], len(at)) * rng.uniform(0.5, 1.5, len(at))
        rollout = rollout + np.where(at >= wrong_from, noise, 0.0)
    return Context(
        name=f"t{seed}", token_ids=ids, prompt=10, at=at, rollout=rollout, starts=(10, 18, 24, 32)
    )


def subject(*contexts: Context, **changed: Any) -> DiagnosisSubject:
    return DiagnosisSubject(
        model=LLAMA,
        params=PARAMS,
        dtype="float32",
        temperature=1.0,
        contexts=contexts,
        backend="jetstream",
        **changed,
    )


def endless() -> TimeLimit:
    return TimeLimit(45.0, clock=lambda: 0.0)


def test_contexts_are_examined_until_enough_of_them_disagree():
    healthy = [context(seed, wrong_from=None) for seed in range(3)]
    wrong = [context(seed) for seed in range(3, 9)]
    examined = examine(subject(*healthy, *wrong), TOLERANCE, endless())
    assert examined.scored == 8
    assert len(examined.subject.contexts) == 4
    assert {each.name for each in examined.subject.contexts} <= {each.name for each in wrong}
    slow = examine(subject(*wrong), TOLERANCE, TimeLimit(45.0, clock=Ticking(5.0)))
    assert slow.scored == 2, "two are enough where passes are slow"


def test_contexts_with_known_gaps_come_first():
    known = replace(context(7), learner=context(7, wrong_from=None).rollout)
    healthy = [context(seed, wrong_from=None) for seed in range(5)]
    examined = examine(subject(*healthy, known), TOLERANCE, TimeLimit(45.0, clock=Ticking(5.0)))
    assert "t7" in [each.name for each in examined.subject.contexts]


def test_the_probe_ends_a_few_tokens_after_the_first_that_shows_the_gap():
    early = context(1, wrong_from=12)
    late = context(2, wrong_from=30)
    examined = examine(subject(late, early), TOLERANCE, endless())
    (excerpt,) = excerpt_of(examined).contexts
    assert excerpt.name == "t1"
    assert len(excerpt.token_ids) <= 12 + 3 + MARGIN + 1
    breaches = {each.name: each.breach for each in examined.subject.contexts}
    assert breaches == {"t1": 12, "t2": 30}


def test_a_diagnosis_that_has_no_more_time_says_what_it_did_not_try():
    diagnosis = diagnose(
        subject(context(1), context(2)), tolerance=TOLERANCE, seconds=60.0, clock=Ticking(1.0)
    )
    assert diagnosis.cause is Cause.UNKNOWN
    assert "there was no time to try all of: " in diagnosis.line
    assert "--seconds 600 RUN" in diagnosis.line
    untried = [finding for finding in diagnosis.findings if finding.detail == "there was no time"]
    assert untried
    assert all(finding.name in diagnosis.line for finding in untried)
    untimed = diagnose(subject(context(1), context(2)), tolerance=TOLERANCE, clock=lambda: 0.0)
    assert untimed.cause is Cause.UNKNOWN
    assert "no time" not in untimed.line


def test_nothing_is_begun_once_the_time_is_over():
    diagnosis = diagnose(
        subject(context(1), context(2)), tolerance=TOLERANCE, seconds=10.0, clock=Ticking(5.0)
    )
    assert READINGS in diagnosis.line
    assert Cause.POSITION in diagnosis.line
    tried = {finding.name for finding in diagnosis.findings if finding.left is not None}
    assert tried == {
        Cause.POSITION,
        Cause.MIXED_ANSWERS,
    }, "what is known already is compared at no cost"


def test_where_the_layers_begin_to_differ_is_where_positions_are_tried_first():
    search = Search(
        examined=examine(subject(context(1, wrong_from=30)), TOLERANCE, endless()),
        tolerance=TOLERANCE,
        limit=endless(),
    )
    search.note_where_it_begins(23)
    assert next(position(search.excerpt)).label == "puts ids 1 position further from id 23 on"


@pytest.mark.parametrize("backend", OTHER_ENGINES)
def test_who_does_not_know_the_cause_does_not_advise_the_engine_in_use(backend: str):
    said = advice(Cause.UNKNOWN, backend)
    assert f"rollout.backend={backend}" not in said
    assert OTHER_ENGINES[backend] in said
    diagnosis = diagnose(
        replace(subject(context(1)), backend=backend),
        tolerance=TOLERANCE,
        seconds=20.0,
        clock=Ticking(1.0),
    )
    assert diagnosis.cause is Cause.UNKNOWN
    assert said in diagnosis.line
    assert diagnosis.to_json()["line"] == diagnosis.line


def test_what_is_known_decides_the_order():
    late = order_families([], is_late=True, tensors_agree=True)
    assert late.index(Cause.POSITION) < late.index(Cause.SETTING) < late.index(Cause.STALE_VERSION)
    after_insertion = order_families([], is_late=True, tensors_agree=True, after_inserted=True)
    assert after_insertion[:2] == [Cause.TOKEN_DRIFT, Cause.PADDING]
    assert after_insertion.index(Cause.MASK) < after_insertion.index(Cause.STALE_PREFIX)
    with_suspects = order_families(
        [Cause.POSITION, Cause.ROTARY], is_late=True, tensors_agree=True, after_inserted=True
    )
    assert with_suspects[:3] == [Cause.POSITION, Cause.ROTARY, Cause.TOKEN_DRIFT]
    suggested = order_families([Cause.ROTARY], is_late=False, tensors_agree=False)
    assert suggested.index(Cause.ROTARY) < suggested.index(Cause.POSITION)
    assert suggested[0] is Cause.STALE_VERSION
    assert sorted(late) == sorted(suggested) == sorted(after_insertion), (
        "everything is tried in the end"
    )


def test_where_a_plain_pass_agrees_the_learners_own_pass_is_asked_for():
    healthy = [context(seed, wrong_from=None) for seed in range(3)]
    packed = [replace(each, learner=each.rollout + 0.3) for each in healthy]
    diagnosis = diagnose(
        subject(*healthy, packed=lambda: packed), tolerance=TOLERANCE, clock=lambda: 0.0
    )
    assert diagnosis.cause is Cause.LEARNER
    assert "packed pass does not" in diagnosis.line
    diagnosis = diagnose(
        subject(*healthy, packed=lambda: healthy), tolerance=TOLERANCE, clock=lambda: 0.0
    )
    assert diagnosis.cause is Cause.ROUNDING


def test_the_worst_of_many_healthy_contexts_are_no_breach():
    """The mean is one of all tokens; whoever picks the worst contexts picks a larger one."""
    allowed = Tolerance(token=1.0, mean=0.06)
    errors = [0.01] * 6 + [0.09]
    contexts = [context(seed, error=error) for seed, error in enumerate(errors)]
    examined = examine(subject(*contexts), allowed, endless())
    assert not allowed.holds(examined.gap)
    assert allowed.holds(examined.gap_of_all)
    assert (
        diagnose(subject(*contexts), tolerance=allowed, clock=lambda: 0.0).cause is Cause.ROUNDING
    )


def in_precision(precision: str, contexts: Sequence[Context], times: float) -> list[Context]:
    """Contexts of an engine that rounds to a precision, which costs it some times what it costs the
    learner.
    """
    scorer = subject(*contexts)
    weights = weights_in(scorer, precision)
    assert weights is not None
    scores = scorer.split(scorer.tokens(scorer.hidden(weights=weights), weights).plain)
    rounded = []
    for each, rounded_logprobs in zip(contexts, scores, strict=True):
        rounded.append(
            replace(each, rollout=each.rollout + times * (rounded_logprobs - each.rollout))
        )
    return rounded


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "int8", "fp8"])
def test_a_gap_no_larger_than_the_engines_precision_makes_is_rounding(precision: str):
    contexts = [context(seed, wrong_from=None) for seed in range(4)]
    allowed = Tolerance(token=1e-5, mean=1e-6)
    view = EngineView(precision=precision)
    healthy = in_precision(precision, contexts, -1.2)
    diagnosis = diagnose(subject(*healthy), tolerance=allowed, engine=view, clock=lambda: 0.0)
    assert diagnosis.cause is Cause.ROUNDING and f"{precision} makes a gap" in diagnosis.line, (
        "\n".join(diagnosis.lines())
    )
    wrong = in_precision(precision, contexts, -8.0)
    diagnosis = diagnose(
        subject(*wrong), tolerance=allowed, engine=view, seconds=6.0, clock=Ticking(1.0)
    )
    assert diagnosis.cause is not Cause.ROUNDING, "\n".join(diagnosis.lines())
