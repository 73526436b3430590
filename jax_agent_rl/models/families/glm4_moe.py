"""GLM-4.5, GLM-4.6 and GLM-4.7 (``glm4_moe``): experts behind some dense layers.

Half of each head rotates, and the router scores each expert by itself.
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.families.grouped_experts import (
    read_grouped_experts,
    write_grouped_experts,
)
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

_DEFAULTS = Defaults(num_kv_heads=8, max_positions=131072, rms_norm_eps=1e-5)
_EXPERTS = Experts(
    count=128, per_token=8, intermediate_size=1408, normalize=True, first_dense_layers=1
)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, hidden_act="silu")
    common = read_common(raw, _DEFAULTS)
    return DecoderConfig(
        **common,
        rope=read_rope(raw, _DEFAULTS, partial_rotary=0.5),
        qkv_bias=switch(raw, "attention_bias", False),
        qk_norm=switch(raw, "use_qk_norm", False),
        experts=read_grouped_experts(raw, common["num_layers"], _EXPERTS),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.experts is not None
    return write_common(config, "Glm4MoeForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": config.rope.partial_rotary,
        **write_grouped_experts(config.experts),
    }


FAMILY = ModelFamily(
    model_types=("glm4_moe",),
    read=read,
    write=write,
)
