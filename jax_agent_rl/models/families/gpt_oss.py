"""gpt-oss (``gpt_oss``): experts with biases and a clamped gate, attention sinks, windows.

Every other layer is windowed. The published weights hold the experts in MXFP4; they are read as
floats, and written so.
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.models.config import DecoderConfig, Experts, Rope, YarnScaling
from jax_agent_rl.models.families.hf_config import (
    ROPE_SECTIONS,
    Defaults,
    Fields,
    ModelFamily,
    all_but_every,
    integer,
    number,
    read_common,
    read_layer_kinds,
    read_rope,
    refuse,
    write_common,
    write_layer_kinds,
    write_scaling,
)
from jax_agent_rl.models.tensors import Packed

_FIXED = {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_YARN = YarnScaling(
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)
"""Scaling of files without rotary settings."""
_DEFAULTS = Defaults(
    num_kv_heads=8, head_dim=64, max_positions=131072, rms_norm_eps=1e-5, rope_theta=150000.0
)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, **_FIXED)
    _read_quantization(raw.section("quantization_config"))

    common = read_common(raw, _DEFAULTS)
    if any(raw.section(name) for name in ROPE_SECTIONS):
        rope = read_rope(raw, _DEFAULTS)
    else:
        rope = Rope(theta=number(raw, "rope_theta", _DEFAULTS.rope_theta), scaling=_YARN)
    count = common["num_layers"]
    return DecoderConfig(
        **common,
        rope=rope,
        qkv_bias=True,
        o_bias=True,
        attention_sinks=True,
        activation="clamped_swiglu",
        sliding_window=integer(raw, "sliding_window", 128),
        windowed_layers=read_layer_kinds(raw, count, default=all_but_every(2, count)),
        experts=Experts(
            count=integer(raw, "num_local_experts", 128),
            per_token=integer(raw, "num_experts_per_tok", 4),
            intermediate_size=common["intermediate_size"],
            normalize=True,  # a softmax over the chosen experts' scores is one over all, normalized
            bias=True,
        ),
    )


def _read_quantization(settings: Fields) -> None:
    """Check that weights are in MXFP4 if they are quantized at all."""
    refuse(settings, quant_method="mxfp4")
    # Read only to count as known: the tensors' names say which of them are quantized.
    settings.get("modules_to_not_convert")


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.experts is not None
    # An absent scaling would be YaRN.
    rope_scaling = write_scaling(config.rope) or {"rope_type": "default"}
    return write_common(config, "GptOssForCausalLM") | {
        "rope_scaling": rope_scaling,
        **_FIXED,
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_kinds(config),
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
    }


def _gate_or_up(number: int) -> Packed:
    """Return where the gate (0) or up (1) of the experts is: they share a tensor."""
    return Packed(
        name="mlp.experts.gate_up_proj",
        number=number,
        count=2,
        axis=2,
        interleaved=True,
        transposed=True,
    )


def _gate_or_up_bias(number: int) -> Packed:
    return Packed(
        name="mlp.experts.gate_up_proj_bias", number=number, count=2, axis=1, interleaved=True
    )


FAMILY = ModelFamily(
    model_types=("gpt_oss",),
    read=read,
    write=write,
    inert=("experts_per_token", "initial_context_length"),  # they repeat other fields
    names={"router": "mlp.router"},
    packed={
        "sinks": Packed(name="self_attn.sinks"),
        "expert_gate": _gate_or_up(0),
        "expert_up": _gate_or_up(1),
        "expert_down": Packed(name="mlp.experts.down_proj", transposed=True),
        "expert_gate_bias": _gate_or_up_bias(0),
        "expert_up_bias": _gate_or_up_bias(1),
        "expert_down_bias": Packed(name="mlp.experts.down_proj_bias"),
    },
)
