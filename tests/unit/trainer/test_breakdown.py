"""Where a run says its time went."""

import pytest

from jax_agent_rl.trainer.observing import ENVIRONMENT_SECONDS, Breakdown, format_breakdown

COMPILED = "/jax/core/compile/backend_compile_duration"


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.delenv(ENVIRONMENT_SECONDS, raising=False)
    return Time()


def line(*phases: tuple[str, float, float]) -> dict:
    return {"phase_seconds": [list(phase) for phase in phases]}


def test_stages_add_up_to_the_whole(clock: Time, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENVIRONMENT_SECONDS, "40")
    breakdown = Breakdown(clock, clock)
    clock.now = 130.0
    breakdown.started()
    metrics = [
        line(("evaluate", 130.0, 140.0)),
        line(("engine", 140.0, 160.0), ("learn", 160.0, 175.0), ("publish", 175.0, 176.0)),
    ]
    clock.now = 180.0
    assert breakdown.stages(metrics) == {
        **{
            "environment": 40.0,
            "compilation": 30.0,
            "evaluation": 10.0,
            "rollout": 20.0,
            "learning": 15.0,
        },
        **{"rest": 5.0, "total": 120.0},
    }


def test_what_the_learner_compiles_is_compilation_and_not_learning(clock: Time):
    breakdown = Breakdown(clock, clock)
    breakdown.started()
    clock.now = 112.0
    breakdown.on_event(COMPILED, 8.0)  # from 104 to 112
    breakdown.on_event("/jax/some/other_duration", 5.0)
    clock.now = 120.0
    stages = breakdown.stages([line(("learn", 103.0, 120.0))])
    assert stages["compilation"] == 8.0 and stages["learning"] == 9.0


def test_compilation_during_sampling_counts_once(clock: Time):
    breakdown = Breakdown(clock, clock)
    breakdown.started()
    clock.now = 106.0
    breakdown.on_event(COMPILED, 4.0)
    clock.now = 120.0
    stages = breakdown.stages([line(("engine", 100.0, 110.0), ("learn", 105.0, 120.0))])
    assert (stages["compilation"], stages["rollout"], stages["learning"]) == (4.0, 6.0, 15.0)


def test_phases_before_a_restart_do_not_count(clock: Time):
    breakdown = Breakdown(clock, clock)
    breakdown.started()
    clock.now = 105.0
    stages = breakdown.stages([line(("learn", 10.0, 50.0)), line(("learn", 101.0, 105.0))])
    assert stages["learning"] == 4.0 and stages["total"] == 5.0


def test_it_is_told_of_real_compilations(clock: Time):
    import jax

    breakdown = Breakdown(clock, clock)
    breakdown.started()
    with breakdown.watching():
        jax.jit(lambda x: x * 3.25 + 1).lower(jax.numpy.ones(3)).compile()
    clock.now = 1e9
    noted = breakdown.stages([line(("learn", 100.0, 1e9))])
    assert noted["compilation"] > 0


@pytest.mark.parametrize("reported", ["", "soon", "-4"])
def test_an_environment_time_that_is_no_time_counts_as_none(
    reported: str, clock: Time, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(ENVIRONMENT_SECONDS, reported)
    assert Breakdown(clock, clock).stages([])["environment"] == 0.0


def test_stages_without_time_are_not_shown():
    assert (
        format_breakdown({"environment": 0.0, "compilation": 61.0, "rest": 0.2, "total": 61.2})
        == "time: compilation 1m01s · 1m01s in all"
    )
