"""What a run's records say in sum."""

import pytest

from jax_agent_rl.trainer.record import overlap_summary


def test_the_summary_weighs_idle_time_by_seconds_and_age_by_tokens():
    lines = [
        {"step_seconds": 9.0, "learner_idle_share": 1.0, "staleness_histogram": {"0": 30}},
        {"step_seconds": 1.0, "learner_idle_share": 0.0, "staleness_histogram": {"1": 5, "3": 5}},
    ]
    expected = {"learner_idle_share": 0.9, "staleness_mean": 0.5, "staleness_max": 3}
    assert overlap_summary(lines) == pytest.approx(expected)


def test_a_synchronous_run_has_no_stale_tokens_and_a_run_without_steps_has_none():
    fresh = {"staleness_mean": 0, "staleness_max": 0}
    assert overlap_summary([{"step_seconds": 4.0, "learner_idle_share": 0.25}]) == {"learner_idle_share": 0.25} | fresh
    assert overlap_summary([]) == {"learner_idle_share": 0.0} | fresh
