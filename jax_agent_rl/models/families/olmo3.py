"""OLMo 3 (``olmo3``): norms of outputs alone, and of q and k over all heads at once.

Three of four layers are windowed. Positions of the others alone are scaled for long contexts.
"""

from __future__ import annotations

from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.hf_config import (
    Defaults,
    Fields,
    ModelFamily,
    all_but_every,
    bad_field,
    integer,
    read_common,
    read_layer_kinds,
    read_rope_section,
    read_rope_sections,
    refuse,
    write_common,
    write_layer_kinds,
    write_ropes,
)

_DEFAULTS = Defaults(eos_token_ids=(50279,), rms_norm_eps=1e-5, rope_theta=5e5)
_WINDOW = 4096


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    # transformers does not read the last one here, but in a section.
    refuse(raw, hidden_act="silu", attention_bias=False, original_max_position_embeddings=None)
    common = read_common(raw, _DEFAULTS)
    full, local = _rope_sections(raw)
    count = common["num_layers"]
    default_window = None if "sliding_window" in raw else _WINDOW  # null is not a window
    return DecoderConfig(
        **common,
        rope=read_rope_section(raw, full, _DEFAULTS),
        local_rope=read_rope_section(raw, local, _DEFAULTS),
        qk_norm=True,
        qk_norm_over="heads",
        norms="after",
        float32_norms=True,
        sliding_window=integer(raw, "sliding_window", default_window),
        windowed_layers=read_layer_kinds(raw, count, default=all_but_every(4, count)),
    )


def _rope_sections(raw: Fields) -> tuple[Fields, Fields]:
    """Return the rotary settings of full layers, and of windowed ones."""
    full, local = read_rope_sections(raw)
    has_other_theta = raw.get("rope_theta") not in (None, _DEFAULTS.rope_theta)
    if has_other_theta and "rope_theta" not in local:
        # It was the base of all layers before transformers 5, and is that of full layers since.
        raise bad_field(
            raw, "rope_theta", "500000, or rope_parameters with a rope_theta for each kind of layer"
        )
    return full, local


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    raw = write_common(config, "Olmo3ForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": False,
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_kinds(config),
        "rope_parameters": write_ropes(config),
    }
    for name in ("rope_scaling", "rope_theta"):
        del raw[name]
    return raw


FAMILY = ModelFamily(
    model_types=("olmo3",),
    read=read,
    write=write,
    names={"post_feedforward_norm": "post_feedforward_layernorm"},
)
