"""Qwen3.5 (``qwen3_5`` and ``qwen3_5_moe``): delta nets, gated attention and a vision tower.

The decoder is Qwen3-Next with other matrices before the delta rule, dense or with experts. The
tower is Qwen3-VL's without features of inner layers, and rotary positions have three axes as there.
As with Qwen3-VL, videos are not read. Layers that predict further tokens are left out.

The text model is a family of its own (``qwen3_5_text``, ``qwen3_5_moe_text``). It is also read of a
folder with a tower whose ``config.json`` has ``language_model_only``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    bad_field,
    flat_fields,
    read_common,
    read_rope,
    refuse,
    write_common,
)
from jax_agent_rl.models.families.qwen3_next import (
    DECAY,
    PREDICTION_LAYERS,
    SHARED_EXPERT,
    left_out,
    read_delta_net,
    read_experts,
    write_delta_net,
    write_experts,
)
from jax_agent_rl.models.families.qwen_vision import (
    PLACEHOLDER_IDS,
    QWEN3_5_TOWER,
    read_sections,
    with_text_section,
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
_TEXT_ONLY = "language_model_only"
"""A field of published files: whether their tower is left alone."""


def flatten(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a file with the decoder's fields at the top.

    It is the text model's if the file says so.
    """
    text_only = raw.get(_TEXT_ONLY) or False
    if not isinstance(text_only, bool):
        raise bad_field(Fields(raw), _TEXT_ONLY, "true or false")
    model_type = raw["model_type"]
    if not text_only:
        return flat_fields(raw, model_type, left_out=(_TEXT_ONLY,))
    left_out = ("vision_config", *PLACEHOLDER_IDS, _TEXT_ONLY)
    return flat_fields(raw, _TEXT_TYPES[model_type], left_out=left_out)


def read_text(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the text model."""
    refuse(raw, **_FIXED)
    defaults = _DEFAULTS
    experts = None
    if "moe" in raw["model_type"]:
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


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` with a tower, the decoder's fields at the top."""
    config = read_text(raw)
    rotary_dim = int(config.head_dim * config.rope.partial_rotary)
    sections = read_sections(raw, rotary_dim)
    return replace(
        config,
        rope=replace(config.rope, sections=sections, interleaved_sections=True),
        vision=QWEN3_5_TOWER.read(raw, config.hidden_size),
    )


def write_text(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the text model."""
    architecture = "Qwen3_5ForCausalLM"
    experts = {}
    if config.experts is not None:
        architecture = "Qwen3_5MoeForCausalLM"
        experts = write_experts(config.experts)
    raw = write_common(config, architecture)
    raw |= {"hidden_act": "silu", "attention_bias": False}
    return raw | write_delta_net(config) | experts


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` with a tower, the decoder's fields at the top."""
    assert config.rope.sections is not None
    architecture = "Qwen3_5ForConditionalGeneration"
    if config.experts is not None:
        architecture = "Qwen3_5MoeForConditionalGeneration"

    raw = write_text(config)
    rope = raw.pop("rope_scaling") or {"rope_type": "default"}
    rope |= {
        "rope_theta": config.rope.theta,
        "partial_rotary_factor": config.rope.partial_rotary,
        "mrope_section": list(config.rope.sections),
        "mrope_interleaved": True,
    }
    raw |= {"architectures": [architecture], "rope_parameters": rope}
    return raw | QWEN3_5_TOWER.write(config)


def left_out_of_text(_: DecoderConfig) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors that the text model does not have."""
    return (PREDICTION_LAYERS, "model.visual.")


_INERT = (
    # Layers that predict further tokens.
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    # The type that engines keep states in; it is float32 here.
    "mamba_ssm_dtype",
)

FAMILY = ModelFamily(
    model_types=tuple(_TEXT_TYPES),
    read=read,
    write=write,
    inert=_INERT,
    names=SHARED_EXPERT,
    packed=DECAY,
    prefix="model.language_model.",
    flatten=flatten,
    nest=with_text_section,
    left_out=left_out,
    vision_names=QWEN3_5_TOWER.names,
)
TEXT_FAMILY = ModelFamily(
    model_types=tuple(_TEXT_TYPES.values()),
    read=read_text,
    write=write_text,
    # Axes of rotary positions are all equal in texts.
    inert=(*_INERT, "mrope_interleaved", "mrope_section"),
    names=SHARED_EXPERT,
    packed=DECAY,
    prefixes={"model.language_model.": "model."},
    left_out=left_out_of_text,
)
