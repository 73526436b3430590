"""The operations that a model needs for its tokens, whatever program computes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import MixerName
from jax_agent_rl.models.parameters import PARAMETERS, Kind


def pass_flops(
    model: DecoderConfig,
    tokens: int,
    *,
    visible: float,
    head: bool = True,
    over_latents: bool = False,
) -> float:
    """Return the operations of a forward pass over one context.

    A multiplication and an addition are two operations.

    Args:
        tokens: tokens of the pass.
        visible: positions that a token attends to on average.
        head: logits of every token are computed.
        over_latents: latent attention works on the latents themselves, as an engine's does, instead
            of the keys and values that a learner makes of them.
    """
    expert_share = 1.0  # of the experts, those that a token chooses
    if model.experts is not None:
        expert_share = model.experts.per_token / model.experts.count

    weights = 0.0
    for name, shape in model.parameter_shapes()["layers"].items():
        parameter = PARAMETERS[name]
        if parameter.kind not in (Kind.MATRIX, Kind.ROUTER):
            continue
        if parameter.is_of_experts:
            weights += math.prod(shape) * expert_share
        else:
            weights += math.prod(shape)
    if head:
        weights += model.vocab_size * model.hidden_size

    mixing = 0.0
    for layer, kind in enumerate(model.layer_kinds):
        mixing_flops = MIXING_FLOPS[kind.mixer]
        if over_latents and kind.mixer == "latent_attention":
            mixing_flops = _cached_latents_flops
        mixing += mixing_flops(model, visible_positions(model, layer, visible))
    return tokens * (2 * weights + mixing)


def _attention_flops(mixer: MixerName, model: DecoderConfig, visible: float) -> float:
    return 4 * model.num_heads * model.heads(mixer).head_dim * visible


def _latent_attention_flops(model: DecoderConfig, visible: float) -> float:
    assert model.latent is not None
    return 2 * model.num_heads * (model.latent.head_dim + model.latent.value_dim) * visible


def _cached_latents_flops(model: DecoderConfig, visible: float) -> float:
    # Every head scores a position by all that is cached of it, and mixes whole latents.
    assert model.latent is not None
    return 2 * model.num_heads * (model.latent.cached_dim + model.latent.kv_rank) * visible


def _delta_net_flops(model: DecoderConfig, visible: float) -> float:
    sizes = model.delta_net
    assert sizes is not None
    conv = 2 * sizes.conv_channels * sizes.conv_kernel
    # The state fades, answers a key, is corrected and read.
    return conv + 7 * sizes.value_heads * sizes.key_dim * sizes.value_dim


MIXING_FLOPS: dict[MixerName, Callable[[DecoderConfig, float], float]] = {
    "attention": functools.partial(_attention_flops, "attention"),
    "global_attention": functools.partial(_attention_flops, "global_attention"),
    "latent_attention": _latent_attention_flops,
    "delta_net": _delta_net_flops,
}
"""From a model and the positions that a token sees to what a layer's mixer computes for the token,
besides products with parameters."""


def visible_positions(model: DecoderConfig, layer: int, span: float) -> float:
    """Return how many positions a layer attends to, of a context of ``span``."""
    if model.is_windowed(layer):
        return min(span, model.sliding_window or span)
    return span
