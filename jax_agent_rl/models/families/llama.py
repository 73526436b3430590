"""Llama 3.x and SmolLM2, Qwen2.5 (``qwen2``: biases on q, k, v), Qwen3 (norms on q and k instead) and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.families.common import ModelFamily, integer, read_common, refuse, write_common

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, hidden_act="silu")
    if raw["model_type"] == "llama":
        refuse(raw, attention_bias=False, mlp_bias=False)
        return DecoderConfig(**read_common(raw, eos=(2,)))
    refuse(raw, use_sliding_window=False)
    common = read_common(raw, eos=())
    if raw["model_type"] == "qwen2":
        return DecoderConfig(**common, qkv_bias=True)
    refuse(raw, attention_bias=False)
    if raw["model_type"] == "qwen3":
        return DecoderConfig(**common, qk_norm=True)
    return DecoderConfig(**common, qk_norm=True, experts=_read_experts(raw))


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    written = write_common(config, _ARCHITECTURES[config.family]) | {"hidden_act": "silu"}
    if config.family == "llama":
        return written | {"attention_bias": False, "mlp_bias": False}
    written["use_sliding_window"] = False
    if config.family != "qwen2":
        written["attention_bias"] = False
    if config.experts is not None:
        written |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.intermediate_size,
            "norm_topk_prob": config.experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return written


def _read_experts(raw: Mapping[str, Any]) -> Experts:
    refuse(raw, decoder_sparse_step=1, mlp_only_layers=[])
    name = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = Experts(
        count=integer(raw, name),
        per_token=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", False)),
    )
    if experts.per_token > experts.count:
        raise ModelError(f"config.json: num_experts_per_tok={experts.per_token} exceeds {name}={experts.count}")
    return experts


FAMILY = ModelFamily(model_types=tuple(_ARCHITECTURES), read=read, write=write)
