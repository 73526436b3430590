"""The critic's loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.learner.losses.terms import changed


def clipped_value(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, cliprange: float
) -> tuple[jax.Array, jax.Array]:
    """``max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2`` per term, and 1.0 where the clipped one is larger.

    References: PPO's value clipping, as in Engstrom et al. 2020, Implementation Matters, arXiv 2005.12729.
    """
    plain = jnp.square(values - returns)
    clipped = jnp.square(jnp.clip(values, old_values - cliprange, old_values + cliprange) - returns)
    loss = jnp.maximum(plain, clipped)
    return loss / 2, changed(loss, plain)
