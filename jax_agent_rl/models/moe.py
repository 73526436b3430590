"""Mixture of experts without dropped tokens: tokens sorted by expert, one grouped product per matrix.

Shapes: N tokens, D hidden, E experts, F an expert's hidden size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_agent_rl.models.config import Experts, Params


def route(experts: Experts, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of each token: their weights float32 [N, k] and indices int32 [N, k]."""
    scores = jnp.einsum("nd,ed->ne", x, router)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), experts.per_token)
    if experts.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def mixture_of_experts(
    experts: Experts, layer: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Each token through its experts, weighted, [N, D] -> [N, D].

    Args:
        layer: ``router`` [E, D], ``expert_gate`` and ``expert_up`` [E, F, D], ``expert_down`` [E, D, F].
    """
    weights, chosen = route(experts, layer["router"], x)
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # [N k] places, by expert
    token = order // experts.per_token
    sizes = jnp.bincount(chosen.reshape(-1), length=experts.count)
    grouped = x[token]

    def product(values: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(values, weight.swapaxes(1, 2), sizes)

    hidden = activation(product(grouped, layer["expert_gate"])) * product(grouped, layer["expert_up"])
    outputs = product(hidden, layer["expert_down"]) * weights.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(outputs)
