"""Feed-forward networks of decoder layers: a gated one, a mixture of experts, or both.

Shapes as in ``models.decoder``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_agent_rl.models import moe
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.layer_kinds import FeedForwardName
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import ACTIVATIONS, apart


def _dense(layer: LayerWeights, x: jax.Array, _: jax.Array | None) -> jax.Array:
    return _gated(layer, _normalized(layer, x))


def _wide(layer: LayerWeights, x: jax.Array, _: jax.Array | None) -> jax.Array:
    return _gated(layer, _normalized(layer, x), "wide_")


def _normalized(layer: LayerWeights, x: jax.Array) -> jax.Array:
    return layer.norm(layer.config.feed_forward_norm, x)


def _gated(layer: LayerWeights, x: jax.Array, prefix: str = "") -> jax.Array:
    """Apply a gated network, whose three matrices have names with this prefix."""
    activation = ACTIVATIONS[layer.config.activation]
    gate = apart(layer.linear(f"{prefix}gate", x))
    up = apart(layer.linear(f"{prefix}up", x))
    hidden = apart(activation(gate, up))
    return layer.linear(f"{prefix}down", hidden)


def _experts(layer: LayerWeights, x: jax.Array, routed: jax.Array | None) -> jax.Array:
    experts = layer.config.experts
    assert experts is not None
    activation = ACTIVATIONS[layer.config.activation]
    weights = _expert_params(layer)
    router_x = _router_inputs(layer, x)
    x = layer.norm(layer.config.experts_norm, x)
    if layer.mesh is not None:
        out = moe.sharded_mixture_of_experts(
            experts, weights, x, activation, layer.mesh, routed, router_x=router_x
        )
    else:
        tokens = x.reshape(-1, x.shape[-1])
        router_x = router_x.reshape(tokens.shape)
        if routed is not None:
            routed = routed.reshape(-1, experts.per_token)
        out, _ = moe.mixture_of_experts(
            experts, weights, tokens, activation, routed, router_x=router_x
        )
        out = out.reshape(x.shape)
    if not experts.shared_size:
        return out
    return out + _shared_expert(layer, x)


def _dense_and_experts(layer: LayerWeights, x: jax.Array, routed: jax.Array | None) -> jax.Array:
    dense = layer.norm("post_dense_norm", _dense(layer, x, None))
    return dense + layer.norm("post_experts_norm", _experts(layer, x, routed))


def _router_inputs(layer: LayerWeights, x: jax.Array) -> jax.Array:
    """Return what the router reads of the residual stream."""
    if "router_norm" in layer.params:
        return moe.router_inputs(layer.config, layer.params["router_norm"], x)
    return layer.norm(layer.config.experts_norm, x)


def _shared_expert(layer: LayerWeights, x: jax.Array) -> jax.Array:
    """Apply the dense network that every token passes beside its experts."""
    out = _gated(layer, x, "shared_")
    if "shared_router" not in layer.params:
        return out
    return out * moe.shared_expert_weight(layer.params["shared_router"], x)


def _expert_params(layer: LayerWeights) -> Params:
    """Return the parameters of router and experts."""
    return {name: layer.params[name] for name in moe.WEIGHTS if name in layer.params}


FeedForward = Callable[[LayerWeights, jax.Array, jax.Array | None], jax.Array]
"""From a layer, the residual stream [B, T, D] and the experts to take [B, T, k] (``moe.route``) to
what is added to it [B, T, D]; None chooses all."""
FEED_FORWARDS: dict[FeedForwardName, FeedForward] = {
    "dense": _dense,
    "wide": _wide,
    "experts": _experts,
    "dense_and_experts": _dense_and_experts,
}


def router_load(
    layer: LayerWeights, x: jax.Array, copies: jax.Array, routed: jax.Array | None
) -> jax.Array:
    """Return ``moe.router_load`` float32 [2, E] of a layer's input; zeros if it has no experts.

    Args:
        x: the residual stream, [B, T, D].
        copies: int32 [B, T], how often each token counts.
        routed: [B, T, k], see :data:`FeedForward`.
    """
    experts = layer.config.experts
    assert experts is not None
    if "router" not in layer.params:
        return jnp.zeros((2, experts.count), jnp.float32)
    router_x = _router_inputs(layer, x)
    return moe.router_load(experts, _expert_params(layer), router_x, copies, routed)
