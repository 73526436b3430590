"""The critic's loss is that of verl's ``core_algos`` (commit b178a3c, float64), printed once."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.learner.critic import clipped_value


def test_the_value_loss_matches_a_peer():
    old = np.array([[0.1, 0.2, 9.0, 0.4], [0.3, -0.2, 0.5, 7.0], [0.0, 0.1, 0.2, 0.3]])
    new = old + np.array([[0.9, -0.9, 0, 0.2], [0.1, 0.1, -1.0, 0], [0.7, -0.6, 0.4, 0.0]])
    returns = np.array([[0, 0.25, 0, 1.0], [0, 0, -0.5, 0], [0, 0, 0, 2.0]]) + 1
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    loss, _ = clipped_value(*(jnp.asarray(x, jnp.float32) for x in (new, old, returns)), 0.5)
    assert np.asarray(loss)[mask].mean() == pytest.approx(0.9221250000000001, rel=1e-6)
