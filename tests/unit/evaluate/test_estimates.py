"""pass@k and intervals, against counting, scipy and plain resampling."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from jax_agent_rl.evaluate.evaluation import Estimate, estimate, pass_at_k, wilson
from tests.messages import raises


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_pass(
    passed: list[bool], data: st.DataObject
):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(
        sum(map(any, subsets)) / len(subsets)
    )


def test_pass_at_k_is_exact_for_many_samples():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_impossible_counts_are_refused(samples: int, passed: int, k: int):
    with raises(ValueError, key=f"pass@{k}", value=samples):
        pass_at_k(samples, passed, k)


@given(st.integers(1, 300), st.data())
def test_wilson_is_scipys(trials: int, data: st.DataObject):
    successes = data.draw(st.integers(0, trials))
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    got = wilson(successes / trials, trials)
    assert (got.low, got.high) == (
        pytest.approx(expected.low, abs=1e-6),
        pytest.approx(expected.high, abs=1e-6),
    )


def test_the_interval_is_that_of_resampled_means_within_their_noise():
    rng = np.random.default_rng(3)
    values = rng.beta(0.5, 0.5, size=80)
    low, high = np.quantile(
        [rng.choice(values, len(values)).mean() for _ in range(10_000)], [0.025, 0.975]
    )
    got = estimate(values.tolist(), seed=0)
    assert got.mean == pytest.approx(values.mean())
    assert (got.low, got.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


def test_the_same_seed_gives_the_same_interval_and_another_one_another():
    values = np.random.default_rng(0).random(30).tolist()
    assert estimate(values, seed=1) == estimate(values, seed=1) != estimate(values, seed=2)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_prompts_that_agree_do_not_make_a_share_certain(value: float):
    got = estimate([value] * 20, seed=0, share=True)
    assert got.mean == value
    assert got.high - got.low > 0.1


@pytest.mark.parametrize("value", [-1.0, 0.5, 7.0])
def test_rewards_that_agree_have_no_interval(value: float):
    assert estimate([value] * 20, seed=0) == Estimate(value, None, None)


@given(st.integers(1, 10_000))
def test_no_failure_reaches_to_one_and_no_success_to_nought(trials: int):
    assert wilson(1.0, trials).high == 1.0
    assert wilson(0.0, trials).low == 0.0


def test_no_prompts_have_no_mean():
    with raises(ValueError, value="no prompts"):
        estimate([], seed=0)
