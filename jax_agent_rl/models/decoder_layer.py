"""A layer of a decoder: a sequence mixer, then a feed-forward network.

Shapes as in ``models.decoder``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jax_agent_rl.models.feed_forward import FEED_FORWARDS, router_load
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.per_layer_inputs import add_per_layer_input


def decoder_layer(
    layer: LayerWeights,
    x: jax.Array,
    mix: Callable[[jax.Array], jax.Array],
    *,
    copies: jax.Array | None = None,
    routed: jax.Array | None = None,
    per_layer_input: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Apply a layer: mixer and feed-forward network, each with its norms and residual.

    The layer's own input of each token may follow.

    Args:
        x: [B, T, D].
        mix: the layer's mixer, of [B, T, D] after the norm that is before it, if there is one.
        copies: int32 [B, T], how often each token counts in the load of the experts; None computes
            none.
        routed: [B, T, k], experts to take (``moe.route``); None chooses all.
        per_layer_input: [B, T, p], the layer's own (``models.per_layer_inputs``), if it has one.

    Returns:
        [B, T, D], and ``moe.router_load`` float32 [2, E], or None.
    """
    config = layer.config
    mixed = mix(layer.norm(config.mixer_norm, x))
    if config.has_output_norms:
        mixed = layer.norm("post_attention_norm", mixed)
    x = x + mixed

    load = None
    if copies is not None and config.experts is not None:
        load = router_load(layer, x, copies, routed)

    out = FEED_FORWARDS[layer.kind.feed_forward](layer, x, routed)
    if config.has_output_norms:
        out = layer.norm("post_feedforward_norm", out)
    x = x + out

    if per_layer_input is not None:
        x = add_per_layer_input(layer, x, per_layer_input)
    if config.layer_scale:
        scale = jax.lax.stop_gradient(layer.params["layer_scalar"])
        x = x * scale.astype(x.dtype)
    return x, load
