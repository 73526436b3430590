"""The parameters before the last optimizer update, from what AdamW keeps: nothing has to be stored for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_agent_rl.config.base import OptimizerSection
from jax_agent_rl.learner.optimized_params import TrainState
from jax_agent_rl.models.config import Params

EPSILON = 1e-8
"""Optax's, of AdamW."""


def undone(state: TrainState, config: OptimizerSection, *, rate: float) -> Params | None:
    """Return the trained parameters of one update ago, to rounding; None before the first update.

    An update subtracts ``rate * (direction + decay * before)``, and the direction is a function of the moments that
    the optimizer keeps.

    Args:
        state: after the update.
        config: of the optimizer.
        rate: the update's learning rate.
    """
    if not int(state.updates):
        return None
    (moments,) = (x for x in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(x))
    direction = _direction(moments, config)

    def back(path: Any, x: jax.Array, step: jax.Array) -> jax.Array:
        return (x + rate * step) / (1 - rate * _decay(path, config.weight_decay))

    return jax.tree_util.tree_map_with_path(back, state.params, direction)


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _decay(path: Any, weight_decay: float) -> float:
    """Of a parameter: norms have none, see :func:`~jax_agent_rl.learner.optimized_params.make_optimizer`."""
    return 0.0 if "norm" in path[-1].key else weight_decay


def _direction(moments: optax.ScaleByAdamState, config: OptimizerSection) -> Any:
    count = jnp.asarray(moments.count, jnp.float32)
    first, second = 1 - config.adam_b1**count, 1 - config.adam_b2**count
    return jax.tree.map(lambda mu, nu: (mu / first) / (jnp.sqrt(nu / second) + EPSILON), moments.mu, moments.nu)
