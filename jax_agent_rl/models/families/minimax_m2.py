"""MiniMax M2, M2.1 and M2.5 (``minimax_m2``): experts in all layers, norms over all heads at once.

The router scores each expert by itself, with a correction, and part of each head rotates. Published
weights are in FP8, in blocks; they are read as floats, and written so.
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    integer,
    read_common,
    read_fp8,
    read_rope,
    refuse,
    write_common,
)

_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    # of files with MiniMax's own code
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "swa_rope_theta": -1.0,
}
"""Fields with one supported value."""
_DEFAULTS = Defaults(
    eos_token_ids=(200020,),
    bos_token_id=200034,
    num_kv_heads=8,
    head_dim=128,
    max_positions=196608,
    rope_theta=5e6,
)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, **_FIXED)
    read_fp8(raw, fmt="float8_e4m3fn")
    common = read_common(raw, _DEFAULTS)
    refuse(raw, attn_type_list=[1] * common["num_layers"])  # 0 is MiniMax-01's linear attention

    partial_rotary = 1.0
    if raw.get("rotary_dim") is not None:
        partial_rotary = integer(raw, "rotary_dim") / common["head_dim"]
    return DecoderConfig(
        **common,
        rope=read_rope(raw, _DEFAULTS, partial_rotary=partial_rotary),
        qk_norm=True,
        qk_norm_over="heads",
        experts=_read_experts(raw, common["intermediate_size"]),
    )


def _read_experts(raw: Fields, size: int) -> Experts:
    count = integer(raw, "num_local_experts", 256)
    refuse(raw, num_experts=count)  # another name of the same
    return Experts(
        count=count,
        per_token=integer(raw, "num_experts_per_tok", 8),
        intermediate_size=size,
        normalize=True,
        scoring="sigmoid",
        correction=True,
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.experts is not None
    return write_common(config, "MiniMaxM2ForCausalLM") | {
        **_FIXED,
        "rotary_dim": int(config.head_dim * config.rope.partial_rotary),
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.per_token,
    }


FAMILY = ModelFamily(
    model_types=("minimax_m2",),
    read=read,
    write=write,
    inert=(
        # of dense, linear and shared layers, which there are none of
        "layernorm_linear_attention_beta",
        "mlp_intermediate_size",
        "shared_moe_mode",
        # of layers that predict further tokens, which published files do not hold
        "mtp_transformer_layers",
        "num_mtp_modules",
        "use_mtp",
    ),
    names={
        "router": "block_sparse_moe.gate",
        "router_correction": "block_sparse_moe.e_score_correction_bias",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1",
        "expert_up": "block_sparse_moe.experts.{expert}.w3",
        "expert_down": "block_sparse_moe.experts.{expert}.w2",
    },
)
