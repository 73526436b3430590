"""Importance weights, rejection and mismatch metrics.

GOLDEN numbers were printed once by verl's ``rollout_corr_helper`` (commit b178a3c, float64), those
of ``test_icepop_diagnostics…`` are what verl's own test of it (commit 1dda039) expects.
"""

import numpy as np
import pytest

from jax_agent_rl.config.algorithm import RolloutCorrectionConfig
from jax_agent_rl.learner.correction import behaviour_weights, correct, mismatch, reject, truncate

OLD = [
    np.array(x)
    for x in ([-0.5, -1.2, -0.1, -2.0], [-0.9, -0.3, -1.5, -0.7], [-0.2, -2.5, -0.6, -0.05])
]
ROLLOUT = [
    np.array(x)
    for x in ([-0.9, -1.0, -0.4, -1.1], [-0.6, -0.9, -1.4, -0.2], [-0.25, -2.4, -1.9, -0.5])
]
ACTIVE = [np.array(m, bool) for m in ([1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1])]
DELTAS = [o - r for o, r in zip(OLD, ROLLOUT, strict=True)]

WEIGHTS = {
    ("token", False): [
        [1.3, 0.8187307530779819, 0, 0.40656965974059917],
        [0.7408182206817179, 1.3, 0.9048374180359595, 0],
        [1.0512710963760241, 0.9048374180359595, 1.3, 1.3]],
    ("token", True): [
        [1.2964911031038733, 0.8165208747716444, 0, 0.40547226665050445],
        [0.7388186401008378, 1.2964911031038733, 0.902395124799309, 0],
        [1.0484335564628997, 0.902395124799309, 1.2964911031038733, 1.2964911031038733]],
    ("sequence", False): [[0.4965853037914096] * 4, [1.2214027581601699] * 4, [1.3] * 4],
    ("sequence", True): [
        [0.49362551500978413] * 4, [1.2141228524645165] * 4, [1.2922516325256994] * 4],
}  # fmt: skip


@pytest.mark.parametrize(("level", "normalized"), WEIGHTS)
def test_importance_weights_match_a_peer(level: str, normalized: bool):
    config = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_threshold=1.3, rollout_is_batch_normalize=normalized
    )
    correction = correct(config, OLD, ROLLOUT, ACTIVE)
    for got, expected, mask in zip(
        correction.importance, WEIGHTS[level, normalized], ACTIVE, strict=True
    ):
        np.testing.assert_allclose(got[mask], np.array(expected)[mask], atol=1e-9)
    assert correction.metrics["rollout_is_clipped_fraction"] == pytest.approx(0.4)


REJECTED = {
    ("token_k1", (0.6, 1.5)): [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
    ("token_k2", 0.1): [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]],
    ("token_k3", 0.1): [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]],
    ("seq_sum_k1", (0.5, 2.0)): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_mean_k1", 1.2): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_sum_k2", 0.3): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_sum_k3", 0.5): [[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_mean_k2", 0.1): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_mean_k3", 0.1): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_max_k2", 0.3): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
    ("seq_max_k3", 0.3): [[0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
}


@pytest.mark.parametrize(("rule", "bound"), REJECTED)
def test_rejection_matches_a_peer(rule: str, bound):
    masks = reject([rule], [bound], DELTAS, ACTIVE)
    assert [k.astype(int).tolist() for k in masks] == REJECTED[rule, bound]


def test_what_fails_one_of_several_rules_is_rejected():
    by_both_rules = reject(["token_k1", "seq_sum_k3"], [(0.6, 1.5), 0.5], DELTAS, ACTIVE)
    each = [
        reject([rule], [bound], DELTAS, ACTIVE)
        for rule, bound in (("token_k1", (0.6, 1.5)), ("seq_sum_k3", 0.5))
    ]
    for k, a, b in zip(by_both_rules, *each, strict=True):
        np.testing.assert_array_equal(k, a & b)


def test_icepop_gives_weights_outside_the_interval_zero():
    got = truncate([np.array([0.4, 0.5, 1.0, 5.0, 5.1])], (0.5, 5.0))
    assert got[0].tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]


def test_icepop_diagnostics_are_of_the_weights_as_applied():
    """verl's ``test_exact_icepop_zeroes_weights_without_changing_mask``."""
    raw = np.array([0.4, 0.8, 6.0])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=(0.5, 5.0))
    correction = correct(config, [np.zeros(3)], [-np.log(raw)], [np.ones(3, bool)])
    np.testing.assert_allclose(correction.importance[0], [0.0, 0.8, 0.0], atol=1e-12)
    assert correction.metrics["rollout_is_clipped_fraction"] == pytest.approx(2 / 3)
    assert correction.metrics["rollout_is_std"] == pytest.approx(0.3771236, abs=1e-6)
    assert correction.metrics["rollout_is_eff_sample_size"] == pytest.approx(1 / 3)
    assert correction.metrics["rollout_is_min"] == pytest.approx(0.4)
    assert correction.metrics["rollout_is_max"] == pytest.approx(6)


def test_weights_that_are_all_zero_have_no_effective_samples():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=(2.0, 3.0))
    correction = correct(config, OLD, OLD, ACTIVE)
    assert correction.metrics["rollout_is_eff_sample_size"] == 0.0


@pytest.mark.parametrize("normalized", [False, True])
def test_rejected_tokens_count_in_the_weight_of_their_trajectory(normalized: bool):
    """verl also makes the weights from the response mask before rejection changes it."""
    settings = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 50.0,
        "rollout_is_batch_normalize": normalized,
    }
    plain = correct(RolloutCorrectionConfig(**settings), OLD, ROLLOUT, ACTIVE)
    rules = {"rollout_rs": ("token_k1",), "rollout_rs_threshold": ((0.6, 1.5),)}
    rejected = correct(RolloutCorrectionConfig(**settings, **rules), OLD, ROLLOUT, ACTIVE)
    assert [k.astype(int).tolist() for k in rejected.accepted] == REJECTED["token_k1", (0.6, 1.5)]
    for got, expected in zip(rejected.importance, plain.importance, strict=True):
        np.testing.assert_array_equal(got, expected)
    if not normalized:
        sums = [delta[mask].sum() for delta, mask in zip(DELTAS, ACTIVE, strict=True)]
        np.testing.assert_allclose([w[0] for w in rejected.importance], np.exp(sums))


def test_mismatch_metrics_match_a_peer_and_the_reverse_direction_its_formula():
    got = mismatch(OLD, ROLLOUT, ACTIVE)
    assert got["rollout_kl"] == pytest.approx(-0.12, abs=1e-12)
    assert got["rollout_k3_kl"] == pytest.approx(0.21786169170894346, abs=1e-12)
    assert got["rollout_ppl_ratio"] == pytest.approx(0.9506930378184223, abs=1e-12)
    delta = np.concatenate([d[m] for d, m in zip(DELTAS, ACTIVE, strict=True)])
    assert got["rollout_reverse_kl"] == pytest.approx((np.exp(delta) * delta).mean())
    assert got["rollout_max_logprob_difference"] == pytest.approx(1.3)


def test_equal_policies_need_no_correction():
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs=("seq_max_k3",), rollout_rs_threshold=(0.01,)
    )
    correction = correct(config, OLD, OLD, ACTIVE)
    assert all((w == 1).all() for w in correction.importance)
    assert [k.tolist() for k in correction.accepted] == [m.tolist() for m in ACTIVE]
    assert correction.metrics["rollout_is_eff_sample_size"] == 1.0
    assert correction.metrics["rollout_rs_rejected_fraction"] == 0.0


def test_a_step_of_which_everything_is_rejected_has_metrics_all_the_same():
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs=("token_k2",), rollout_rs_threshold=(1e-9,)
    )
    correction = correct(config, OLD, ROLLOUT, ACTIVE)
    assert not any(k.any() for k in correction.accepted)
    assert correction.metrics["rollout_rs_rejected_fraction"] == 1.0


def test_the_weights_of_decoupled_ppo_are_counted_as_it_takes_them():
    """Ratios 1, 2 and 4 under a cap of 3, and one that a filter masks."""
    old = [np.log([1.0, 2.0, 4.0, 9.0])]
    rollout = [np.zeros(4)]
    got = behaviour_weights(3.0, old, rollout, [np.array([True, True, True, False])])
    assert got["rollout_is_mean"] == pytest.approx(3 / 3)
    assert got["rollout_is_max"] == pytest.approx(4)
    assert got["rollout_is_clipped_fraction"] == pytest.approx(1 / 3)
