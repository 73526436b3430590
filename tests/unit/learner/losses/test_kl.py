"""KL estimators and controller.

GOLDEN numbers were printed once by verl's ``core_algos`` (commit b178a3c, float64).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.learner.losses.kl import adapt_kl_coef, kl_forward, kl_penalty
from tests.messages import raises

NEW = np.array([-0.5, -1.2, -2.0, -0.6])
REF = np.array([-0.9, -1.0, -1.1, -1.9])
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
    new = jnp.asarray(NEW, jnp.float32)
    ref = jnp.asarray(REF, jnp.float32)
    np.testing.assert_allclose(kl_penalty(name + "+", new, ref), GOLDEN[name][0], atol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(kl_penalty(name + "+", x, ref)))(new)
    np.testing.assert_allclose(gradient, GOLDEN["k2"][1], rtol=2e-6)


def test_k3_is_finite_for_tokens_the_reference_rules_out():
    assert np.isfinite(kl_forward("k3", np.array([0.0, -900.0]), np.array([-900.0, 0.0]))).all()


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with raises(ValueError, fix=("k1", "abs", "k2", "k3")):
        kl_forward("full", NEW, REF)


def test_the_adaptive_controller_matches_a_peer():
    first = adapt_kl_coef(0.1, 7.5, 64, target=6.0, horizon=1000)
    assert first == pytest.approx(0.10128, abs=1e-12)
    assert adapt_kl_coef(first, 1.0, 64, target=6.0, horizon=1000) == pytest.approx(
        0.099983616, abs=1e-12
    )
