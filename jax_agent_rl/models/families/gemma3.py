"""Gemma 3 text models (``gemma3_text``).

They have windowed layers between full ones, norms on both sides, and scaled embeddings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_agent_rl.models.config import DecoderConfig, Rope
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    all_but_every,
    bad_field,
    integer,
    number,
    read_common,
    read_layer_kinds,
    read_rope_section,
    read_rope_sections,
    refuse,
    write_common,
    write_layer_kinds,
    write_ropes,
)

_DEFAULTS = Defaults(
    eos_token_ids=(1,),
    bos_token_id=2,
    num_kv_heads=4,
    head_dim=256,
    max_positions=131072,
    tied=True,
    rope_theta=1e6,
)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(
        raw,
        attention_bias=False,
        hidden_activation="gelu_pytorch_tanh",
        use_bidirectional_attention=False,
    )
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(name) is not None:
            raise bad_field(raw, name, "null (Gemma 3 has no soft-capping)")

    full, local = read_rope_sections(raw)
    common = read_common(raw, _DEFAULTS)
    count = common["num_layers"]
    # Older files have sliding_window_pattern in place of layer_types: every n-th layer is a full
    # one.
    pattern = integer(raw, "sliding_window_pattern", 6)
    default_windowed = all_but_every(pattern, count)
    return DecoderConfig(
        **common,
        rope=read_rope_section(raw, full, _DEFAULTS),
        qk_norm=True,
        norm_offset=1.0,
        norms="around",
        activation="gelu_tanh",
        embed_scale=common["hidden_size"] ** 0.5,
        attention_scale=number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        sliding_window=integer(raw, "sliding_window", 4096),
        windowed_layers=read_layer_kinds(raw, count, default=default_windowed),
        local_rope=_read_local_rope(raw, local),
    )


def _read_local_rope(raw: Fields, section: Fields) -> Rope:
    """Read the rotary settings of windowed layers.

    Their base is called ``rope_local_base_freq`` at the top of older files.
    """
    top_theta = number(raw, "rope_local_base_freq", 10000.0)
    theta = number(section, "rope_theta", top_theta)
    return replace(read_rope_section(raw, section, _DEFAULTS), theta=theta)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.local_rope is not None and config.attention_scale is not None
    raw = write_common(config, "Gemma3ForCausalLM") | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": _without_rounding_error(config.attention_scale**-2),
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_kinds(config),
        "rope_local_base_freq": config.local_rope.theta,
    }
    if config.local_rope.scaling is None:
        return raw

    # Only the newer form has scaling of windowed layers.
    raw["rope_parameters"] = write_ropes(config)
    for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        del raw[name]
    return raw


def _without_rounding_error(value: float) -> float:
    """Return ``value`` without the error of the powers that gave it; an integer if it is one."""
    rounded = float(f"{value:.12g}")
    if rounded.is_integer():
        return int(rounded)
    return rounded


FAMILY = ModelFamily(
    model_types=("gemma3_text",),
    read=read,
    write=write,
    names={
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    },
)
