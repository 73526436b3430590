"""Advantages and losses against the formulas, computed by hand or in float64 numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.learner.advantages import advantages
from jax_agent_rl.learner.losses import ClipConfig, ppo_clip, term_weights

CLIP = ClipConfig(low=0.2, high=0.28, dual=3.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # rewards 1 0 0 1: mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.57735
        ("grpo", [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5]),
        # leave-one-out: 1 - 1/3 and 0 - 2/3
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    ],
)
def test_group_advantages_by_hand(estimator: str, expected: list[float]):
    np.testing.assert_allclose(advantages(estimator, np.array([1.0, 0.0, 0.0, 1.0])), expected, atol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_of_one_keeps_its_reward(estimator: str):
    np.testing.assert_allclose(advantages(estimator, np.array([0.7])), [0.7], atol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -1.28 * 2, 1),  # clip-higher
        (0.5, 2.0, -1.0, 0),  # the pessimistic side is not clipped
        (0.5, -2.0, 1.6, 1),  # max(1.0, 0.8 * 2)
        (1.5, -2.0, 3.0, 0),
        (10.0, -2.0, 6.0, 1),  # dual clip: at most 3 * |A|
    ],
)
def test_the_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: int):
    logp = jnp.array([np.log(ratio)])
    got, got_ratio, got_clipped = ppo_clip(logp, jnp.zeros(1), jnp.array([advantage]), CLIP)
    np.testing.assert_allclose(got, [loss], rtol=1e-5)
    np.testing.assert_allclose(got_ratio, [ratio], rtol=1e-5)
    assert int(got_clipped[0]) == clipped


def test_extreme_ratios_stay_finite():
    got, _, _ = ppo_clip(jnp.array([500.0, -500.0]), jnp.zeros(2), jnp.array([-1.0, 1.0]), CLIP)
    assert np.isfinite(np.asarray(got)).all()


def test_term_weights_make_the_loss_the_named_mean():
    lengths = [1, 3]
    per_token = [np.array([4.0]), np.array([1.0, 2.0, 3.0])]

    def total(mode: str) -> float:
        return float(sum(w * x.sum() for w, x in zip(term_weights(mode, lengths), per_token, strict=True)))

    assert total("token-mean") == pytest.approx(10 / 4)
    assert total("seq-mean-token-mean") == pytest.approx((4 + 2) / 2)
    assert total("seq-mean-token-sum") == pytest.approx((4 + 6) / 2)
