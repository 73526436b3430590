"""Feed-forward networks of an engine's layers: a gated one, a mixture of experts, or both.

Shapes as in ``jetstream.forward``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jax_agent_rl.jetstream.adapted_layer import AdaptedLayer
from jax_agent_rl.jetstream.cpu import kernels as cpu_kernels
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import FeedForwardName
from jax_agent_rl.models.layers import ACTIVATIONS, rms_norm
from jax_agent_rl.models.moe import (
    mixture_of_experts,
    replicated_mixture_of_experts,
    router_inputs,
    shared_expert_weight,
)
from jax_agent_rl.models.sharding import constrain


def _dense(
    config: DecoderConfig, mesh: Mesh | None, layer: AdaptedLayer, x: jax.Array, norm: str | None
) -> tuple[jax.Array, None]:
    return _gated(config, mesh, layer, x, norm, ("gate_up", "down")), None


def _wide(
    config: DecoderConfig, mesh: Mesh | None, layer: AdaptedLayer, x: jax.Array, norm: str | None
) -> tuple[jax.Array, None]:
    return _gated(config, mesh, layer, x, norm, ("wide_gate_up", "wide_down")), None


def _gated(
    config: DecoderConfig,
    mesh: Mesh | None,
    layer: AdaptedLayer,
    x: jax.Array,
    norm: str | None,
    names: tuple[str, str],
) -> jax.Array:
    """Apply a gated network of two matrices."""
    gate_up, down = names
    if layer.native and not layer.is_adapted(gate_up):
        scale = None if norm is None else layer.params[norm]
        hidden = cpu_kernels.gated_product(config, layer.params[gate_up], x, scale)
    else:
        activation = ACTIVATIONS[config.activation]
        hidden = activation(*layer.multiply(config, gate_up, x, norm))
    return constrain(layer.multiply(config, down, hidden), mesh)


def _experts(
    config: DecoderConfig, mesh: Mesh | None, layer: AdaptedLayer, x: jax.Array, norm: str | None
) -> tuple[jax.Array, jax.Array]:
    assert config.experts is not None
    activation = ACTIVATIONS[config.activation]
    router_x = None
    if "router_norm" in layer.params:
        router_x = router_inputs(config, layer.params["router_norm"], x.T)
    if norm is not None:
        x = rms_norm(config, x, layer.params[norm], axis=0)
    tokens = x.T
    if mesh is None:
        out, chosen = mixture_of_experts(
            config.experts, layer.params, tokens, activation, router_x=router_x, transposed=True
        )
    else:
        out, chosen = replicated_mixture_of_experts(
            config.experts, layer.params, tokens, activation, mesh, router_x=router_x
        )
    out = out.T
    if config.experts.shared_size:
        out = out + _shared_expert(config, mesh, layer, x)
    return out, chosen


def _dense_and_experts(
    config: DecoderConfig, mesh: Mesh | None, layer: AdaptedLayer, x: jax.Array, norm: str | None
) -> tuple[jax.Array, jax.Array]:
    dense, _ = _dense(config, mesh, layer, x, norm)
    mixed, chosen = _experts(config, mesh, layer, x, config.experts_norm)
    dense = rms_norm(config, dense, layer.params["post_dense_norm"], axis=0)
    mixed = rms_norm(config, mixed, layer.params["post_experts_norm"], axis=0)
    return dense + mixed, chosen


def _shared_expert(
    config: DecoderConfig, mesh: Mesh | None, layer: AdaptedLayer, x: jax.Array
) -> jax.Array:
    """Apply the dense network that every token passes beside its experts to [D, B]."""
    out = _gated(config, mesh, layer, x, None, ("shared_gate_up", "shared_down"))
    if "shared_router" not in layer.params:
        return out
    return out * shared_expert_weight(layer.params["shared_router"], x.T).T


EngineFeedForward = Callable[
    [DecoderConfig, Mesh | None, AdaptedLayer, jax.Array, str | None],
    tuple[jax.Array, jax.Array | None],
]
"""From a model, a mesh (None on one device), a layer, its input [D, B] and the name of the norm
that is applied to it first (None for none), to the output [D, B] and the chosen experts [B, k] of a
mixture."""
ENGINE_FEED_FORWARDS: dict[FeedForwardName, EngineFeedForward] = {
    "dense": _dense,
    "wide": _wide,
    "experts": _experts,
    "dense_and_experts": _dense_and_experts,
}
