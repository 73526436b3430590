"""The critic: the policy's architecture with a scalar head, and its clipped value loss.

Shapes: R rows, T tokens, K terms, D hidden.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.learner.image_packing import encode_images
from jax_agent_rl.learner.losses.policy import changed
from jax_agent_rl.learner.optimized_params import Arrays, Statistics
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.decoder import Decoder


class Critic(Decoder):
    """A language model with a value head in place of its output head."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(replace(config, tie_word_embeddings=True), rngs=rngs)
        self.value_head = nnx.Param(jnp.zeros(config.hidden_size, jnp.float32))


def critic_params(params: Params) -> Params:
    """Return a language model's parameters with its output head replaced by a value head of zeros.

    At first every value is 0, so the first advantages are plain returns instead of noise.
    """
    body = {name: value for name, value in params.items() if name != "lm_head"}
    return body | {"value_head": jnp.zeros(params["final_norm"].shape, jnp.float32)}


def critic_shapes(model: DecoderConfig) -> Params:
    """Return the shape of every parameter of the critic."""
    shapes = replace(model, tie_word_embeddings=True).parameter_shapes()
    return shapes | {"value_head": (model.hidden_size,)}


def state_values(
    critic: Critic,
    batch: Arrays,
    *,
    remat: str,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Return the value of the state after every token, float32 [R, T]."""
    images = encode_images(critic, batch, remat=remat, mesh=mesh)
    hidden, _ = critic(
        batch["token_ids"],
        batch["positions"],
        batch["subtree_end"],
        images=images,
        remat=remat,
        mesh=mesh,
    )  # [R, T, D]
    value_head = critic.value_head[...]
    return jnp.einsum("rtd,d->rt", hidden, value_head, preferred_element_type=jnp.float32)


def value_loss(
    critic: Critic,
    batch: Arrays,
    *,
    cliprange: float,
    remat: str,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Statistics]:
    """Return a micro-batch's share of the clipped value loss, and its statistics.

    The value of a term is the value of the state that its token was sampled in: of its parent.
    """
    values = state_values(critic, batch, remat=remat, mesh=mesh)
    parents = jnp.take_along_axis(batch["target_parent"], batch["term_target"], axis=1)
    term_values = jnp.take_along_axis(values, parents, axis=1)

    weight = batch["term_weight"]
    returns = batch["term_returns"]
    active = weight > 0
    loss, clipped = clipped_value(term_values, batch["term_old_value"], returns, cliprange)
    total = jnp.sum(jnp.where(active, weight * loss, 0.0))
    statistics = {
        "sum": {
            "loss": total,
            "terms": jnp.sum(active, dtype=jnp.float32),
            "clipped": jnp.sum(jnp.where(active, clipped, 0.0)),
            "value": jnp.sum(jnp.where(active, term_values, 0.0)),
            "returns": jnp.sum(jnp.where(active, returns, 0.0)),
            "squared_returns": jnp.sum(jnp.where(active, jnp.square(returns), 0.0)),
            "squared_error": jnp.sum(jnp.where(active, jnp.square(term_values - returns), 0.0)),
        },
        "max": {},
    }
    return total, jax.lax.stop_gradient(statistics)


def clipped_value(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, cliprange: float
) -> tuple[jax.Array, jax.Array]:
    """Return the clipped value loss per term, and 1.0 where clipping raises it.

    The loss is ``max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2``.

    References: PPO's value clipping, as in Engstrom et al. 2020, Implementation Matters, arXiv
    2005.12729.
    """
    unclipped = jnp.square(values - returns)
    clipped_values = jnp.clip(values, old_values - cliprange, old_values + cliprange)
    clipped = jnp.square(clipped_values - returns)
    loss = jnp.maximum(unclipped, clipped)
    return loss / 2, changed(loss, unclipped)
