"""What a run's records say in sum."""

from dataclasses import replace

import pytest

from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.trainer.record import overlap_summary, step_record
from jax_agent_rl.types import Group
from tests.trajectories import call, session, trajectory


def test_the_summary_weighs_idle_time_by_seconds_and_age_by_tokens():
    lines = [
        {"step_seconds": 9.0, "learner_idle_share": 1.0, "staleness_histogram": {"0": 30}},
        {"step_seconds": 1.0, "learner_idle_share": 0.0, "staleness_histogram": {"1": 5, "3": 5}},
    ]
    expected = {"learner_idle_share": 0.9, "staleness_mean": 0.5, "staleness_max": 3}
    assert overlap_summary(lines) == pytest.approx(expected)


def test_synchronous_and_empty_runs_have_no_stale_tokens():
    fresh = {"staleness_mean": 0, "staleness_max": 0}
    assert (
        overlap_summary([{"step_seconds": 4.0, "learner_idle_share": 0.25}])
        == {"learner_idle_share": 0.25} | fresh
    )
    assert overlap_summary([]) == {"learner_idle_share": 0.0} | fresh


def line_of(*trajectories, engine: BackendMetrics | None = None) -> dict:
    return step_record(
        1,
        [Group(group_id="g", trajectories=trajectories)],
        {},
        engine or BackendMetrics(),
        accounting={},
        rollout_seconds=2.0,
        weight_update_seconds=0.0,
        step_seconds=2.0,
        recompilations=0,
        pipeline={},
    )


def test_a_session_is_counted_with_all_its_segments():
    counts = {"segments": 2.0, "unmatched_calls": 1.0, "spliced_calls": 0.0}
    first, *later_turns = session().turns
    called = replace(
        session(), turns=(replace(first, tool_calls=(call(), call(error="timeout"))), *later_turns)
    )
    line = line_of(
        replace(called, metrics=counts),
        replace(trajectory([1], [5], index=1), metrics=dict.fromkeys(counts, 0.0)),
    )
    assert (line["segments_mean"], line["unmatched_calls"], line["spliced_calls"]) == (
        2.0,
        1.0,
        0.0,
    )
    assert (line["turns_max"], line["sampled_tokens_max"], line["response_tokens_max"]) == (5, 7, 9)
    assert line["rollout_tokens_per_second"] == 4.0
    assert line["tool_calls_mean"] == 1.0
    assert line["tool_errors"] == 1


def test_a_step_says_what_prompts_took_and_what_the_cache_saved():
    counts = {"prefill_tokens": 90, "cached_tokens": 60, "recomputed_tokens": 30}
    line = line_of(trajectory([1], [5]), engine=BackendMetrics(**counts))
    assert {name: line[name] for name in counts} == counts


def test_a_run_without_sessions_counts_no_segments():
    assert "segments_mean" not in line_of(trajectory([1], [5]))


def test_programs_that_did_not_end_well_are_counted_among_programs():
    ended = {"program_timeout": 0.0, "program_error": 0.0}
    line = line_of(
        replace(trajectory([1], [5]), metrics=ended),
        replace(trajectory([1], [5], index=1), metrics=ended | {"program_timeout": 1.0}),
        trajectory([1], [5], index=2),
    )
    assert (line["program_timeout_share"], line["program_error_share"]) == (0.5, 0.0)
    assert "program_timeout_share" not in line_of(trajectory([1], [5]))


def test_starts_of_environments_are_counted_where_there_are_any():
    ready = {"environment_start_seconds": 0.0, "environment_was_ready": 1.0}
    late = {
        "environment_start_seconds": 30.0,
        "environment_was_ready": 0.0,
        "environment_failed_preparations": 1.0,
    }
    line = line_of(
        replace(trajectory([1], [5], index=0), metrics=ready),
        replace(trajectory([1], [5], index=1), metrics=late),
        trajectory([1], [5], index=2),
    )
    assert line["environment/start_seconds_mean"] == 15.0
    assert line["environment/hit_rate"] == 0.5
    assert line["environment/failed_preparations"] == 1.0
    assert not any(name.startswith("environment/") for name in line_of(trajectory([1], [5])))
