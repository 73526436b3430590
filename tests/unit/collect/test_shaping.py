"""Penalties on rewards."""

import pytest

from jax_agent_rl.collect.filters import overlong_penalty, repetition, shape
from jax_agent_rl.config.algorithm import ShapingConfig
from tests.trajectories import group_of, trajectory


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (80, 0), (85, -0.5), (90, -1.0), (100, -2.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float):
    """DAPO's soft overlong punishment: limit 100, buffer 20."""
    assert overlong_penalty(length, limit=100, buffer=20, factor=2.0) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("ids", "share"),
    [([1, 2, 3, 4], 0), ([1, 1, 1, 1], 2 / 3), ([1, 2, 1, 2], 1 / 3), ([1, 2], 0), ([], 0)],
)
def test_repetition_is_the_share_of_pairs_seen_before(ids: list[int], share: float):
    assert repetition(ids, 2) == pytest.approx(share)


def test_penalties_come_off_the_reward_and_are_on_record():
    config = ShapingConfig(
        overlong_buffer=4, overlong_factor=1.0, repetition_factor=0.3, repetition_ngram=2
    )
    group = group_of([trajectory([3], [5, 5, 5, 5, 9, 9], mask=[1, 1, 1, 1, 0, 0], reward=1.0)])
    shaped = shape(group, config, max_response_length=8).trajectories[0]
    assert shaped.reward_parts == {
        "overlong_penalty": -0.5,
        "repetition_penalty": pytest.approx(-0.2),
    }
    assert shaped.reward == pytest.approx(0.3)


def test_without_penalties_a_group_stays_as_it_is():
    group = group_of([trajectory([3], [5], reward=1.0)])
    assert shape(group, ShapingConfig(), max_response_length=8) is group
