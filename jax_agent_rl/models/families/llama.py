"""Llama 3.x, SmolLM2, and everything of their shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.common import read_common, write_common
from jax_agent_rl.models.fields import refuse

MODEL_TYPES = ("llama",)
NAMES: Mapping[str, str] = {}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    refuse(raw, attention_bias=False, mlp_bias=False, hidden_act="silu")
    return DecoderConfig(**read_common(raw, eos=(2,)))


def write(config: DecoderConfig) -> dict[str, Any]:
    return write_common(config, "LlamaForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
