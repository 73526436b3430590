"""KL estimators and controller, the value loss, and aggregation.

GOLDEN numbers were printed once by verl's ``core_algos`` (commit b178a3c, float64).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.learner.losses import adapt_kl_coef, kl_forward, kl_penalty, term_weights
from jax_agent_rl.learner.objective import clipped_value

NEW, REF = np.array([-0.5, -1.2, -2.0, -0.6]), np.array([-0.9, -1.0, -1.1, -1.9])
GOLDEN = {
    "k1": ([0.4, -0.2, -0.9, 1.3], [1, 1, 1, 1]),
    "abs": ([0.4, 0.2, 0.9, 1.3], [1, -1, -1, 1]),
    "k2": ([0.08, 0.02, 0.405, 0.845], [0.4, -0.2, -0.9, 1.3]),
    "k3": (
        [0.07032004603563946, 0.0214027581601699, 0.5596031111569495, 0.5725317930340124],
        [0.3296799539643607, -0.22140275816016985, -1.4596031111569494, 0.7274682069659874],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_kl_estimators_match_a_peer(name: str):
    value, gradient = GOLDEN[name]
    np.testing.assert_allclose(kl_forward(name, NEW, REF), value, atol=1e-12)
    got = jax.grad(lambda x: jnp.sum(kl_penalty(name, x, jnp.asarray(REF))))(
        jnp.asarray(NEW, jnp.float32)
    )
    np.testing.assert_allclose(got, gradient, rtol=2e-6)


@pytest.mark.parametrize("name", ["k1", "abs", "k3"])
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str):
    new, ref = jnp.asarray(NEW, jnp.float32), jnp.asarray(REF, jnp.float32)
    np.testing.assert_allclose(kl_penalty(name + "+", new, ref), GOLDEN[name][0], atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(kl_penalty(name + "+", x, ref)))(new)
    np.testing.assert_allclose(gradient, GOLDEN["k2"][1], rtol=2e-6)


def test_k3_is_finite_for_tokens_the_reference_rules_out():
    assert np.isfinite(kl_forward("k3", np.array([0.0, -900.0]), np.array([-900.0, 0.0]))).all()


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="k1, abs, k2, k3"):
        kl_forward("full", NEW, REF)


def test_the_adaptive_controller_matches_a_peer():
    first = adapt_kl_coef(0.1, 7.5, 64, target=6.0, horizon=1000)
    assert first == pytest.approx(0.10128, abs=1e-12)
    assert adapt_kl_coef(first, 1.0, 64, target=6.0, horizon=1000) == pytest.approx(
        0.099983616, abs=1e-12
    )


def test_the_value_loss_matches_a_peer():
    old = np.array([[0.1, 0.2, 9.0, 0.4], [0.3, -0.2, 0.5, 7.0], [0.0, 0.1, 0.2, 0.3]])
    new = old + np.array([[0.9, -0.9, 0, 0.2], [0.1, 0.1, -1.0, 0], [0.7, -0.6, 0.4, 0.0]])
    returns = np.array([[0, 0.25, 0, 1.0], [0, 0, -0.5, 0], [0, 0, 0, 2.0]]) + 1
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    loss, _ = clipped_value(*(jnp.asarray(x, jnp.float32) for x in (new, old, returns)), 0.5)
    assert np.asarray(loss)[mask].mean() == pytest.approx(0.9221250000000001, rel=1e-6)


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6)
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@given(masks)
def test_weights_make_the_loss_the_named_mean(rows):
    active = [np.array(row) for row in rows]
    losses = [np.arange(len(row)) + 10.0 * i for i, row in enumerate(rows)]
    inside = [x[m] for x, m in zip(losses, active, strict=True) if m.any()]
    expected = dict.fromkeys(MODES, 0.0)
    if inside:
        sums = [x.sum() for x in inside]
        expected = {
            "token-mean": np.concatenate(inside).mean(),
            "token-sum": sum(sums),
            "seq-mean-token-sum": np.mean(sums),
            "seq-mean-token-mean": np.mean([x.mean() for x in inside]),
            "seq-mean-token-sum-norm": np.mean(sums) / 7,
        }
    for mode in MODES:
        weights = term_weights(mode, active, scale_factor=7)
        got = sum(float((w * x).sum()) for w, x in zip(weights, losses, strict=True))
        assert got == pytest.approx(expected[mode])
        assert all((w[~m] == 0).all() for w, m in zip(weights, active, strict=True))
