"""Advantages of whole trajectories and of whole steps.

GOLDEN numbers were printed once by verl's ``core_algos`` (commit b178a3c, float64) for the inputs
written here; the others are worked by hand.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.config.algorithm import ADV_ESTIMATORS, AlgorithmConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages import estimators
from jax_agent_rl.learner.advantages.registry import ESTIMATORS, compute_advantages
from jax_agent_rl.learner.advantages.scored_batch import scored_batch
from tests.trajectories import group_of, random_groups, trajectory

TOTALS = np.array([1.0, 0.0, 0.5, 2.0, 2.5, 0.7])
MEMBERS = [np.array([0, 1, 2]), np.array([3, 4]), np.array([5])]
MASKS = [
    np.array(m, bool) for m in ([1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1])
]
LENGTHS = np.array([mask.sum() for mask in MASKS])

GOLDEN = {
    "grpo": [
        0.999998000004,
        -0.999998000004,
        0.0,
        -0.7071047811922043,
        0.7071047811922043,
        0.6999993000007,
    ],
    "rloo": [0.75, -0.75, 0.0, -0.5, 0.5, 0.7],
    "opo": [0.4285714285714286, -0.5714285714285714, -0.0714285714285714, -0.2, 0.3, 0.7],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_outcome_estimators_match_a_peer(name: str):
    estimator = getattr(estimators, name)
    got = [
        estimator(TOTALS[g], LENGTHS[g]) if name == "opo" else estimator(TOTALS[g]) for g in MEMBERS
    ]
    got = np.concatenate(got)
    np.testing.assert_allclose(got, GOLDEN[name], atol=1e-12)


def test_pass_at_k_rewards_the_lead_of_the_best_alone():
    # three rewards 1, 0, .5: lead .5, unbiased deviation .5; two rewards 2, 2.5: lead .5, deviation
    # .5 / sqrt 2; both from the peer
    np.testing.assert_allclose(
        estimators.grpo_passk(TOTALS[:3]), [0.999998000004, 0, 0], atol=1e-12
    )
    np.testing.assert_allclose(
        estimators.grpo_passk(TOTALS[3:5]), [0, 1.4142095623844086], atol=1e-12
    )
    assert estimators.grpo_passk(TOTALS[5:]).tolist() == [0.0]


def test_dr_grpo_is_the_plain_difference_from_the_mean():
    np.testing.assert_allclose(
        estimators.dr_grpo(np.array([1.0, 0.0, 0.0, 1.0])), [0.5, -0.5, -0.5, 0.5]
    )


def test_gpg_matches_a_peer():
    np.testing.assert_allclose(
        estimators.gpg(TOTALS, MEMBERS), [0.6, -0.6, 0.0, -0.3, 0.3, 0.84], atol=1e-12
    )


def test_remax_matches_a_peer():
    rewards = [np.array([0.0, 0.0, s]) for s in TOTALS]
    got = estimators.remax(rewards, MASKS, np.full(6, 0.5))
    expected = [
        [0.5, 0.5, 0.5],
        [-0.5, 0, -0.5],
        [0, 0, 0],
        [1.5, 1.5, 1.5],
        [2, 0, 2],
        [0.2, 0.2, 0.2],
    ]
    np.testing.assert_allclose(
        got, expected, atol=1e-12
    )  # the peer leaves numbers at mask 0, which nothing reads


def test_reinforce_plus_plus_baseline_matches_a_peer():
    golden = [0.7870198701788719, -1.5052710138372596, -0.35912557182919386, -0.9321982928332266,
              0.21394714917483898, 1.245478046982098]  # fmt: skip
    got = estimators.reinforce_plus_plus_baseline(TOTALS, MEMBERS, MASKS)
    np.testing.assert_allclose(got, [g * m for g, m in zip(golden, MASKS, strict=True)], atol=1e-12)


def test_reinforce_plus_plus_matches_a_peer_where_nothing_is_masked():
    rewards = [np.array([0.0, 0.0, s]) for s in TOTALS]
    masks = [np.ones(3, bool)] * 6
    got = estimators.reinforce_plus_plus(rewards, masks, 0.9)
    np.testing.assert_allclose(
        got[0], [-0.24424937443394684, -0.13363042375376968, -0.010720478553572822], atol=1e-12
    )
    np.testing.assert_allclose(
        got[4], [1.2491064597484451, 1.5256538364488883, 1.8329286994493805], atol=1e-12
    )


def test_a_discounted_return_crosses_tool_results_without_losing_anything():
    rewards = np.array([0, 0, 0, 0, 2.0])
    mask = np.array([1, 1, 0, 0, 1], bool)
    assert estimators.discounted_returns(rewards, mask, 0.5).tolist() == [0.5, 1, 0, 0, 2]


def test_a_reward_on_a_tool_result_belongs_to_the_token_before_it():
    got = estimators.discounted_returns(np.array([0.0, 3.0, 0.0]), np.array([1, 0, 1], bool), 0.5)
    assert got.tolist() == [3.0, 0.0, 0.0]


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_whitening_gives_zero_mean_and_unit_variance(rows):
    values = []
    masks = []
    for row in rows:
        row_values, row_mask = zip(*row, strict=True)
        values.append(np.array(row_values))
        masks.append(np.array(row_mask))
    out = estimators.whiten(values, masks)
    inside = np.concatenate([o[m] for o, m in zip(out, masks, strict=True)])
    raw_values = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
    assert all((o[~m] == 0).all() for o, m in zip(out, masks, strict=True))
    assert np.isfinite(inside).all()
    if len(raw_values) > 1 and raw_values.std() > 0.1:
        assert inside.mean() == pytest.approx(0, abs=1e-6)
        assert inside.std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_gdpo_normalizes_each_part_by_itself():
    parts = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 100.0])}
    masks = [np.ones(2, bool), np.ones(2, bool)]
    unit = 1 / np.sqrt(2)  # what GRPO makes of two different rewards, whatever their scale
    raw = np.array([1 * unit - 3 * unit, -1 * unit + 3 * unit])
    whitened = (raw - raw.mean()) / np.repeat(raw, 2).std(ddof=1)
    got = estimators.gdpo(parts, {"a": 1.0, "b": 3.0}, [np.array([0, 1])], masks)
    np.testing.assert_allclose(got, np.repeat(whitened, 2).reshape(2, 2), atol=1e-4)


def test_a_reward_part_that_is_missing_is_refused_with_its_name():
    groups = [group_of(trajectory([3], [4], reward=1.0, index=i) for i in range(2))]
    config = AlgorithmConfig(adv_estimator="gdpo", gdpo={"reward_keys": ("score", "format")})
    with pytest.raises(ConfigError, match="'format'.*has \\['score'\\]"):
        compute_advantages(scored_batch(groups, turn_reward="none"), config)


def test_every_name_in_the_configuration_has_an_estimator():
    assert set(ADV_ESTIMATORS) == set(ESTIMATORS)


def test_none_learns_from_no_reward():
    samples = scored_batch(random_groups(0), turn_reward="none")
    for advantages, mask in zip(
        compute_advantages(samples, AlgorithmConfig(adv_estimator="none")).advantages,
        samples.masks,
        strict=True,
    ):
        np.testing.assert_array_equal(advantages, np.zeros(len(mask)))


@pytest.mark.parametrize(
    "name", sorted(set(ADV_ESTIMATORS) - {"gae", "gdpo", "remax", "grpo_passk", "none"})
)
def test_inserted_tokens_have_no_advantage_and_better_ones_more(name: str):
    groups = random_groups(0)
    config = AlgorithmConfig(
        adv_estimator=name, turn_reward="tool_success" if name == "mt_grpo" else "none"
    )
    samples = scored_batch(groups, turn_reward=config.turn_reward)
    per_token = compute_advantages(samples, config).advantages
    for advantages, mask in zip(per_token, samples.masks, strict=True):
        assert advantages.shape == mask.shape
        assert (advantages[~mask] == 0).all()
    means = [a[m].mean() for a, m in zip(per_token, samples.masks, strict=True)]
    good = [x for x, t in zip(means, samples.trajectories, strict=True) if t.reward]
    bad = [x for x, t in zip(means, samples.trajectories, strict=True) if not t.reward]
    assert np.mean(good) > np.mean(bad)
