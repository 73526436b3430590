"""Model families: Hugging Face's ``config.json`` to and from :class:`DecoderConfig`, and tensor names.

A family is a module with ``MODEL_TYPES``, ``read(raw) -> DecoderConfig`` and ``write(config) -> dict``; ``NAMES`` maps
this package's per-layer names to Hugging Face's, where they differ from the common ones. Vision families
also have ``vision_names(config.vision)``, names in the shape of ``params["vision"]``, and ``PREFIXES``, see there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families import gemma3, llama, qwen_vl

FAMILIES: dict[str, ModuleType] = {name: module for module in (llama, qwen_vl, gemma3) for name in module.MODEL_TYPES}


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Parse the content of a ``config.json``; a null ``eos_token_id`` gives no EOS id.

    Raises:
        ModelError: the family is unknown, or a field is missing, of a wrong type, or has an unsupported value.
    """
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise ModelError(f"config.json: model_type {name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    config: DecoderConfig = FAMILIES[name].read(raw)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}; correct the file"
        )
    return config


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Return the content of a ``config.json``."""
    return FAMILIES[config.family].write(config)
