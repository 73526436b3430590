"""The data types: the module's worked example, and what they refuse."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import (
    FinishReason,
    Fork,
    Group,
    SamplingParams,
    StopReason,
    TokenOutput,
    Trajectory,
    Turn,
    digest_ids,
)
from tests.messages import raises


def output(ids: list[int], logprobs: list[float], version: int) -> TokenOutput:
    return TokenOutput(
        token_ids=tuple(ids),
        log_probs=tuple(logprobs),
        policy_versions=(version,) * len(ids),
        stop_reason=StopReason.EOS,
        context_digest="",
    )


def trajectory(turns: list[Turn], **changes) -> Trajectory:
    fields = {
        "prompt_ids": [10, 11, 12],
        "turns": turns,
        "trajectory_id": "t",
        "group_id": "g",
        "agent_name": "tool_agent",
        "finish_reason": FinishReason.ANSWER,
    }
    return Trajectory.from_turns(**fields | changes)


def test_the_worked_example_of_the_module():
    turns = [
        Turn(output=output([20, 21, 2], [-0.1, -0.2, -0.1], 4), appended_ids=(30, 31, 32)),
        Turn(output=output([40, 2], [-0.3, -0.1], 5)),
    ]
    t = trajectory(turns)
    assert t.response_ids == (20, 21, 2, 30, 31, 32, 40, 2)
    assert t.response_mask == (1, 1, 1, 0, 0, 0, 1, 1)
    assert t.rollout_logprobs == (-0.1, -0.2, -0.1, 0, 0, 0, -0.3, -0.1)
    assert t.policy_versions == (4, 4, 4, -1, -1, -1, 5, 5)
    assert (t.num_turns, t.num_sampled) == (2, 5)


def test_the_worked_example_of_a_fork():
    first = Turn(output=output([20, 21, 2], [-0.1] * 3, 4), appended_ids=(30, 31, 32))
    parent = trajectory([first, Turn(output=output([40, 41, 2], [-0.1] * 3, 4))])
    fork = Fork(tree_id="t", parent_id="t", turns=1, tokens=1)
    branch = trajectory(
        [first, Turn(output=output([40, 50, 2], [-0.1] * 3, 4))], trajectory_id="b", fork=fork
    )
    assert (branch.num_sampled, branch.num_inherited, branch.tree_id) == (6, 4, "t")
    assert (parent.num_inherited, parent.tree_id) == (0, "t")
    assert not fork.at_prompt
    assert Fork(tree_id="t", parent_id="t", turns=0).at_prompt


def test_the_worked_example_of_a_history_window():
    turns = [Turn(output=output([i], [-0.1], 0), appended_ids=(0,)) for i in (1, 2, 3)]
    t = trajectory([*turns, Turn(output=output([4], [-0.1], 0))], prompt_ids=[9], history_window=1)
    assert [(s.prompt_ids, s.response_ids) for s in t.sequences] == [
        ((9,), (1, 0, 2)),
        ((9, 2, 0), (3,)),
        ((9, 3, 0), (4,)),
    ]


def test_a_sequence_of_a_history_window_shows_what_its_ids_show():
    turns = [
        Turn(output=output([i], [-0.1], 0), appended_ids=(0,), appended_media={"image": (i,)})
        for i in (1, 2, 3)
    ]
    t = trajectory(
        [*turns, Turn(output=output([4], [-0.1], 0))],
        history_window=1,
        prompt_media={"image": (0,)},
    )
    assert [s.multi_modal["image"] for s in t.sequences] == [(0, 1), (0, 2), (0, 3)]
    assert t.multi_modal == {"image": (0, 1, 2, 3)}


@pytest.mark.parametrize("changes", [{"prompt_ids": []}, {"turns": []}])
def test_a_trajectory_without_prompt_or_sample_is_refused(changes: dict):
    with raises(ValueError, fix=("a prompt", "a sampled id")):
        trajectory(changes.pop("turns", [Turn(output=output([1], [0.0], 0))]), **changes)


def test_a_resumed_output_keeps_both_parts_and_their_versions():
    joined = output([5, 6], [-1.0, -2.0], 1).then(output([2], [-0.5], 2))
    assert joined.token_ids == (5, 6, 2)
    assert joined.policy_versions == (1, 1, 2)
    assert joined.stop_reason is StopReason.EOS


def test_constrained_ids_are_sampled_ids_without_loss():
    marked = replace(output([20, 21, 2], [-0.1] * 3, 4), constrained=(True, False, True))
    turns = [
        Turn(output=marked, appended_ids=(30,), learn_appended=True),
        Turn(output=output([40], [-0.3], 5)),
    ]
    t = trajectory(turns)
    assert t.response_mask == (1, 1, 1, 0, 1)
    assert t.rollout_logprobs[:3] == (-0.1,) * 3
    assert t.loss_mask == (0, 1, 0, 1, 1)
    assert marked.first(2).constrained == (True, False)
    assert marked.then(marked).constrained == (True, False, True) * 2
    free = output([40], [-0.3], 5)
    assert free.then(marked).constrained == (False, True, False, True)
    assert free.then(free).constrained == ()
    with raises(ValueError, value=("3 ids", "1 grammar marks")):
        replace(marked, constrained=(True,))


def test_an_output_with_a_missing_logprob_is_refused():
    with raises(ValueError, value=("2 ids", "1 log-probs")):
        TokenOutput(
            token_ids=(1, 2),
            log_probs=(0.0,),
            policy_versions=(0, 0),
            stop_reason=StopReason.EOS,
            context_digest="",
        )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": 0}, {"key": "max_tokens", "value": 0, "fix": ">= 1"}),
        ({"max_tokens": 2.5}, {"key": "max_tokens", "value": 2.5, "fix": "a whole number"}),
        ({"temperature": -1.0}, {"value": "0 is greedy"}),
        (
            {"temperature": math.nan},
            {"key": "temperature", "value": "nan", "fix": "a finite number"},
        ),
        ({"temperature": math.inf}, {"value": "finite"}),
        ({"temperature": 10**400}, {"value": "finite"}),
        ({"temperature": "1"}, {"key": "temperature", "value": "'1'", "fix": "a finite number"}),
        ({"top_p": 0.0}, {"value": "top_p=0.0"}),
        ({"top_p": 1.5}, {"value": "top_p=1.5"}),
        ({"top_p": math.nan}, {"value": "top_p=nan"}),
        ({"top_k": -1}, {"value": "0 is off"}),
        ({"top_k": 2**31}, {"key": "top_k", "value": "=2147483648", "fix": "< 2147483648"}),
        ({"top_k": 2.5}, {"value": "whole number"}),
        ({"seed": "a"}, {"key": "seed", "value": "'a'", "fix": "a whole number"}),
        ({"stop": ("",)}, {"value": "empty string"}),
        ({"stop": (5,)}, {"key": "stop string", "value": 5, "fix": "a string"}),
        ({"stop": "end"}, {"key": "stop", "value": "'end'", "fix": "a tuple of strings"}),
        ({"stop": None}, {"value": "stop=None"}),
        (
            {"stop_token_ids": (2**40,)},
            {"key": "stop token id", "value": 1099511627776, "fix": "< 2147483648"},
        ),
        ({"stop_token_ids": (-5,)}, {"value": "must be >= 0"}),
        ({"stop_token_ids": 7}, {"key": "stop_token_ids", "value": 7, "fix": "a tuple of ids"}),
        (
            {"ignore_eos": "false"},
            {"key": "ignore_eos", "value": "'false'", "fix": "True or False"},
        ),
    ],
)
def test_impossible_sampling_parameters_are_refused(wrong: dict, named: dict):
    with raises(ValueError, **named):
        SamplingParams(**{"max_tokens": 1, **wrong})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"request_id": 7}, {"key": "request_id", "value": 7, "fix": "a string"}),
        ({"prompt_ids": ()}, {"value": "empty prompt"}),
        (
            {"prompt_ids": (1.5, 2)},
            {"key": "request 'r'", "value": 1.5, "fix": "whole numbers"},
        ),
        ({"prompt_ids": (5, "6")}, {"value": "holds '6'"}),
        ({"sampling": {"max_tokens": 4}}, {"value": "must be SamplingParams"}),
        ({"session_id": [1]}, {"key": "session_id", "value": "[1]", "fix": "a string"}),
        ({"session_ends": "no"}, {"value": "session_ends='no'"}),
        ({"priority": "high"}, {"key": "priority", "value": "'high'", "fix": "a whole number"}),
        ({"lora": 3}, {"value": "lora=3"}),
        ({"multi_modal": [1]}, {"fix": "a mapping"}),
    ],
)
def test_impossible_requests_are_refused(wrong: dict, named: dict):
    with raises(ValueError, **named):
        GenerateRequest(
            **{"request_id": "r", "prompt_ids": (5, 6), "sampling": SamplingParams(max_tokens=1)}
            | wrong
        )


def test_numbers_of_numpy_are_numbers():
    sampling = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int32(4),
        seed=np.uint32(7),
        stop_token_ids=tuple(np.array([5, 6])),
    )
    request = GenerateRequest(
        request_id="r", prompt_ids=tuple(np.array([5, 6])), sampling=sampling, priority=np.int64(2)
    )
    assert request.sampling.stop_token_ids == (5, 6)


def test_a_group_refuses_members_of_another():
    with pytest.raises(ValueError, match="other groups"):
        Group(group_id="h", trajectories=(trajectory([Turn(output=output([1], [0.0], 0))]),))


@given(st.lists(st.integers(0, 2**31 - 1)), st.lists(st.integers(0, 2**31 - 1)))
def test_digests_are_equal_exactly_when_the_ids_are(a: list[int], b: list[int]):
    assert (digest_ids(a) == digest_ids(b)) == (a == b)
