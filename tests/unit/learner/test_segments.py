"""Trajectories of several contexts: every segment is trained on, with its trajectory's advantage and weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.types import Group
from tests.tiny import TINY, tiny_params
from tests.trajectories import trajectory


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_segments_share_the_advantage_and_the_weight_of_their_trajectory(mode: str):
    one = trajectory([5, 6], [7, 8, 9], reward=1.0, index=0)
    segment = trajectory([5, 60], [70, 80], index=1)
    two = trajectory([5, 6], [9, 9, 9, 9], reward=0.0, index=2)
    group = Group(group_id="g", trajectories=(replace(one, segments=(segment,)), two))
    learner = Learner(
        TINY,
        tiny_params(),
        algorithm=AlgorithmConfig(adv_estimator="dr_grpo", loss_agg_mode=mode),
        config=LearnerConfig(row_length=32),
        temperature=1.0,
    )
    ((batch, _),) = learner._prepare([group])
    used = batch.weight > 0
    assert sorted(batch.advantage[used].tolist()) == [-0.5] * 4 + [0.5] * 5
    expected = {"token-mean": 1 / 9, "seq-mean-token-mean": 1 / 10, "seq-mean-token-sum": 1 / 2}[mode]
    np.testing.assert_allclose(batch.weight[used & (batch.advantage > 0)], expected)
