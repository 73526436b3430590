"""Groups to numbers: by data source, and with nothing left out that went wrong."""

from dataclasses import replace

import pytest

from jax_agent_rl.evaluate.evaluation import scores
from jax_agent_rl.types import DropReason, FinishReason, Group
from tests.trajectories import call, trajectory

SETTINGS = {"samples": 2, "ks": (1, 2), "pass_reward": 1.0, "seed": 0}


def group(name: str, *rewards: float, dropped: dict | None = None, **fields) -> Group:
    members = [
        trajectory([1], [5, 2], reward=r, index=i, group=name, **fields)
        for i, r in enumerate(rewards)
    ]
    return Group(group_id=name, trajectories=tuple(members), dropped=dropped or {})


def test_each_data_source_has_its_numbers_and_all_have_theirs():
    got = scores(
        [group("a", 1.0, 0.0), group("b", 0.5, 0.5), group("c", 1.0, 1.0)],
        ["x", "y", "x"],
        **SETTINGS,
    )
    assert {name: part["prompts"] for name, part in got.items()} == {"x": 2, "y": 1, "all": 3}
    assert got["x"]["pass"]["1"]["mean"] == 0.75
    assert got["x"]["pass"]["2"]["mean"] == 1.0
    assert got["y"]["pass"]["2"]["mean"] == 0.0
    assert got["y"]["reward"]["mean"] == 0.5
    assert got["all"]["reward"]["mean"] == pytest.approx(2 / 3)


def test_one_data_source_is_not_told_twice():
    assert list(scores([group("a", 1.0, 0.0)], ["x"], **SETTINGS)) == ["x"]


def test_lost_trajectories_count_as_failures():
    got = scores([group("a", 1.0, dropped={DropReason.TOOL_SERVER_ERROR: 1})], ["x"], **SETTINGS)[
        "x"
    ]
    assert got["samples"] == 2
    assert got["lost"] == {"tool_server_error": 1}
    assert got["pass"]["1"]["mean"] == 0.5
    assert got["reward"]["mean"] == 0.5


def test_a_reward_passes_from_the_threshold_on():
    got = scores([group("a", 0.6, 0.2)], ["x"], **SETTINGS | {"pass_reward": 0.6})["x"]
    assert got["pass"]["1"]["mean"] == 0.5


def test_tool_errors_parts_and_cut_trajectories_are_counted():
    first = group("a", 1.0, 0.0, calls=[[call(), call(error="timeout")]])
    cut = replace(
        first.trajectories[1],
        finish_reason=FinishReason.RESPONSE_LENGTH,
        reward_parts={"format": 1.0},
    )
    got = scores([replace(first, trajectories=(first.trajectories[0], cut))], ["x"], **SETTINGS)[
        "x"
    ]
    assert got["tool_calls_mean"] == 2.0
    assert got["tool_error_share"] == 0.5
    assert got["cut_share"] == 0.5
    assert got["reward_parts"] == {"format": 1.0}


def test_calls_of_every_segment_are_counted():
    one_segment = group("a", 1.0, calls=[[call()]])
    (last,) = one_segment.trajectories
    (first,) = group("s", 0.0, calls=[[call(), call(error="timeout")]]).trajectories
    got = scores(
        [replace(one_segment, trajectories=(replace(last, segments=(first,)),))], ["x"], **SETTINGS
    )["x"]
    assert got["tool_calls_mean"] == 3.0
    assert got["tool_error_share"] == pytest.approx(1 / 3)
