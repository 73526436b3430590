"""Every algorithm in the learner: gradients that do not depend on the layout, a critic that learns,
steps that change nothing when they should not.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, CriticConfig, LearnerConfig
from jax_agent_rl.learner.critic import Critic, critic_params, state_values
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.optimized_params import LearnerState
from tests.tiny import TINY, logprobs_of, tiny_params
from tests.trajectories import group_of, random_groups, trajectories_of, trajectory

PPO = {"adv_estimator": "gae"}


def make_learner(algorithm: dict | None = None, critic: dict | None = None, **changes) -> Learner:
    config = LearnerConfig(**{"learning_rate": 1e-2, "pack_length": 64, "remat": "none"} | changes)
    algorithm_config = AlgorithmConfig(**(algorithm or {}))
    return Learner(
        TINY,
        tiny_params(),
        algorithm=algorithm_config,
        config=config,
        critic=CriticConfig(**(critic or {})),
        temperature=1.0,
    )


def noise(values: list[np.ndarray]) -> list[np.ndarray]:
    """Old log-probs away from the current ones, the same in every layout."""
    rng = np.random.default_rng(0)
    return [x + rng.normal(0, 0.4, len(x)) for x in values]


def gradients(learner: Learner, groups) -> list[np.ndarray]:
    """Gradients of the policy and the critic, if any; off-policy enough for clipping to matter."""
    (mini,), experience = learner.prepare(groups, masked={groups[0].trajectories[0].trajectory_id})
    (update,) = experience.updates
    update.policy["old_logprob"] = noise(update.policy["old_logprob"])
    leaves = []
    for model, batch in reversed(learner.batches(mini, update)):  # the policy first
        gradient, _ = learner.gradients(model, batch, iter)
        leaves += jax.tree.leaves(gradient)
    return [np.asarray(leaf) for leaf in leaves]


OFF_POLICY = {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 50.0}}


@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "policy_loss": {"loss_mode": "gspo"},
            "entropy_coeff": 0.05,
            "kl": {"where": "loss", "coef": 0.1},
        },
        {"policy_loss": {"loss_mode": "geo_mean"}, "loss_agg_mode": "seq-mean-token-mean"},
        {
            "policy_loss": {
                "loss_mode": "clip_cov",
                "clip_cov_lb": -9,
                "clip_cov_ub": 9,
                "clip_cov_ratio": 0.2,
            }
        },
        {**PPO, "lam": 0.9, "loss_agg_mode": "seq-mean-token-sum"},
    ],
    ids=["gspo+entropy+kl", "geo_mean", "clip_cov", "ppo"],
)
def test_gradients_do_not_depend_on_packing_sharing_or_splitting(algorithm: dict):
    groups = random_groups(0)
    algorithm = algorithm | OFF_POLICY
    alone = make_learner(algorithm, share_prefixes=False, pack_length=32)
    packed = make_learner(algorithm, share_prefixes=True, pack_length=80, micro_batch_size=2)
    for a, b in zip(gradients(packed, groups), gradients(alone, groups), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5 * max(np.abs(b).max(), 1e-6))


def test_values_are_those_of_plain_full_passes():
    learner = make_learner(PPO)
    rng = np.random.default_rng(0)
    head = {"value_head": jnp.asarray(rng.standard_normal(TINY.hidden_size), jnp.float32)}
    assert learner.critic is not None
    learner.critic.state = replace(learner.critic.state, params=learner.critic.state.params | head)
    groups = random_groups(3)
    (mini,) = learner.packer.mini_batches(groups)
    got = learner.scorer.values(learner.critic.weights, mini.batch)
    for t, values in zip(trajectories_of(groups), got, strict=True):
        ids = jnp.asarray([t.prompt_ids + t.response_ids])
        count = ids.shape[1]
        plain = {
            "token_ids": ids,
            "positions": jnp.arange(count)[None],
            "subtree_end": jnp.full((1, count), count),
        }
        expected = state_values(
            Critic.from_params(TINY, critic_params(tiny_params()) | head), plain, remat="none"
        )[0]
        np.testing.assert_allclose(values, expected[len(t.prompt_ids) - 1 :], atol=1e-4)


def test_the_critic_learns_what_the_rewards_are_and_the_policy_waits_for_it():
    learner = make_learner(PPO, critic={"learning_rate": 1e-2, "critic_warmup": 100}, ppo_epochs=2)
    groups = [
        group_of(trajectory([3, 4], [5 + i, 9], reward=float(i % 2), index=i) for i in range(4))
    ]
    initial_params = jax.tree.map(np.asarray, learner.params)
    for _ in range(15):
        last = learner.update(groups).metrics
    # The first token of each is sampled before anything tells the rewards apart: half the terms
    # keep variance 1/4.
    assert last["critic_loss"] == pytest.approx(0.5 * 0.25 / 2, rel=0.1)
    assert last["critic_explained_variance"] == pytest.approx(0.5, abs=0.05)
    assert "loss" not in last
    jax.tree.map(
        np.testing.assert_array_equal, initial_params, jax.tree.map(np.asarray, learner.params)
    )


def test_after_its_warm_up_ppo_raises_what_was_rewarded():
    learner = make_learner(
        {**PPO, "clip_ratio_high": 0.2},
        critic={"critic_warmup": 1},
        ppo_epochs=2,
        learning_rate=3e-3,
    )
    groups = random_groups(3)
    good = [t for t in trajectories_of(groups) if t.reward]
    bad = [t for t in trajectories_of(groups) if not t.reward]

    def mean(ts) -> float:
        each = [
            logprobs_of(learner.params, t.prompt_ids, t.response_ids)[
                np.array(t.response_mask) == 1
            ]
            for t in ts
        ]
        return float(np.mean([x.mean() for x in each]))

    initial_gap = mean(good) - mean(bad)
    assert int(learner.state.policy.updates) == 0
    for _ in range(4):
        learner.update(groups)
    assert int(learner.state.policy.updates) == 3 * 2
    assert int(learner.state.critic.updates) == 4 * 2
    assert mean(good) - mean(bad) > initial_gap + 0.05


def test_kl_in_the_reward_is_taken_off_token_by_token():
    learner = make_learner(
        {
            "adv_estimator": "reinforce_plus_plus",
            "kl": {"where": "reward", "estimator": "k1", "coef": 0.5},
        }
    )
    groups = random_groups(4)
    learner.policy.state = replace(learner.policy.state, params=tiny_params(seed=1))
    _, experience = learner.prepare(groups)
    ts = trajectories_of(groups)
    returns = []
    for t in ts:
        at = np.array(t.response_mask) == 1
        new = logprobs_of(tiny_params(seed=1), t.prompt_ids, t.response_ids)[at]
        ref = logprobs_of(tiny_params(seed=0), t.prompt_ids, t.response_ids)[at]
        rewards = -0.5 * (new - ref)
        rewards[-1] += t.reward
        returns.append(rewards[::-1].cumsum()[::-1])
    flat = np.concatenate(returns)
    expected = (flat - flat.mean()) / flat.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(experience.advantages), expected, atol=1e-3)


def test_the_adaptive_kl_coefficient_falls_and_survives_a_checkpoint():
    kl = {"where": "loss", "controller": "adaptive", "horizon": 100, "target": 0.1, "coef": 0.5}
    learner = make_learner({"kl": kl})
    result = learner.update(random_groups(0))
    assert result.metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 12 / 100))
    restored = make_learner({"kl": kl})
    restored.state = learner.state
    assert restored.state.kl_coef == learner.state.kl_coef
    assert int(restored.state.steps) == 1


def test_the_entropy_bonus_raises_the_entropy():
    def after(coefficient: float) -> float:
        learner = make_learner({"entropy_coeff": coefficient}, learning_rate=3e-3)
        for _ in range(3):
            learner.update(random_groups(5))
        return learner.update(random_groups(5)).metrics["entropy"]

    assert after(0.5) > after(0.0) + 0.05


def test_a_masked_trajectory_counts_in_the_baseline_and_has_no_gradient():
    groups = random_groups(6, groups=1)
    learner = make_learner()
    _, plain = learner.prepare(groups)
    _, masked = learner.prepare(groups, masked={groups[0].trajectories[1].trajectory_id})
    np.testing.assert_array_equal(plain.advantages[1], masked.advantages[1])
    assert [mask.any() for mask in masked.active] == [True, False, True, True]


def same(old: LearnerState, new: LearnerState) -> None:
    jax.tree.map(np.testing.assert_array_equal, (old.policy, old.critic), (new.policy, new.critic))


def snapshot(learner: Learner) -> LearnerState:
    return jax.tree.map(lambda x: np.array(x), learner.state)


def test_a_step_of_which_every_token_is_rejected_changes_nothing_to_the_bit():
    rule = {"rollout_rs": ("token_k2",), "rollout_rs_threshold": (1e-9,)}
    learner = make_learner({**PPO, "rollout_correction": rule})
    groups = random_groups(7)
    initial = snapshot(learner)
    result = learner.update(groups)
    same(initial, snapshot(learner))
    assert result.rejected == {t.trajectory_id for t in trajectories_of(groups)}
    assert not result.skipped
    assert result.metrics["rollout_rs_rejected_fraction"] == 1.0


def test_nan_rewards_leave_policy_critic_and_controller_unchanged_to_the_bit():
    kl = {"where": "loss", "controller": "adaptive", "coef": 0.5}
    learner = make_learner({**PPO, "kl": kl})
    groups = random_groups(8, groups=1)
    bad = [
        group_of(
            [
                *groups[0].trajectories[:-1],
                trajectory([3], [4], reward=float("nan"), index=9, group="g0"),
            ]
        )
    ]
    initial = snapshot(learner)
    assert learner.update(bad).skipped
    same(initial, snapshot(learner))
    assert learner.state.kl_coef == initial.kl_coef


def test_decoupled_ppo_reads_all_three_policies():
    groups = random_groups(9)
    learner = make_learner({"policy_loss": {"loss_mode": "decoupled"}})
    _, experience = learner.prepare(groups)
    (update,) = experience.updates
    assert "old_logprob" in update.policy, "the learner's own, besides the rollout's"
    metrics = learner.update(groups).metrics
    assert metrics["rollout_max_logprob_difference"] > 0.1
    assert np.isfinite(metrics["loss"])
    assert 0 < metrics["rollout_is_min"] < metrics["rollout_is_max"], (
        "its own weights are in the record"
    )


def test_bypass_takes_rollout_logprobs_and_scores_nothing():
    learner = make_learner({"rollout_correction": {"bypass_mode": True}})
    compiled_before = learner.programs_compiled
    _, experience = learner.prepare(random_groups(9))
    (update,) = experience.updates
    for old, rollout in zip(
        update.policy["old_logprob"], update.policy["rollout_logprob"], strict=True
    ):
        np.testing.assert_array_equal(old, rollout)
    assert learner.programs_compiled == compiled_before
