"""Sequence mixers of engines: one module for each, and the table of them."""

from __future__ import annotations

import jax.numpy as jnp

from jax_agent_rl.jetstream.kv_cache import KVCache, empty_routed
from jax_agent_rl.jetstream.mixers.attention import ATTENTION
from jax_agent_rl.jetstream.mixers.mixer import EngineMixer
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layer_kinds import MixerName

ENGINE_MIXERS: dict[MixerName, EngineMixer] = {"attention": ATTENTION}


def empty_cache(config: DecoderConfig, count: int, length: int, dtype: jnp.dtype) -> KVCache:
    """Return a cache of ``count`` pages of zeros, with scales for int8 or float8."""
    layers = []
    for layer, kind in enumerate(config.layer_kinds):
        mixer = ENGINE_MIXERS[kind.mixer]
        layers.append(mixer.empty_cache(config, layer, count, length, dtype))
    return KVCache(tuple(layers), empty_routed(config, count, length))
