"""What an agent is asked to play: roles of a request, what a branch takes over."""

from dataclasses import replace

import pytest

from jax_agent_rl.agents import EpisodeRequest, Prefix
from jax_agent_rl.types import Fork, SamplingParams, StopReason
from tests.messages import raises
from tests.trajectories import trajectory

SAID = (
    "user",
    "assistant",
    "user",
    "assistant",
    "tool",
    "assistant",
)  # the first answer is the prompt's own
PARENT = trajectory(
    [3, 4],
    [10, 11, 7, 20, 21],
    mask=[1, 1, 0, 1, 1],
    logprobs=[-0.1, -0.2, 0.0, -0.3, -0.4],
    messages=[{"role": role, "content": str(number)} for number, role in enumerate(SAID)],
)


def fork(turns: int, tokens: int = 0, parent: str = "g-0") -> Fork:
    return Fork(tree_id="g-0", parent_id=parent, turns=turns, tokens=tokens)


def test_whole_turns_are_taken_over_as_they_are():
    prefix = Prefix.of(PARENT, fork(1))
    assert prefix.turns == PARENT.turns[:1]
    assert prefix.partial_turn is None
    assert prefix.context_ids == [3, 4, 10, 11, 7]
    assert [m["content"] for m in prefix.messages] == list("01234")


def test_of_a_turn_that_is_cut_the_first_ids_keep_their_log_probs():
    prefix = Prefix.of(PARENT, fork(1, 1))
    partial_turn = prefix.partial_turn
    assert partial_turn is not None
    assert partial_turn.token_ids == (20,)
    assert partial_turn.log_probs == (-0.3,)
    assert partial_turn.policy_versions == (0,)
    assert partial_turn.stop_reason is StopReason.ABORTED
    assert prefix.context_ids == [3, 4, 10, 11, 7], "they belong to a turn that is not over"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (fork(2), {"value": "2 turns", "fix": "keep fewer"}),
        (fork(-1), {"value": "2 turns", "fix": "keep fewer"}),
        (fork(1, 2), {"key": "turn 1 of g-0", "value": "2 ids"}),
        (fork(0, parent="g-7"), {"value": "not a place", "key": "trajectory g-0"}),
    ],
)
def test_a_place_that_is_none_is_refused(wrong: Fork, named: dict):
    with raises(ValueError, **named):
        Prefix.of(PARENT, wrong)


def test_a_trajectory_that_left_contexts_behind_has_no_single_beginning():
    edited = replace(PARENT, segments=(trajectory([3], [5]),))
    with raises(ValueError, value="not a place"):
        Prefix.of(edited, fork(1))


def request(**fields) -> EpisodeRequest:
    sampling = SamplingParams(max_tokens=9, seed=4)
    ids = {"trajectory_id": "train-3-0-1", "group_id": "train-3-0"}
    return EpisodeRequest(row={"prompt": []}, sampling=sampling, **ids, **fields)


def test_roles_of_a_request_have_ids_and_seeds_of_their_own():
    solver = request().as_role("solver")
    checker = request().as_role("checker")
    assert (solver.role, solver.trajectory_id) == ("solver", "train-3-0-1/solver")
    assert (checker.role, checker.trajectory_id) == ("checker", "train-3-0-1/checker")
    assert solver.group_id == checker.group_id == "train-3-0"
    assert len({request().sampling.seed, solver.sampling.seed, checker.sampling.seed}) == 3
    assert solver == request().as_role("solver"), "a run can be repeated"


def test_a_role_without_a_seed_gets_none():
    unseeded = replace(request(), sampling=SamplingParams(max_tokens=9))
    assert unseeded.as_role("solver").sampling.seed is None


def test_a_role_does_not_go_on_from_the_middle_of_a_trajectory():
    continued = request(prefix=Prefix.of(PARENT, fork(1)))
    with raises(ValueError, value="role 'solver'"):
        continued.as_role("solver")
