"""Llama 3.x and SmolLM2, and families that differ in little.

Qwen2.5 (``qwen2``) has biases on q, k, v; Qwen3 norms on q and k instead, and Qwen3-MoE experts; Mistral a window in
all layers (``mistral``) or in some (``ministral``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.families.common import (
    ModelFamily,
    integer,
    read_common,
    read_layer_kinds,
    refuse,
    write_common,
    write_layer_kinds,
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
}
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "qwen3_moe": {
        "use_sliding_window": False,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mistral": {},
    "ministral": {},
}
"""Fields with one supported value."""
_WINDOW = 4096  # of transformers' configurations of Mistral, where the field is absent; null is no window


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    family = raw["model_type"]
    refuse(raw, hidden_act="silu", **_FIXED[family])
    common = read_common(raw, eos=() if family.startswith("qwen") else (2,))
    match family:
        case "qwen2":
            return DecoderConfig(**common, qkv_bias=True)
        case "qwen3":
            return DecoderConfig(**common, qk_norm=True)
        case "qwen3_moe":
            return DecoderConfig(**common, qk_norm=True, experts=_read_experts(raw))
        case "mistral" | "ministral":
            return DecoderConfig(**common, **_read_window(raw, common["num_layers"]))
    return DecoderConfig(**common)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    written = write_common(config, _ARCHITECTURES[config.family]) | {"hidden_act": "silu"} | _FIXED[config.family]
    if config.family in ("mistral", "ministral"):
        written["sliding_window"] = config.sliding_window
    if config.family == "ministral":
        written["layer_types"] = write_layer_kinds(config)
    if config.experts is not None:
        written |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.intermediate_size,
            "norm_topk_prob": config.experts.normalize,
        }
    return written


def _read_experts(raw: Mapping[str, Any]) -> Experts:
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


def _read_window(raw: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Read which of ``count`` layers have a window, and its size."""
    all_windowed = raw.get("sliding_window", _WINDOW) is not None
    if raw["model_type"] == "mistral":
        refuse(raw, layer_types=["sliding_attention" if all_windowed else "full_attention"] * count)
        windowed = (all_windowed,) * count
    else:
        windowed = read_layer_kinds(raw, count, default=(all_windowed,) * count)
    if not any(windowed):
        return {}
    return {"sliding_window": integer(raw, "sliding_window", _WINDOW), "windowed_layers": windowed}


FAMILY = ModelFamily(model_types=tuple(_ARCHITECTURES), read=read, write=write)
