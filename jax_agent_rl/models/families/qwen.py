"""Qwen2.5 (``qwen2``: biases on q, k, v), Qwen3 (norms on q and k instead) and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.families.common import read_common, write_common
from jax_agent_rl.models.fields import integer, refuse

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")
NAMES: Mapping[str, str] = {}
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    refuse(raw, use_sliding_window=False, hidden_act="silu")
    common = read_common(raw, eos=())
    if raw["model_type"] == "qwen2":
        return DecoderConfig(**common, qkv_bias=True)
    refuse(raw, attention_bias=False)
    if raw["model_type"] == "qwen3":
        return DecoderConfig(**common, qk_norm=True)
    return DecoderConfig(**common, qk_norm=True, experts=_read_experts(raw))


def write(config: DecoderConfig) -> dict[str, Any]:
    written = write_common(config, _ARCHITECTURES[config.family])
    written |= {"hidden_act": "silu", "use_sliding_window": False}
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
