"""Every key of the optimizer changes its updates."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_agent_rl.config.base import OptimizerSection
from jax_agent_rl.learner.optimizer import learning_rate, make_optimizer

BASE = {"learning_rate": 0.1, "weight_decay": 0.1, "lr_scheduler_type": "linear"}
GRADIENTS = ([3.0, -4.0], [0.3, 0.4], [-0.5, 0.2])  # the first is clipped


def trained(**keys: object) -> np.ndarray:
    section = OptimizerSection.model_validate(BASE | keys)
    rate = learning_rate(section, total_steps=len(GRADIENTS))
    params = {"w": jnp.asarray([1.0, 2.0])}
    state = make_optimizer(section, 0.0).init(params)
    for step, gradient in enumerate(GRADIENTS):
        optimizer = make_optimizer(section, rate(step))
        updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.2),
        ("lr_warmup_steps", 2),
        ("lr_scheduler_type", "cosine"),
        ("min_lr_ratio", 0.5),
        ("weight_decay", 0.5),
        ("adam_b1", 0.5),
        ("adam_b2", 0.5),
        ("adam_eps", 1.0),
        ("max_grad_norm", 0.1),
    ],
)
def test_a_key_changes_what_is_learnt(key: str, value: object):
    assert not np.allclose(trained(**{key: value}), trained(), rtol=1e-4)
