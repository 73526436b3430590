"""Qwen3.5 (``qwen3_5`` and ``qwen3_5_moe``): the text model, with delta nets and gated attention.

It is Qwen3-Next with other matrices before the delta rule, dense or with experts. Published files
also hold a vision tower and layers that predict further tokens, which are not read; the text model
is written by itself (``qwen3_5_text``, ``qwen3_5_moe_text``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    nested_text_model,
    read_common,
    read_rope,
    refuse,
    write_common,
)
from jax_agent_rl.models.families.qwen3_next import (
    DECAY,
    PREDICTION_LAYERS,
    SHARED_EXPERT,
    read_delta_net,
    read_experts,
    write_delta_net,
    write_experts,
)

_TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""From the type of a model with a tower to its text model's."""
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",  # in the norm of delta nets
}
"""Fields with one supported value."""
_DEFAULTS = Defaults(num_kv_heads=4, head_dim=256, max_positions=32768, intermediate_size=12288)
_MOE_DEFAULTS = Defaults(num_kv_heads=2, head_dim=256, max_positions=32768, intermediate_size=512)
_OF_TOWER = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Fields of a file that the text model does not have."""


def text_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``config.json`` of the text model of a model with a tower; any other as it is."""
    text_type = _TEXT_TYPES.get(raw["model_type"])
    if text_type is None:
        return raw
    return nested_text_model(raw, text_type, left_out=_OF_TOWER)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the text model."""
    refuse(raw, **_FIXED)
    defaults = _DEFAULTS
    experts = None
    if raw["model_type"] == "qwen3_5_moe_text":
        defaults = _MOE_DEFAULTS
        refuse(raw, norm_topk_prob=True)
        experts = read_experts(raw, count=256, per_token=8)
    common = read_common(raw, defaults)
    return DecoderConfig(
        **common,
        rope=read_rope(raw, defaults, partial_rotary=0.25),
        qk_norm=True,
        attention_gate=True,
        norm_offset=1.0,
        delta_net=read_delta_net(raw, common["num_layers"], fused=False),
        experts=experts,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the text model."""
    architecture = "Qwen3_5ForCausalLM"
    experts = {}
    if config.experts is not None:
        architecture = "Qwen3_5MoeForCausalLM"
        experts = write_experts(config.experts)
    written = write_common(config, architecture)
    written |= {"hidden_act": "silu", "attention_bias": False}
    return written | write_delta_net(config) | experts


def left_out(_: DecoderConfig) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors that are not read."""
    return (PREDICTION_LAYERS, "model.visual.")


FAMILY = ModelFamily(
    model_types=(*_TEXT_TYPES, *_TEXT_TYPES.values()),
    read=read,
    write=write,
    inert=(
        # Axes of rotary positions, which are all equal in texts.
        "mrope_interleaved",
        "mrope_section",
        # Layers that predict further tokens.
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        # The type that engines keep states in; it is float32 here.
        "mamba_ssm_dtype",
    ),
    names=SHARED_EXPERT,
    packed=DECAY,
    prefixes={"model.language_model.": "model."},
    text_model=text_model,
    left_out=left_out,
)
