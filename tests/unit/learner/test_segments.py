"""Trajectories of several contexts: every segment is trained on, with its trajectory's advantage
and weight.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.collect.filters import select
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.packing import pack
from jax_agent_rl.types import DropReason, Group, Trajectory
from tests.gradients import policy_batch
from tests.tiny import TINY, tiny_params
from tests.trajectories import trajectory

LEFT = trajectory([5, 60], [70, 80], index=1)  # a context that was left


def in_two_pieces() -> Trajectory:
    return replace(trajectory([5, 6], [7, 8, 9], reward=1.0, index=0), segments=(LEFT,))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_segments_share_the_advantage_and_the_weight_of_their_trajectory(mode: str):
    two = trajectory([5, 6], [9, 9, 9, 9], reward=0.0, index=2)
    learner = Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig(adv_estimator="dr_grpo", loss_agg_mode=mode),
        config=LearnerConfig(pack_length=32),
        temperature=1.0,
    )
    groups = [Group(group_id="g", trajectories=(in_two_pieces(), two))]
    columns = policy_batch(learner, groups).terms
    used = columns["weight"] > 0
    assert sorted(columns["advantage"][used].tolist()) == [-0.5] * 4 + [0.5] * 5
    expected = {"token-mean": 1 / 9, "seq-mean-token-mean": 1 / 10, "seq-mean-token-sum": 1 / 2}[
        mode
    ]
    np.testing.assert_allclose(columns["weight"][used & (columns["advantage"] > 0)], expected)


def test_numbers_of_a_trajectory_are_those_of_its_contexts_in_order():
    batch = pack([in_two_pieces(), trajectory([5, 60], [70], index=3)], pack_length=8)
    numbers = [np.arange(5.0), np.array([9.0])]
    for got, expected in zip(
        batch.gather_terms(batch.with_terms(x=numbers).terms["x"]), numbers, strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    assert [states.tolist() for states in batch.gather_states(batch.token_ids)] == [
        [60, 70, 6, 7, 8, 9],
        [60, 70],
    ]


def test_the_reward_of_two_contexts_comes_after_the_last():
    discounted = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=0.5)
    learner = Learner(
        TINY,
        tiny_params(),
        algorithm=discounted,
        config=LearnerConfig(pack_length=32),
        temperature=1.0,
    )
    _, experience = learner.prepare([Group(group_id="g", trajectories=(in_two_pieces(),))])
    (advantage,) = experience.advantages
    assert np.all(np.diff(advantage) > 0)


def test_a_segment_without_usable_log_probs_drops_its_trajectory():
    broken = replace(
        in_two_pieces(), segments=(replace(LEFT, rollout_logprobs=(float("nan"), -1.0)),)
    )
    group = Group(group_id="g", trajectories=(broken, trajectory([5], [6], reward=1.0, index=2)))
    assert select([group], AlgorithmConfig(filter_zero_variance=False)).dropped[
        DropReason.NAN_LOGPROBS
    ] == ("g-0",)
