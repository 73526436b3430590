"""Gemma 3 text models (``gemma3_text``): windowed layers between full ones, norms on both sides, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.common import (
    ModelFamily,
    bad_field,
    integer,
    number,
    read_common,
    read_layer_kinds,
    read_rope,
    refuse,
    section,
    write_common,
    write_layer_kinds,
)


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, attention_bias=False, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(name) is not None:
            raise bad_field(raw, name, "null (Gemma 3 has no soft-capping)")
    full, local = (section(section(raw, "rope_parameters"), kind) for kind in ("full_attention", "sliding_attention"))
    # Older files have flat fields, newer ones a section per kind of layer.
    positions = {"max_position_embeddings": raw.get("max_position_embeddings")}
    rope_fields = {**positions, "rope_theta": raw.get("rope_theta"), **(full or section(raw, "rope_scaling"))}
    local_fields = {**positions, "rope_theta": raw.get("rope_local_base_freq"), **local}
    common = read_common({**raw, "rope_parameters": None, "rope_scaling": None}, eos=(1,), tied=True)
    common["rope"] = read_rope(rope_fields, theta=1e6)
    # Older files have sliding_window_pattern in place of layer_types: every n-th layer is a full one.
    count, pattern = common["num_layers"], integer(raw, "sliding_window_pattern", 6)
    return DecoderConfig(
        **common,
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        activation="gelu_tanh",
        embed_scale=common["hidden_size"] ** 0.5,
        attention_scale=number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        sliding_window=integer(raw, "sliding_window", 4096),
        windowed_layers=read_layer_kinds(raw, count, default=tuple(bool((i + 1) % pattern) for i in range(count))),
        local_rope=read_rope(local_fields),
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.local_rope is not None and config.attention_scale is not None
    return write_common(config, "Gemma3ForCausalLM") | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_kinds(config),
        "rope_local_base_freq": config.local_rope.theta,
    }


FAMILY = ModelFamily(
    model_types=("gemma3_text",),
    read=read,
    write=write,
    names={
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    },
)
