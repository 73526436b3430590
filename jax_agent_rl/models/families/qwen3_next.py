"""Qwen3-Next (``qwen3_next``): three layers of four are delta nets, the others gated attention.

A quarter of each head rotates, norms multiply by 1 + weight, and all layers have experts beside a
shared one with a gate. Layers that predict further tokens are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, DeltaNet, Experts
from jax_agent_rl.models.families.hf_config import (
    LINEAR_ATTENTION,
    Defaults,
    Fields,
    ModelFamily,
    all_but_every,
    integer,
    read_common,
    read_layer_kinds,
    read_rope,
    refuse,
    switch,
    write_common,
    write_layer_kinds,
)
from jax_agent_rl.models.families.llama import read_first_dense_layers
from jax_agent_rl.models.tensors import Packed

PREDICTION_LAYERS = "mtp."
"""Beginning of the names of tensors of layers that predict further tokens."""
SHARED_EXPERT = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_router": "mlp.shared_expert_gate",
}

_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
}
"""Fields with one supported value."""
_DEFAULTS = Defaults(num_kv_heads=2, head_dim=256, max_positions=32768, intermediate_size=5632)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, **_FIXED)
    common = read_common(raw, _DEFAULTS)
    count = common["num_layers"]
    experts = read_experts(raw, count=512, per_token=10)
    experts = replace(
        experts,
        normalize=switch(raw, "norm_topk_prob", True),
        first_dense_layers=read_first_dense_layers(raw, count),
    )
    return DecoderConfig(
        **common,
        rope=read_rope(raw, _DEFAULTS, partial_rotary=0.25),
        qk_norm=True,
        attention_gate=True,
        norm_offset=1.0,
        delta_net=read_delta_net(raw, count, fused=True),
        experts=experts,
    )


def read_experts(raw: Fields, *, count: int, per_token: int) -> Experts:
    """Read the experts that Qwen3-Next and Qwen3.5 have.

    Args:
        count: of experts, if the file does not say it; ``per_token`` as well.
    """
    return Experts(
        count=integer(raw, "num_experts", count),
        per_token=integer(raw, "num_experts_per_tok", per_token),
        intermediate_size=integer(raw, "moe_intermediate_size", 512),
        normalize=True,
        shared_size=integer(raw, "shared_expert_intermediate_size", 512),
        shared_gated=True,
    )


def read_delta_net(raw: Fields, count: int, *, fused: bool) -> DeltaNet | None:
    """Read which of ``count`` layers are delta nets, and their sizes; None if no layer is.

    Args:
        fused: see :class:`DeltaNet`.
    """
    default_layers = all_but_every(integer(raw, "full_attention_interval", 4), count)
    layers = read_layer_kinds(raw, count, default=default_layers, kind=LINEAR_ATTENTION)
    delta_net = DeltaNet(
        layers=layers,
        key_heads=integer(raw, "linear_num_key_heads", 16),
        value_heads=integer(raw, "linear_num_value_heads", 32),
        key_dim=integer(raw, "linear_key_head_dim", 128),
        value_dim=integer(raw, "linear_value_head_dim", 128),
        conv_kernel=integer(raw, "linear_conv_kernel_dim", 4),
        fused=fused,
    )
    if delta_net.value_heads % delta_net.key_heads:
        raise ModelError(
            f"config.json: {raw.path}linear_num_value_heads={delta_net.value_heads} is not a"
            f" multiple of linear_num_key_heads={delta_net.key_heads}; correct the file"
        )
    if not any(layers):
        return None
    return delta_net


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.experts is not None
    return (
        write_common(config, "Qwen3NextForCausalLM")
        | _FIXED
        | write_delta_net(config)
        | write_experts(config.experts)
        | {
            "norm_topk_prob": config.experts.normalize,
            "mlp_only_layers": list(range(config.experts.first_dense_layers)),
        }
    )


def write_delta_net(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of delta nets, and of what rotates in the other layers."""
    fields: dict[str, Any] = {
        "layer_types": write_layer_kinds(config),
        "partial_rotary_factor": config.rope.partial_rotary,
    }
    if config.delta_net is None:
        return fields
    return fields | {
        "linear_num_key_heads": config.delta_net.key_heads,
        "linear_num_value_heads": config.delta_net.value_heads,
        "linear_key_head_dim": config.delta_net.key_dim,
        "linear_value_head_dim": config.delta_net.value_dim,
        "linear_conv_kernel_dim": config.delta_net.conv_kernel,
    }


def write_experts(experts: Experts) -> dict[str, Any]:
    """Return the fields of experts that Qwen3-Next and Qwen3.5 have."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "shared_expert_intermediate_size": experts.shared_size,
    }


DECAY = {
    "delta_decay_log": Packed(name="linear_attn.A_log"),
    "delta_decay_bias": Packed(name="linear_attn.dt_bias"),
}
"""Parameters whose tensors are named neither weight nor bias."""


def left_out(_: DecoderConfig) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors that are not read."""
    return (PREDICTION_LAYERS,)


FAMILY = ModelFamily(
    model_types=("qwen3_next",),
    read=read,
    write=write,
    names=SHARED_EXPERT,
    packed=DECAY,
    left_out=left_out,
)
