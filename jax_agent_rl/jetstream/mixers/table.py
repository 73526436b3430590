"""All sequence mixers of engines by name, and the cache that a model's mixers need."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_agent_rl.jetstream.kv_cache import KVCache, empty_routed
from jax_agent_rl.jetstream.mixers.attention import ATTENTION, GLOBAL_ATTENTION
from jax_agent_rl.jetstream.mixers.delta_net import DELTA_NET
from jax_agent_rl.jetstream.mixers.latent_attention import LATENT_ATTENTION
from jax_agent_rl.jetstream.mixers.mixer import EngineMixer
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import MixerName

ENGINE_MIXERS: dict[MixerName, EngineMixer] = {
    "attention": ATTENTION,
    "global_attention": GLOBAL_ATTENTION,
    "latent_attention": LATENT_ATTENTION,
    "delta_net": DELTA_NET,
}


def has_states(config: DecoderConfig) -> bool:
    """Whether a model has recurrent layers."""
    return any(ENGINE_MIXERS[kind.mixer].is_recurrent for kind in config.layer_kinds)


def empty_cache(
    config: DecoderConfig,
    count: int,
    length: int,
    dtype: jnp.dtype,
    *,
    num_states: int = 0,
    state_dtype: jnp.dtype = jnp.float32,
) -> KVCache:
    """Return a cache of ``count`` pages of zeros, with scales for int8 or float8.

    Args:
        length: positions of a page.
        dtype: type of what pages hold.
        num_states: slots of recurrent layers; a model that has such layers needs some.
        state_dtype: type of what their states keep of activations.
    """
    assert num_states or not has_states(config), "recurrent layers need slots for their states"

    layers: list[Any] = []
    states: list[Any] = []
    for layer, kind in enumerate(config.layer_kinds):
        mixer = ENGINE_MIXERS[kind.mixer]
        if mixer.is_recurrent:
            layers.append(None)
            states.append(mixer.empty_cache(config, layer, num_states, 1, state_dtype))
        else:
            layers.append(mixer.empty_cache(config, layer, count, length, dtype))
            states.append(None)

    return KVCache(
        tuple(layers),
        empty_routed(config, count, length),
        tuple(states) if has_states(config) else (),
    )
