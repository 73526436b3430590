"""All sequence mixers by name."""

from __future__ import annotations

from jax_agent_rl.models.layer_kinds import MixerName
from jax_agent_rl.models.mixers.attention import ATTENTION, GLOBAL_ATTENTION
from jax_agent_rl.models.mixers.delta_net import DELTA_NET
from jax_agent_rl.models.mixers.latent_attention import LATENT_ATTENTION
from jax_agent_rl.models.mixers.mixer import Mixer

MIXERS: dict[MixerName, Mixer] = {
    "attention": ATTENTION,
    "global_attention": GLOBAL_ATTENTION,
    "delta_net": DELTA_NET,
    "latent_attention": LATENT_ATTENTION,
}
