"""Mistral and Ministral: Llama with a window, in all layers (``mistral``) or in some (``ministral``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.common import (
    LAYER_KINDS,
    ModelFamily,
    integer,
    read_common,
    read_layer_kinds,
    refuse,
    write_common,
)

_ARCHITECTURES = {"mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}
_WINDOW = 4096  # of transformers' configurations, where the field is absent; null is no window


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(raw, hidden_act="silu")
    common = read_common(raw, eos=(2,))
    count = common["num_layers"]
    window = None if raw.get("sliding_window", _WINDOW) is None else integer(raw, "sliding_window", _WINDOW)
    if raw["model_type"] == "mistral":
        refuse(raw, layer_types=["sliding_attention" if window else "full_attention"] * count)
        windowed = (window is not None,) * count
    else:
        windowed = read_layer_kinds(raw, count, default=(window is not None,) * count)
    if not any(windowed):
        return DecoderConfig(**common)
    return DecoderConfig(**common, sliding_window=integer(raw, "sliding_window", _WINDOW), windowed_layers=windowed)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    written = write_common(config, _ARCHITECTURES[config.family])
    if config.family == "ministral":
        written["layer_types"] = [LAYER_KINDS[config.is_windowed(i)] for i in range(config.num_layers)]
    return written | {"hidden_act": "silu", "sliding_window": config.sliding_window}


FAMILY = ModelFamily(model_types=tuple(_ARCHITECTURES), read=read, write=write)
