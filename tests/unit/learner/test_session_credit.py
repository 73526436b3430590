"""Credit of sessions of several contexts, for every estimator and aggregation, against float64
numpy by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig
from jax_agent_rl.config.algorithm import ADV_ESTIMATORS, LossAggMode
from jax_agent_rl.learner.advantages import ScoredBatch
from jax_agent_rl.learner.advantages.registry import compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from jax_agent_rl.learner.experience import Scores, build_experience
from jax_agent_rl.learner.packing import trained_lengths
from jax_agent_rl.types import Group, Trajectory
from tests.trajectories import call, numbered, trajectory


def with_parts(original: Trajectory, reward: float) -> Trajectory:
    return replace(original, reward=reward, reward_parts={"style": reward / 2 + 0.1})


CALLS = [[call(reward=0.5)], [call(error="timeout")]]
TURNS = trajectory(
    [1, 2], [10, 11, 7, 12, 8, 13, 9, 14, 15], mask=[1, 1, 0, 1, 0, 1, 0, 1, 1], calls=CALLS
)
WHOLE = with_parts(TURNS, 1.0)
BEGINNING = trajectory([1, 2], [10, 11, 7, 12], mask=[1, 1, 0, 1], calls=CALLS, index=9)
END = trajectory([1, 3, 3], [13, 9, 14, 15], mask=[1, 0, 1, 1])
SPLIT = with_parts(replace(numbered(END, 2, 3), segments=(numbered(BEGINNING, 0, 1),)), 1.0)
"""The turns of WHOLE; its history was compacted after two of them, and what the second was answered
with left out."""

OTHER = with_parts(
    trajectory([1, 2], [20, 7, 21], mask=[1, 0, 1], calls=[[call(reward=0.25)]], index=1), 0.0
)
THIRD = with_parts(trajectory([1, 2], [30], index=2), 0.25)


def of(first: Trajectory) -> Group:
    return Group(group_id="g", trajectories=(first, OTHER, THIRD), greedy_reward=0.5)


def valued(samples: ScoredBatch) -> ScoredBatch:
    """Add values of the states before sampled ids; those before inserted ones mean nothing."""
    values = []
    for t, mask in zip(samples.trajectories, samples.masks, strict=True):
        ids = np.concatenate([s.response_ids for s in t.sequences])
        values.append(np.append(np.where(mask, np.cos(ids), 99.0), 0.5))
    return replace(samples, values=values)


def estimate(groups: Sequence[Group], config: AlgorithmConfig) -> list[np.ndarray]:
    """The advantages of every trajectory's sampled ids, and returns, in the order in which they
    stand.
    """
    samples = valued(scored_batch(groups, turn_reward=config.turn_reward))
    estimates = compute_advantages(samples, config)
    kinds = [estimates.advantages, *([estimates.returns] if estimates.returns else [])]
    masked = []
    for kind in kinds:
        for values, mask in zip(kind, samples.masks, strict=True):
            masked.append(values[mask])
    return masked


def settings(estimator: str) -> AlgorithmConfig:
    estimator_keys = {
        "gae": {"gamma": 0.9, "lam": 0.8, "turn_reward": "tool_reward"},
        "reinforce_plus_plus": {"gamma": 0.9, "turn_reward": "tool_reward"},
        "gdpo": {"gdpo": {"reward_keys": ("score", "style")}},
        "igpo": {"igpo": {"gamma": 0.9}, "turn_reward": "progress"},
    }.get(estimator, {"turn_reward": "tool_reward"})
    return AlgorithmConfig.model_validate({"adv_estimator": estimator, **estimator_keys})


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_a_session_is_credited_the_same_in_one_context_or_in_two(estimator: str):
    config = settings(estimator)
    for in_one, two in zip(
        estimate([of(WHOLE)], config), estimate([of(SPLIT)], config), strict=True
    ):
        np.testing.assert_allclose(two, in_one, atol=1e-12)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
@pytest.mark.parametrize("weight", ["session", "segment"])
def test_what_a_token_weighs(mode: str, weight: str):
    # sequences: [10 11 12] [13 14 15] of one session, [20 21], [30]; SPLIT has 6 of the 9 tokens
    config = AlgorithmConfig(
        loss_agg_mode=mode,  # type: ignore[arg-type]
        segment_weight=weight,  # type: ignore[arg-type]
        loss_scale_factor=10,
    )
    experience = build_experience([of(SPLIT)], config, Scores(), kl_coef=0.0, masked=())
    columns = experience.updates[0].policy
    count = {"session": 3, "segment": 4}[weight]
    expected = {
        "token-mean": [1 / 9] * 9,
        "token-sum": [1.0] * 9,
        "seq-mean-token-sum": [1 / count] * 9,
        "seq-mean-token-sum-norm": [1 / (count * 10)] * 9,
        "seq-mean-token-mean": (
            [1 / 18] * 6 + [1 / 6] * 2 + [1 / 3]
            if weight == "session"
            else [1 / 12] * 6 + [1 / 8] * 2 + [1 / 4]
        ),
    }[mode]
    np.testing.assert_allclose(np.concatenate(columns["weight"]), expected, rtol=1e-14)
    lengths = {"session": [[6, 2, 1]], "segment": [[3, 3, 2, 1]]}[weight]
    assert trained_lengths([of(SPLIT)], 1, masked=(), segment_weight=weight) == lengths


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_a_session_weighs_the_same_in_one_context_or_in_two(mode: str):
    config = AlgorithmConfig(loss_agg_mode=mode, loss_scale_factor=10)  # type: ignore[arg-type]
    in_one, in_two = (
        build_experience([of(t)], config, Scores(), kl_coef=0.0, masked=())
        .updates[0]
        .policy["weight"]
        for t in (WHOLE, SPLIT)
    )
    for a, b in zip(in_one, in_two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_baselines_compare_sessions_and_not_segments():
    # rewards 1, 0, 0.25: the mean is 5/12, not 9/16, that of four segments
    first, second, third = estimate([of(SPLIT)], AlgorithmConfig(adv_estimator="dr_grpo"))
    np.testing.assert_allclose(first, 1 - 5 / 12)
    np.testing.assert_allclose((*second, *third), (-5 / 12, -5 / 12, 0.25 - 5 / 12))


# a, then a sub-agent says c and d, then b with their answer; another context goes on after a with
# e, between c and d
SUB = numbered(trajectory([1, 5], [40, 7, 41], mask=[1, 0, 1], index=8), 1, 3)
AGAIN = numbered(trajectory([1, 2, 10, 11, 6], [50], index=7), 2)
CALLER = numbered(trajectory([1, 2], [10, 11, 7, 12], mask=[1, 1, 0, 1], reward=1.0), 0, 4)
SESSION = replace(CALLER, segments=(SUB, AGAIN))
IN_TIME = [10, 11, 40, 50, 41, 12]
LAID_OUT = [40, 41, 50, 10, 11, 12]


def in_layout(by_time: Sequence[float]) -> np.ndarray:
    return np.array([by_time[IN_TIME.index(i)] for i in LAID_OUT])


def test_discounts_and_critic_values_follow_the_order_of_sampling():
    gamma = 0.9
    lam = 0.8
    config = AlgorithmConfig(adv_estimator="gae", gamma=gamma, lam=lam)
    samples = valued(
        scored_batch([Group(group_id="g", trajectories=(SESSION,))], turn_reward="none")
    )
    (returns,) = compute_advantages(samples, config).returns or []
    values = np.append(np.cos(IN_TIME), 0.0)
    rewards = np.array([0, 0, 0, 0, 0, 1.0])
    deltas = rewards + gamma * values[1:] - values[:-1]
    by_time = []
    for t in range(6):
        discounts = (gamma * lam) ** np.arange(6 - t)
        by_time.append(discounts @ np.asarray(deltas[t:6]) + values[t])
    np.testing.assert_allclose(returns[samples.masks[0]], in_layout(by_time), atol=1e-12)

    config = AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=gamma)
    (advantage,) = estimate([Group(group_id="g", trajectories=(SESSION,))], config)
    discounted = gamma ** np.arange(5, -1, -1.0)
    whitened = (discounted - discounted.mean()) / discounted.std(ddof=1)
    np.testing.assert_allclose(advantage, in_layout(whitened.tolist()), atol=1e-6)


def test_gigpo_discounts_in_time_and_anchors_segments_at_what_they_follow():
    # Steps by time: a c e d b; returns 0.5 ** (4, 3, 2, 1, 0). In the other, f saw [6], as e did.
    sibling = trajectory([1, 2], [60, 6, 61], mask=[1, 0, 1], index=1)
    config = AlgorithmConfig.model_validate({"adv_estimator": "gigpo", "gigpo": {"gamma": 0.5}})
    mine, siblings = estimate([Group(group_id="g", trajectories=(SESSION, sibling))], config)
    # Anchors: the prompt [1 2] (a: 1/16, 60: 0), [6] (e: 1/4, 61: 0), [7] (d: 1/2, b: 1), and
    # [1 5] (c alone).
    step = {10: 1 / 32, 11: 1 / 32, 40: 0, 50: 1 / 8, 41: -1 / 4, 12: 1 / 4}
    np.testing.assert_allclose(mine, [0.5 + step[i] for i in LAID_OUT], atol=1e-12)
    np.testing.assert_allclose(siblings, [-0.5 - 1 / 32, -0.5 - 1 / 8], atol=1e-12)


def test_treerl_credits_the_gain_over_the_prompt_to_the_first_turn_alone():
    sibling = trajectory([1, 2], [60], index=1)
    config = AlgorithmConfig(adv_estimator="treerl")
    mine, siblings = estimate([Group(group_id="g", trajectories=(SESSION, sibling))], config)
    # Two leaves: 1 and -1 (reward minus the other's). V is a leaf's own on its turns, and 0 at the
    # prompt.
    assert dict(zip(LAID_OUT, mine.tolist(), strict=True)) == {
        10: 2,
        11: 2,
        40: 1,
        50: 1,
        41: 1,
        12: 1,
    }
    assert siblings.tolist() == [-2]
