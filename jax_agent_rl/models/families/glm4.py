"""GLM-4 of April 2025 (``glm4``).

It has norms on both sides, half of each head rotates, and gate and up share a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    read_common,
    read_rope,
    refuse,
    switch,
    write_common,
)
from jax_agent_rl.models.tensors import Packed

_DEFAULTS = Defaults(
    eos_token_ids=(151329, 151336, 151338),
    num_kv_heads=2,
    head_dim=128,
    max_positions=131072,
    rms_norm_eps=1.5625e-7,
)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, hidden_act="silu")
    rope = replace(read_rope(raw, _DEFAULTS, partial_rotary=0.5), interleaved=True)
    has_bias = switch(raw, "attention_bias", True)
    return DecoderConfig(
        **read_common(raw, _DEFAULTS), rope=rope, qkv_bias=has_bias, norms="around"
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    return write_common(config, "Glm4ForCausalLM") | {
        "hidden_act": "silu",
        "pad_token_id": None,  # transformers' default is an id of the published vocabulary
        "attention_bias": config.qkv_bias,
        "partial_rotary_factor": config.rope.partial_rotary,
    }


FAMILY = ModelFamily(
    model_types=("glm4",),
    read=read,
    write=write,
    names={
        "post_attention_norm": "post_self_attn_layernorm",
        "pre_feedforward_norm": "post_attention_layernorm",
        "post_feedforward_norm": "post_mlp_layernorm",
    },
    packed={
        "gate": Packed(name="mlp.gate_up_proj.weight", number=0, count=2),
        "up": Packed(name="mlp.gate_up_proj.weight", number=1, count=2),
    },
)
