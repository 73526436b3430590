"""Policy losses and their gradients.

GOLDEN numbers were printed once by verl's ``core_algos`` (commit b178a3c, torch float64, its
autograd) for the inputs written here; losses that version lacks are checked against their formula
in float64 numpy, gradients by differences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config.algorithm import LOSS_MODES, PolicyLossConfig
from jax_agent_rl.learner.losses.aggregation import term_weights
from jax_agent_rl.learner.losses.policy import (
    POLICY_LOSSES,
    LossConfig,
    Terms,
    choose_clip_cov,
    choose_kl_cov,
)

NEW = np.array([[-0.5, -1.2, -0.1, -2.0], [-0.9, -0.3, -1.5, -0.7], [-0.2, -2.5, -0.6, -0.05]])
OLD = np.array([[-0.9, -1.0, -0.4, -1.1], [-0.6, -0.9, -1.4, -0.2], [-0.25, -2.4, -1.9, -0.5]])
ROLLOUT = OLD + np.array([[0.1, -0.2, 0.3, 0.0], [0.0, -2.0, 0.2, 0.0], [-0.1, 0.1, 0.0, 0.4]])
ADVANTAGE = np.array([[1.0] * 4, [-0.5] * 4, [0.8, 0.8, -1.2, -1.2]])
MASK = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]], bool)

GOLDEN = {
    ("vanilla", "token-mean"): (
        0.31752655074532693,
        [[0.0, -0.0818730753077982, 0.0, -0.04065696597405992],
         [0.0, 0.09110594001952546, 0.04524187090179798, 0.0],
         [-0.08410168771008195, -0.07238699344287677, 0.0, 0.18819746225882025]],
    ),
    ("gspo", "seq-mean-token-mean"): (
        0.04944474605951652,
        [[-0.0879877292996833, -0.0879877292996833, 0.0, -0.0879877292996833],
         [0.05938550567689533, 0.05938550567689533, 0.05938550567689533, 0.0],
         [0.0, 0.0, 0.15295904158394022, 0.15295904158394022]],
    ),
    ("geo_mean", "seq-mean-token-mean"): (
        0.03255480312871606,
        [[0.0, -0.08453768088136013, 0.0, -0.08453768088136013],
         [0.0, 0.06139838390774729, 0.06139838390774729, 0.0],
         [0.02549317350650394, 0.02549317350650394, 0.02549317350650394, 0.02549317350650394]],
    ),
    ("cispo", "token-mean"): (
        0.2971327051658692,
        [[-0.128, -0.0818730753077982, 0.0, -0.08], [0.04, 0.064, 0.04524187090179798, 0.0],
         [-0.08410168771008193, -0.07238699344287677, 0.1536, 0.1536]],
    ),
    ("sapo", "seq-mean-token-mean"): (
        0.04592175797707454,
        [[-0.15612510767806434, -0.09022687082962932, 0.0, -0.04141955459338495],
         [0.040403855330770906, 0.08448772201900522, 0.05014348111911629, 0.0],
         [-0.07003870137238188, -0.06018613137117255, 0.07911904213972389, 0.1436585678893133]],
    ),
    ("kl_cov", "token-mean"): (
        0.4122005921295949,
        [[-0.07918246976412706, -0.0818730753077982, 0.0, -0.04065696597405992],
         [0.0370409110340859, 0.09110594001952546, -0.024758129098202013, 0.0],
         [-0.014101687710081953, -0.07238699344287677, 0.4403156001143092, 0.18819746225882025]],
    ),
    ("gpg", "token-mean"): (
        0.373,
        [[-0.1, -0.1, 0.0, -0.1], [0.05, 0.05, 0.05, 0.0], [-0.08, -0.08, 0.12, 0.12]],
    ),
}  # fmt: skip


def config(mode: str, **options) -> LossConfig:
    policy_loss = PolicyLossConfig(loss_mode=mode, **options)
    return LossConfig(low=0.2, high=0.28, dual=3.0, policy_loss=policy_loss)


def total(mode: str, agg: str, settings: LossConfig, chosen: np.ndarray):
    """The aggregated loss as a function of the new log-probs, all trajectories in one row as the
    learner packs them.
    """
    weights = jnp.asarray(np.concatenate(term_weights(agg, list(MASK)))[None], jnp.float32)
    flat = lambda x: jnp.asarray(x.reshape(1, -1), jnp.float32)  # noqa: E731

    def loss(new):
        loss_inputs = Terms(
            logprob=new,
            old_logprob=flat(OLD),
            rollout_logprob=flat(ROLLOUT),
            advantage=flat(ADVANTAGE),
            active=flat(MASK),
            sequence=jnp.repeat(jnp.arange(3), 4)[None],
            chosen=flat(chosen),
        )
        return jnp.sum(weights * POLICY_LOSSES[mode](loss_inputs, settings).loss)

    return loss, flat(NEW)


@pytest.mark.parametrize(("mode", "agg"), GOLDEN)
def test_loss_and_gradient_match_a_peer(mode: str, agg: str):
    settings = config(
        mode, **({"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7} if mode == "kl_cov" else {})
    )
    chosen = np.zeros(MASK.shape)
    if mode == "kl_cov":
        chosen[MASK] = choose_kl_cov(
            NEW[MASK], OLD[MASK], ADVANTAGE[MASK], settings, np.random.default_rng(0)
        )
    loss, new = total(mode, agg, settings, chosen)
    value, gradient = jax.value_and_grad(loss)(new)
    expected, expected_gradient = GOLDEN[mode, agg]
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    np.testing.assert_allclose(gradient.reshape(3, 4), expected_gradient, atol=1e-6)


def per_token(mode: str, settings: LossConfig, chosen: np.ndarray | None = None) -> np.ndarray:
    zeros = np.zeros(MASK.shape) if chosen is None else chosen
    arrays = {
        "logprob": NEW, "old_logprob": OLD, "rollout_logprob": ROLLOUT, "advantage": ADVANTAGE,
        "active": MASK, "chosen": zeros,
    }  # fmt: skip
    loss_inputs = Terms(
        sequence=jnp.repeat(jnp.arange(3)[:, None], 4, axis=1),
        **{k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()},
    )
    return np.asarray(POLICY_LOSSES[mode](loss_inputs, settings).loss, np.float64)


def surrogate(ratio: np.ndarray) -> np.ndarray:
    loss = np.maximum(-ADVANTAGE * ratio, -ADVANTAGE * np.clip(ratio, 0.8, 1.28))
    return np.where(ADVANTAGE < 0, np.minimum(loss, -3 * ADVANTAGE), loss)


def test_decoupled_is_the_surrogate_times_a_small_enough_behaviour_ratio():
    behaviour = np.exp(OLD - ROLLOUT)
    expected = surrogate(np.exp(NEW - OLD)) * behaviour * (behaviour <= 5.0)
    assert (behaviour > 5).any()
    np.testing.assert_allclose(per_token("decoupled", config("decoupled")), expected, rtol=1e-5)


def test_decoupled_is_vanilla_when_the_rollout_is_the_proximal_policy(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setitem(globals(), "ROLLOUT", OLD)
    np.testing.assert_array_equal(
        per_token("decoupled", config("decoupled")), per_token("vanilla", config("vanilla"))
    )


def test_dppo_masks_by_total_variation():
    new = np.exp(NEW)
    old = np.exp(OLD)
    inside = np.where(ADVANTAGE > 0, new - old <= 0.28, new - old >= -0.2)
    weight = np.minimum(new / old, 1.5) * inside
    assert 0 < inside.sum() < inside.size
    got = per_token("dppo_tv", config("dppo_tv", dppo_ratio_cap=1.5))
    np.testing.assert_allclose(got, -weight * ADVANTAGE * NEW, rtol=1e-5, atol=1e-7)


def test_dppo_masks_by_binary_kl_only_moves_away_from_the_old_policy():
    new = np.exp(NEW)
    old = np.exp(OLD)
    divergence = old * (OLD - NEW) + (1 - old) * np.log((1 - old) / (1 - new))
    policy_loss = PolicyLossConfig(loss_mode="dppo_kl")
    settings = LossConfig(low=0.05, high=0.1, dual=3.0, policy_loss=policy_loss)
    rises = (divergence <= 0.1) | (new <= old)
    falls = (divergence <= 0.05) | (new >= old)
    inside = np.where(ADVANTAGE > 0, rises, falls)
    assert 0 < inside.sum() < inside.size
    got = per_token("dppo_kl", settings)
    np.testing.assert_allclose(
        got, -np.minimum(new / old, 20) * inside * ADVANTAGE * NEW, rtol=1e-5, atol=1e-7
    )


def test_dppo_kl_is_defined_for_certain_tokens():
    zero = jnp.zeros((1, 1))
    loss_inputs = Terms(
        logprob=zero, old_logprob=zero, rollout_logprob=zero, advantage=zero + 1, active=zero + 1,
        sequence=jnp.zeros((1, 1), jnp.int32), chosen=zero,
    )  # fmt: skip
    assert float(POLICY_LOSSES["dppo_kl"](loss_inputs, config("dppo_kl")).clipped[0, 0]) == 0.0


def test_dro_is_a_policy_gradient_with_a_quadratic_penalty():
    expected = -(NEW * ADVANTAGE - 0.1 / 2 * (NEW - OLD) ** 2)
    np.testing.assert_allclose(per_token("dro", config("dro", dro_beta=0.1)), expected, rtol=1e-5)


def test_clip_cov_leaves_the_chosen_tokens_out():
    chosen = np.zeros(MASK.shape)
    chosen[1, 2] = 1
    ratio = np.exp(NEW - OLD)
    expected = np.maximum(-ADVANTAGE * ratio, -ADVANTAGE * np.clip(ratio, 0.8, 1.28)) * (1 - chosen)
    np.testing.assert_allclose(
        per_token("clip_cov", config("clip_cov"), chosen), expected, rtol=1e-5, atol=1e-7
    )


def test_clip_cov_chooses_within_the_bounds_and_never_what_is_clipped_anyway():
    rng = np.random.default_rng(1)
    new = rng.normal(-1, 1, 1000)
    advantage = rng.normal(0, 2, 1000)
    old = new - rng.normal(0, 0.3, 1000)
    settings = config("clip_cov", clip_cov_ratio=0.05, clip_cov_lb=0.5, clip_cov_ub=3.0)
    chosen = choose_clip_cov(new, old, advantage, settings, np.random.default_rng(0))
    covariance = (advantage - advantage.mean()) * (new - new.mean())
    clipped = -advantage * np.clip(np.exp(new - old), 0.8, 1.28) > -advantage * np.exp(new - old)
    assert chosen.sum() == 50
    assert (covariance[chosen] > 0.5).all()
    assert (covariance[chosen] < 3).all()
    assert not clipped[chosen].any()


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_every_loss_stays_finite_for_extreme_ratios(mode: str):
    far = jnp.array([[-80.0, -1e-4, -40.0, 0.0]])
    loss_inputs = Terms(
        logprob=far,
        old_logprob=far[:, ::-1],
        rollout_logprob=jnp.zeros((1, 4)) - 60,
        advantage=jnp.array([[-2.0, 2.0, 0.0, -1.0]]),
        active=jnp.ones((1, 4)),
        sequence=jnp.array([[0, 0, 1, 1]]),
        chosen=jnp.ones((1, 4)),
    )

    def loss(new):
        return jnp.sum(
            POLICY_LOSSES[mode](Terms(**{**vars(loss_inputs), "logprob": new}), config(mode)).loss
        )

    value, gradient = jax.value_and_grad(loss)(far)
    assert np.isfinite(value)
    assert np.isfinite(np.asarray(gradient)).all()


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_before_the_first_update_every_loss_is_the_plain_policy_gradient(mode: str):
    """At ratio 1 and without chosen tokens each gradient is ``-A`` per token.

    With sequence means it is divided by the sequence's tokens.
    """
    arrays = {
        "old_logprob": OLD,
        "rollout_logprob": OLD,
        "active": MASK,
        "chosen": np.zeros(MASK.shape),
    }
    advantage = np.where(ADVANTAGE[:, :1] > 0, 1.0, -0.5) * MASK

    def loss(new):
        loss_inputs = Terms(
            logprob=new,
            advantage=jnp.asarray(advantage, jnp.float32),
            sequence=jnp.repeat(jnp.arange(3)[:, None], 4, axis=1),
            **{k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()},
        )
        return jnp.sum(POLICY_LOSSES[mode](loss_inputs, config(mode)).loss * loss_inputs.active)

    gradient = jax.grad(loss)(jnp.asarray(OLD, jnp.float32))
    np.testing.assert_allclose(gradient, -advantage, atol=1e-5)


def test_every_name_in_the_configuration_has_a_loss():
    assert set(LOSS_MODES) == set(POLICY_LOSSES)
