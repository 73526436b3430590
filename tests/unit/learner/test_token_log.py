"""What a learner says about each token it trained on, and how the run folder lays it out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig
from jax_agent_rl.learner.experience import Scores, build_experience
from jax_agent_rl.learner.metrics import step_result
from jax_agent_rl.observe.run_dir import trajectory_record
from jax_agent_rl.types import Group, Trajectory
from tests.trajectories import trajectory

CONFIG = AlgorithmConfig(adv_estimator="dr_grpo")


def made_of(*members: Trajectory, masked: tuple[str, ...] = ()):
    """The log of a group whose learner finds every token at -2 nats."""
    group = Group(group_id="g", trajectories=members)
    old = [np.full(sum(sum(s.loss_mask) for s in t.sequences), -2.0) for t in members]
    experience = build_experience([group], CONFIG, Scores(old=old), kl_coef=0.0, masked=masked)
    return step_result(experience, [], {}, masked=masked).tokens


def test_every_trained_token_has_its_advantage_and_the_learners_log_prob():
    good = trajectory([5], [7, 8, 9], mask=[1, 0, 1], reward=1.0, index=0)
    log = made_of(good, trajectory([5], [7], index=1))
    np.testing.assert_array_equal(
        log["g-0"]["advantages"], [0.5, 0.5]
    )  # dr_grpo: reward minus the group's mean
    np.testing.assert_array_equal(log["g-1"]["advantages"], [-0.5])
    np.testing.assert_array_equal(log["g-0"]["old_logprobs"], [-2, -2])
    record = trajectory_record(good, step=1, split="train", token_values=log["g-0"])
    assert record["advantages"] == [0.5, 0.0, 0.5]
    assert record["old_logprobs"] == [-2.0, 0.0, -2.0]


def test_what_only_counts_in_baselines_has_no_log():
    members = trajectory([5], [7], reward=1.0, index=0), trajectory([5], [8], index=1)
    assert set(made_of(*members, masked=("g-1",))) == {"g-0"}


@pytest.mark.parametrize("change", ["segments", "history_window"])
def test_a_trajectory_of_several_contexts_has_one_number_for_each_sampled_id(change: str):
    session = trajectory([5], [7, 1, 8, 1, 9, 6], mask=[1, 0, 1, 0, 1, 1], reward=1.0, index=0)
    segment = trajectory([5], [3, 4], index=9)
    session = (
        replace(session, segments=(segment,))
        if change == "segments"
        else replace(session, history_window=1)
    )
    log = made_of(session, trajectory([5], [7], index=1))["g-0"]
    numbered = {"advantages": np.arange(1.0, 1 + len(log["advantages"]))}
    record = trajectory_record(session, step=1, split="train", token_values=numbered)
    if change == "segments":
        assert record["segments"][0]["advantages"] == [1, 2]
        assert record["advantages"] == [
            3,
            0,
            4,
            0,
            5,
            6,
        ]
    else:
        assert len(session.sequences) == 2
        assert record["advantages"] == [1, 0, 2, 0, 3, 4]
