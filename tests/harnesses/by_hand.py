"""The gradient of sessions by hand: in float64, one full pass of transformers for each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.types import Group, Trajectory
from tests.gradients import policy_gradient
from tests.harnesses.running import codec
from tests.tiny import TINY, tiny_params
from tests.unit.learner.test_session_gradient import Calls, by_hand, gradient_of

_PACK_LENGTH = 8192


def assert_gradient_of_single_calls(
    folder: Path, trajectories: Sequence[Trajectory], calls: Sequence[Calls]
) -> None:
    """Check that a step on two sessions has the gradient of their single calls.

    The model is a tiny one with the vocabulary of the sessions. The first session counts as having
    earned 0, the second as having earned 1.

    Args:
        folder: empty; the model is written there for transformers.
        calls: of each session, what the policy was asked and what it answered, in ids.
    """
    rewarded = []
    for reward, trajectory in enumerate(trajectories):
        name = f"t-{reward}"
        rewarded.append(replace(trajectory, trajectory_id=name, group_id="g", reward=float(reward)))
    assert len(rewarded) == 2

    config = replace(TINY, vocab_size=codec().vocab_size, eos_token_ids=codec().eos_token_ids)
    params = tiny_params(5, config)
    save_hf(folder, config, params)
    peer = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    sums = [by_hand(peer, of_session) for of_session in calls]
    lengths = []
    for of_session in calls:
        lengths.append(sum(len(sampled) for _, sampled in of_session))

    learner = Learner(
        config,
        params,
        algorithm=AlgorithmConfig(adv_estimator="rloo", loss_agg_mode="seq-mean-token-mean"),
        config=LearnerConfig(pack_length=_PACK_LENGTH, remat="none"),
        temperature=1.0,
    )
    group = Group(group_id="g", trajectories=tuple(rewarded))
    gradients, _ = policy_gradient(learner, [group])
    for name, got in gradient_of(jax.device_get(gradients)).items():
        # of two sessions with rewards 0 and 1: advantages -1 and 1, however many calls they made
        expected = sums[0][name] / (2 * lengths[0]) - sums[1][name] / (2 * lengths[1])
        atol = 1e-4 * np.abs(expected).max()  # float32, over thousands of ids
        np.testing.assert_allclose(got, expected, atol=atol, err_msg=name)
