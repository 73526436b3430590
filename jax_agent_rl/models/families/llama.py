"""Llama 3.x and SmolLM2, and families that differ in little.

Qwen2.5 (``qwen2``) has biases on q, k and v. Qwen3 has norms on q and k instead, and Qwen3-MoE also
has experts. Mistral has a window in all layers (``mistral``) or in some (``ministral``).
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Experts
from jax_agent_rl.models.families.hf_config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Defaults,
    Fields,
    ModelFamily,
    bad_field,
    integer,
    read_common,
    read_layer_kinds,
    read_rope,
    refuse,
    switch,
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
    "qwen2": {"use_sliding_window": False, "use_mrope": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "qwen3_moe": {
        "use_sliding_window": False,
        "attention_bias": False,
        "decoder_sparse_step": 1,
    },
    "mistral": {},
    "ministral": {},
}
"""Fields with one supported value."""
_MISTRAL = Defaults(eos_token_ids=(2,), bos_token_id=1, num_kv_heads=8, max_positions=131072)
_DEFAULTS = {
    "llama": Defaults(eos_token_ids=(2,), bos_token_id=1),
    "qwen2": Defaults(num_kv_heads=32, max_positions=32768),
    "qwen3": Defaults(num_kv_heads=32, head_dim=128, max_positions=32768),
    "qwen3_moe": Defaults(num_kv_heads=4, max_positions=32768),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
}
# Of transformers' configurations of Mistral, where the field is absent; null is not a window.
_WINDOW = 4096


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    family = raw["model_type"]
    refuse(raw, hidden_act="silu", **_FIXED[family])
    defaults = _DEFAULTS[family]
    common = read_common(raw, defaults)
    common["rope"] = read_rope(raw, defaults)
    count = common["num_layers"]
    match family:
        case "qwen2":
            refuse(raw, layer_types=[FULL_ATTENTION] * count)
            return DecoderConfig(**common, qkv_bias=True)
        case "qwen3":
            refuse(raw, layer_types=[FULL_ATTENTION] * count)
            return DecoderConfig(**common, qk_norm=True)
        case "qwen3_moe":
            refuse(raw, layer_types=[FULL_ATTENTION] * count)
            return DecoderConfig(**common, qk_norm=True, experts=_read_experts(raw, count))
        case "mistral" | "ministral":
            return DecoderConfig(**common, **_read_window(raw, count))
    return DecoderConfig(**common)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    raw = write_common(config, _ARCHITECTURES[config.family])
    raw |= {"hidden_act": "silu", **_FIXED[config.family]}
    if config.family in ("mistral", "ministral"):
        raw["sliding_window"] = config.sliding_window
    if config.family == "ministral":
        raw["layer_types"] = write_layer_kinds(config)
    if config.experts is not None:
        raw |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.intermediate_size,
            "norm_topk_prob": config.experts.normalize,
            "mlp_only_layers": list(range(config.experts.first_dense_layers)),
        }
    return raw


def _read_experts(raw: Fields, num_layers: int) -> Experts:
    names = [name for name in ("num_experts", "num_local_experts") if name in raw]
    if not names:
        names = ["num_experts"]  # the error names it
    counts = {name: integer(raw, name) for name in names}
    if len(set(counts.values())) > 1:
        raise ModelError(f"config.json: {counts} name one number twice; remove one of them")
    return Experts(
        count=counts[names[0]],
        per_token=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        normalize=switch(raw, "norm_topk_prob", False),
        first_dense_layers=read_first_dense_layers(raw, num_layers),
    )


def read_first_dense_layers(raw: Fields, num_layers: int) -> int:
    """Read how many of the first layers have no experts; no other layers may lack them."""
    dense_layers = raw.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise bad_field(raw, "mlp_only_layers", "a list of layers or null")
    count = len(dense_layers)
    if dense_layers != list(range(count)) or count >= num_layers:
        raise ModelError(
            f"config.json: mlp_only_layers={dense_layers!r} is not supported, only the first layers"
            f" [0, 1, …] of {num_layers}, and not all of them"
        )
    return count


def _read_window(raw: Fields, count: int) -> dict[str, Any]:
    """Read which of ``count`` layers have a window, and its size."""
    all_windowed = raw.get("sliding_window", _WINDOW) is not None
    if raw["model_type"] == "mistral":
        kind = SLIDING_ATTENTION if all_windowed else FULL_ATTENTION
        refuse(raw, layer_types=[kind] * count)
        windowed = (all_windowed,) * count
    else:
        windowed = read_layer_kinds(raw, count, default=(all_windowed,) * count)
    if not any(windowed):
        return {}
    return {"sliding_window": integer(raw, "sliding_window", _WINDOW), "windowed_layers": windowed}


FAMILY = ModelFamily(model_types=("llama", "mistral", "ministral"), read=read, write=write)
QWEN_FAMILY = ModelFamily(
    model_types=("qwen2", "qwen3", "qwen3_moe"),
    read=read,
    write=write,
    inert=("max_window_layers", "sliding_window"),  # they need use_sliding_window, which is refused
)
