"""Per-layer inputs: each layer is given an embedding of the token of its own (Gemma 3n, Gemma 4).

::

    ids ──► table [V', L p] ───────────────────────┐
    embedding ──► projection [L p, D] ──► norm ────┴──► + ──► / sqrt(2) ──► inputs [L, p]

    a layer's x ──► gate [p, D] ──► activation ──► * its input ──► projection [D, p] ──► norm

Shapes as in ``models.decoder``, and p numbers of a layer's input.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import ACTIVATIONS, linear, rms_norm

PER_LAYER_PARAMETERS = (
    "per_layer_embed",
    "per_layer_model_projection",
    "per_layer_model_norm",
)
"""Of the whole model, not of a layer."""


def per_layer_inputs(
    config: DecoderConfig, params: Params, token_ids: jax.Array, embedded: jax.Array
) -> jax.Array:
    """Return the inputs of all layers, [.., L, p].

    Args:
        params: ``PER_LAYER_PARAMETERS`` by name: a table [V', L p], a projection [L p, D] and the
            weight of a norm [p]. There may be others.
        token_ids: int32 [..].
        embedded: [.., D], their embeddings, scaled.
    """
    assert config.per_layer_inputs is not None
    size = config.per_layer_inputs.size
    shape = (*token_ids.shape, config.num_layers, size)

    table = params["per_layer_embed"]
    of_ids = table[token_ids] * jnp.asarray(size**0.5, table.dtype)
    projected = linear(embedded, params["per_layer_model_projection"])
    of_embeddings = _scaled(projected, config.hidden_size**-0.5).reshape(shape)
    of_embeddings = rms_norm(config, of_embeddings, params["per_layer_model_norm"])
    return _scaled(of_embeddings + of_ids.reshape(shape).astype(of_embeddings.dtype), 2.0**-0.5)


def add_per_layer_input(layer: LayerWeights, x: jax.Array, per_layer_input: jax.Array) -> jax.Array:
    """Add to a layer's output [B, T, D] what follows from its own input [B, T, p]."""
    activation = ACTIVATIONS[layer.config.activation]
    gated = activation(layer.linear("per_layer_gate", x), per_layer_input)
    out = layer.linear("per_layer_projection", gated)
    return x + layer.norm("post_per_layer_norm", out)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply by a float32 and round once, as PyTorch does; JAX would round the factor first."""
    return (x.astype(jnp.float32) * jnp.float32(factor)).astype(x.dtype)
