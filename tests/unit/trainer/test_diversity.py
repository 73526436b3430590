"""How different the trajectories of a step are: counted by hand, by role, and over segments."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.trainer.diversity import diversity_metrics
from jax_agent_rl.types import Fork, Group, Trajectory
from tests.trajectories import trajectory

MASK = [1, 1, 0, 1]


def made(*ids: int, index: int = 0, reward: float = 0.0, role: str | None = None) -> Trajectory:
    """Two sampled ids, an inserted one, and a further sampled one."""
    made = trajectory([1], list(ids), mask=MASK, index=index, reward=reward)
    return replace(made, role=role)


def group(*members: Trajectory) -> Group:
    return Group(group_id="g", trajectories=members)


def test_shares_are_those_counted_by_hand():
    members = [
        made(5, 6, 9, 7, index=0),
        made(5, 6, 9, 7, index=1),
        made(5, 6, 9, 8, index=2),  # the same first turn, another second one
        made(5, 7, 9, 7, index=3),
    ]
    metrics = diversity_metrics([group(*members)])
    assert metrics["distinct_first_actions"] == 2 / 4
    assert metrics["duplicate_share"] == metrics["repeated_failure_share"] == 2 / 4


def test_inserted_ids_are_nobodys_choice():
    members = [made(5, 6, 9, 7), made(5, 6, 8, 7, index=1)]
    assert diversity_metrics([group(*members)])["duplicate_share"] == 1.0


def test_right_answers_that_are_repeated_are_no_sign_of_a_collapse():
    right = [made(5, 6, 9, 7, index=index, reward=1.0) for index in range(3)]
    wrong = made(5, 7, 9, 7, index=3)
    again = made(5, 7, 9, 7, index=4)
    metrics = diversity_metrics([group(*right, wrong)])
    assert (metrics["duplicate_share"], metrics["repeated_failure_share"]) == (3 / 4, 0.0)
    metrics = diversity_metrics([group(*right, wrong, again)])
    assert (metrics["duplicate_share"], metrics["repeated_failure_share"]) == (1.0, 2 / 5)


def test_roles_are_not_compared_with_each_other():
    members = [
        made(5, 6, 9, 7, index=0, role="solver"),
        made(5, 6, 9, 7, index=1, role="checker"),
        made(5, 7, 9, 7, index=2, role="solver"),
        made(5, 8, 9, 7, index=3, role="checker"),
    ]
    metrics = diversity_metrics([group(*members)])
    assert metrics["duplicate_share"] == 0.0 and metrics["distinct_first_actions"] == 1.0


def test_a_branch_has_no_first_action_of_its_own():
    root = made(5, 6, 9, 7)
    fork = Fork(tree_id=root.trajectory_id, parent_id=root.trajectory_id, turns=1)
    branch = replace(made(5, 6, 9, 8, index=1), fork=fork)
    metrics = diversity_metrics([group(root, branch)])
    assert metrics["distinct_first_actions"] == 1.0 and metrics["duplicate_share"] == 0.0


def test_the_entropy_of_a_turn_is_minus_the_mean_logprob_of_its_ids():
    logprobs = [math.log(0.5), math.log(0.25), 0.0, math.log(0.125)]
    one = trajectory([1], [5, 6, 9, 7], mask=MASK, logprobs=logprobs)
    metrics = diversity_metrics([group(one)])
    assert metrics["turn_entropy/1"] == pytest.approx(1.5 * math.log(2))
    assert metrics["turn_entropy/2"] == pytest.approx(3 * math.log(2))
    assert "duplicate_share" not in metrics, "one member has nobody to repeat"


def test_logprobs_that_are_not_finite_do_not_count():
    logprobs = [math.nan, math.log(0.25), 0.0, math.nan]
    one = trajectory([1], [5, 6, 9, 7], mask=MASK, logprobs=logprobs)
    assert diversity_metrics([group(one)]) == {"turn_entropy/1": pytest.approx(2 * math.log(2))}


@given(st.lists(st.lists(st.integers(2, 3), min_size=4, max_size=4), min_size=2, max_size=6))
def test_without_duplicates_all_shares_say_so_and_copies_are_all_duplicates(rows: list[list[int]]):
    members = [made(*ids, index=number) for number, ids in enumerate(rows)]
    metrics = diversity_metrics([group(*members)])
    sampled = [(ids[0], ids[1], ids[3]) for ids in rows]
    alone = [ids for ids in sampled if sampled.count(ids) == 1]
    assert metrics["duplicate_share"] == pytest.approx(1 - len(alone) / len(rows))
    firsts = {ids[:2] for ids in sampled}
    assert metrics["distinct_first_actions"] == pytest.approx(len(firsts) / len(rows))
