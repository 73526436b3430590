"""Filters: what is masked, what is dropped, and why."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.collect.filters import FILTERS, select
from jax_agent_rl.config.algorithm import FILTER_NAMES, AlgorithmConfig
from jax_agent_rl.types import DropReason, FinishReason, Group
from tests.trajectories import call, group_of, trajectory

TWO_TURNS = {"prompt": [3], "response": [4, 7, 5], "mask": [1, 0, 1]}
SAYS = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "call"}]


def config(**filters) -> AlgorithmConfig:
    return AlgorithmConfig(filters=filters)


@pytest.mark.parametrize(
    ("fields", "void_turn", "void_trajectory"),
    [
        ({"calls": [[call()]]}, False, False),
        ({"calls": [[call(error="raised")]]}, False, False),  # a call that failed is a call
        ({"calls": [[call(error="malformed")]]}, True, False),
        ({}, True, False),
        ({"calls": [[call()]], "finish": FinishReason.RESPONSE_LENGTH}, True, False),
        ({"finish": FinishReason.RESPONSE_LENGTH}, True, True),
        (
            {"calls": [[call()]], "finish": FinishReason.ACTION_LENGTH},
            True,
            False,
        ),  # a cut turn holds no action
        ({"calls": [[call()]], "finish": FinishReason.MAX_ASSISTANT_TURNS}, False, False),
        ({"calls": [[call()], [call()]], "finish": FinishReason.RESPONSE_LENGTH}, False, False),
    ],
)
def test_a_turn_is_void_without_a_tool_call_or_an_answer(
    fields: dict, void_turn: bool, void_trajectory: bool
):
    t = trajectory(**TWO_TURNS, **fields)
    assert FILTERS["void_turn"](t, config()) is void_turn
    assert FILTERS["void_trajectory"](t, config()) is void_trajectory


@pytest.mark.parametrize(("text", "void"), [("so \\boxed{4}", False), ("so 4", True)])
def test_an_answer_may_be_asked_to_look_like_one(text: str, void: bool):
    messages = [
        *SAYS,
        {"role": "assistant", "tool_calls": []},  # of a prompt's example, without content
        {"role": "tool", "content": "\\boxed{9}"},
        {"role": "assistant", "content": text},
    ]
    t = trajectory(**TWO_TURNS, calls=[[call()]], messages=messages)
    assert FILTERS["void_turn"](t, config(final_answer=r"\\boxed\{", void_turn="mask")) is void


def test_a_pattern_that_backtracks_on_an_answer_holds_nothing_up(monkeypatch, caplog):
    monkeypatch.setattr("jax_agent_rl.collect.filters.SEARCH_SECONDS", 0.05)
    messages = [
        *SAYS,
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "a" * 5000 + "!"},
    ]
    t = trajectory(**TWO_TURNS, calls=[[call()]], messages=messages)
    assert FILTERS["void_turn"](t, config(final_answer=r"^(a+)+$", void_turn="mask"))
    assert "algorithm.filters.final_answer=^(a+)+$ took more than 0.05 s" in caplog.text


def test_all_tool_calls_failed_needs_calls():
    failed, mixed, none = ([[call(error="raised"), call(error=e)]] for e in ("timeout", None, None))
    assert FILTERS["all_tool_calls_failed"](trajectory(**TWO_TURNS, calls=failed), config())
    assert not FILTERS["all_tool_calls_failed"](trajectory(**TWO_TURNS, calls=mixed), config())
    assert not FILTERS["all_tool_calls_failed"](trajectory([3], [4]), config())


def test_repetition_looks_at_sampled_tokens_only():
    settings = AlgorithmConfig(
        shaping={"repetition_ngram": 2}, filters={"max_repetition": 0.3, "repetition": "drop"}
    )
    assert FILTERS["repetition"](trajectory([3], [5, 6, 5, 6, 5, 6]), settings)
    assert not FILTERS["repetition"](
        trajectory([3], [5, 9, 9, 9, 9, 6], mask=[1, 0, 0, 0, 0, 1]), settings
    )


def test_every_filter_of_the_configuration_has_a_function_and_a_reason():
    assert set(FILTER_NAMES) == set(FILTERS)
    assert all(DropReason(name) for name in FILTER_NAMES)


def cut_off(index: int, reward: float):
    return trajectory([3], [4], reward=reward, index=index, finish=FinishReason.RESPONSE_LENGTH)


@pytest.mark.parametrize("finish", FinishReason)
def test_overlong_is_what_a_limit_of_tokens_or_turns_cut_off(finish: FinishReason):
    limits = {"max_assistant_turns", "max_user_turns", "response_length", "action_length"}
    assert FILTERS["overlong"](trajectory([3], [4], finish=finish), config()) is (
        finish.value in limits
    )


def ends(index: int, reward: float):
    return trajectory([3], [4], reward=reward, index=index)


GROUP = group_of([ends(0, 1.0), cut_off(1, 0.0), ends(2, 1.0)])


def test_mask_keeps_a_reward_in_the_baseline_and_drop_takes_it_out():
    masked = select([GROUP], config(overlong="mask"))
    assert [g.rewards for g in masked.groups] == [(1.0, 0.0, 1.0)]
    assert masked.masked == {"g-1": DropReason.OVERLONG}
    assert not masked.dropped
    dropped = select([GROUP], config(overlong="drop"))
    # What is left has equal rewards: nothing to learn from.
    assert not dropped.groups
    assert not dropped.masked
    assert dropped.dropped == {
        DropReason.OVERLONG: ("g-1",),
        DropReason.ZERO_VARIANCE: ("g-0", "g-2"),
    }


def test_the_strictest_filter_that_applies_decides():
    selection = select([GROUP], config(overlong="mask", void_turn="drop"))
    assert selection.dropped[DropReason.VOID_TURN] == ("g-1",)


def test_a_group_of_which_nothing_is_trained_is_left_out():
    group = group_of([cut_off(0, 0.0), cut_off(1, 1.0)])
    selection = select([group], config(overlong="mask"))
    assert not selection.groups
    assert not selection.masked
    assert selection.dropped == {DropReason.OVERLONG: ("g-0", "g-1")}


def test_the_last_of_a_group_has_nothing_to_compare_with():
    assert select([group_of([ends(0, 1.0)])], AlgorithmConfig()).dropped == {
        DropReason.SINGLE_MEMBER: ("g-0",)
    }
    assert select([group_of([ends(0, 1.0)])], AlgorithmConfig(adv_estimator="gae")).groups


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 0.5])
def test_a_logprob_that_is_none_loses_its_trajectory_alone(bad: float):
    broken = trajectory([3], [4, 5], logprobs=[-1.0, bad], index=3)
    selection = select([group_of([*GROUP.trajectories, broken])], AlgorithmConfig())
    assert selection.dropped == {DropReason.NAN_LOGPROBS: ("g-3",)}
    assert len(selection.groups[0].trajectories) == 3


def test_remax_needs_the_greedy_reward_of_the_group():
    remax = AlgorithmConfig(adv_estimator="remax")
    assert select([GROUP], remax).dropped == {DropReason.NO_BASELINE: ("g-0", "g-1", "g-2")}
    assert select([group_of(GROUP.trajectories, greedy_reward=0.0)], remax).groups


actions = st.fixed_dictionaries(
    {name: st.sampled_from(["off", "mask", "drop"]) for name in FILTER_NAMES}
)
members = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0]),
        st.sampled_from(list(FinishReason)),
        st.sampled_from([None, "raised"]),
    ),
    min_size=1,
    max_size=4,
)


@given(st.lists(members, min_size=1, max_size=3), actions)
def test_everything_is_trained_masked_or_dropped_exactly_once(groups, filters):
    scored_groups = []
    for number, rows in enumerate(groups):
        group = []
        for index, (reward, finish, error) in enumerate(rows):
            ids = {"index": index, "group": f"g{number}"}
            calls = [[call(error=error)]]
            group.append(trajectory(**TWO_TURNS, **ids, reward=reward, finish=finish, calls=calls))
        scored_groups.append(group_of(group))
    selection = select(scored_groups, config(**filters))
    selected_ids = [t.trajectory_id for g in selection.groups for t in g.trajectories]
    gone = [i for ids in selection.dropped.values() for i in ids]
    assert sorted(selected_ids + gone) == sorted(
        t.trajectory_id for g in scored_groups for t in g.trajectories
    )
    assert set(selection.masked) <= set(selected_ids)
    for group in selection.groups:
        assert any(t.trajectory_id not in selection.masked for t in group.trajectories)


def test_a_trajectory_kept_out_of_the_loss_counts_in_the_baseline_alone():
    members = [trajectory([3], [4], reward=float(i % 2), index=i) for i in range(3)]
    members[1] = replace(members[1], no_loss=DropReason.OVERLONG)
    selection = select([Group(group_id="g", trajectories=tuple(members))], AlgorithmConfig())
    assert selection.masked == {"g-1": DropReason.OVERLONG}
    assert not selection.dropped
    assert [t.trajectory_id for t in selection.groups[0].trajectories] == ["g-0", "g-1", "g-2"]


def test_a_group_without_loss_is_dropped_by_its_members_reasons():
    members = [trajectory([3], [4], reward=float(i), index=i) for i in range(2)]
    members = [replace(t, no_loss=DropReason.VOID_TRAJECTORY) for t in members]
    selection = select([Group(group_id="g", trajectories=tuple(members))], AlgorithmConfig())
    assert selection.groups == ()
    assert selection.dropped == {DropReason.VOID_TRAJECTORY: ("g-0", "g-1")}


def test_a_fully_constrained_trajectory_counts_in_the_baseline_alone():
    members = [trajectory([3], [4, 5], reward=float(i), index=i) for i in range(3)]
    for number, marks in ((0, (True, False)), (1, (True, True))):
        turn = members[number].turns[0]
        turn = replace(turn, output=replace(turn.output, constrained=marks))
        members[number] = replace(members[number], turns=(turn,))
    selection = select([Group(group_id="g", trajectories=tuple(members))], AlgorithmConfig())
    assert selection.masked == {"g-1": DropReason.CONSTRAINED}
    assert len(selection.groups[0].trajectories) == 3
