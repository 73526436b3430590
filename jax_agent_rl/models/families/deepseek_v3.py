"""DeepSeek-V3, V3.1 and R1 (``deepseek_v3``), and Kimi K2 (``kimi_k2``) of the same architecture.

They have latent attention, a few dense layers, then mixtures of experts with a shared expert, whose
router scores each expert by itself and may choose among groups of them. Published weights are in
FP8, in blocks; they are read as floats, and written so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_agent_rl.models.config import DecoderConfig, Experts, LatentAttention
from jax_agent_rl.models.families.grouped_experts import (
    read_grouped_experts,
    write_grouped_experts,
)
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    integer,
    read_common,
    read_fp8,
    read_rope,
    refuse,
    switch,
    write_common,
)

_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    # of files with DeepSeek's own code
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_DEFAULTS = Defaults(eos_token_ids=(1,), bos_token_id=0, max_positions=4096)
_EXPERTS = Experts(
    count=256,
    per_token=8,
    intermediate_size=2048,
    normalize=True,
    first_dense_layers=3,
    groups=8,
    groups_per_token=4,
    scale=2.5,
)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, **_FIXED)
    read_fp8(raw, fmt="e4m3")

    common = read_common(raw, _DEFAULTS)
    heads = common["num_heads"]
    refuse(raw, num_key_value_heads=heads)
    latent = LatentAttention(
        q_rank=_read_q_rank(raw),
        kv_rank=integer(raw, "kv_lora_rank", 512),
        nope_dim=integer(raw, "qk_nope_head_dim", 128),
        rope_dim=integer(raw, "qk_rope_head_dim", 64),
        value_dim=integer(raw, "v_head_dim", 128),
    )
    common |= {"num_kv_heads": heads, "head_dim": latent.head_dim}
    rope = replace(read_rope(raw, _DEFAULTS), interleaved=switch(raw, "rope_interleave", True))
    experts = read_grouped_experts(raw, common["num_layers"], _EXPERTS)
    return DecoderConfig(**common, rope=rope, latent=latent, experts=experts)


def _read_q_rank(raw: Fields) -> int | None:
    if raw.get("q_lora_rank", 1536) is None:
        return None
    return integer(raw, "q_lora_rank", 1536)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    latent = config.latent
    experts = config.experts
    assert latent is not None
    assert experts is not None
    return write_common(config, "DeepseekV3ForCausalLM") | {
        **_FIXED,
        "head_dim": latent.rope_dim,  # as transformers has it
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": config.rope.interleaved,
        **write_grouped_experts(experts),
    }


FAMILY = ModelFamily(
    model_types=("deepseek_v3", "kimi_k2"),
    read=read,
    write=write,
    # head_dim and qk_head_dim repeat other fields, the others are of training
    inert=("aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"),
)
