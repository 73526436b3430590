"""Model families by model type, and ``config.json`` by its family."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.families.hf_config import (
    Fields,
    ModelFamily,
    carried_fields,
    merge_fields,
    refuse_unknown,
)


def _load_families() -> dict[str, ModelFamily]:
    """Return the families of all other modules of this package, by model type."""
    families = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name == Path(__file__).stem:
            continue
        module = importlib.import_module(f"{__package__}.{info.name}")
        for value in vars(module).values():
            if isinstance(value, ModelFamily):
                families |= dict.fromkeys(value.model_types, value)
    return families


FAMILIES: dict[str, ModelFamily] = _load_families()
"""By model type."""


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Parse the content of a ``config.json``; a null ``eos_token_id`` gives no EOS id.

    Raises:
        ModelError: the family is unknown, a field is missing, of a wrong type or has an unsupported
            value, or one is not known: it might change what the model computes.
    """
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise ModelError(
            f"config.json: model_type {name!r} is not supported; supported:"
            f" {', '.join(sorted(FAMILIES))}; docs/write/model.md shows how to add a family"
        )
    family = FAMILIES[name]
    if family.flatten is not None:
        raw = family.flatten(raw)
        family = FAMILIES[raw["model_type"]]
    fields = Fields(raw)
    config: DecoderConfig = family.read(fields)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}; correct the file"
        )
    experts = config.experts
    if experts is not None and experts.per_token > experts.count:
        raise ModelError(
            f"config.json: num_experts_per_tok={experts.per_token} exceeds the {experts.count}"
            " experts of a layer; correct the file"
        )

    unread = fields.unread()
    refuse_unknown(unread, family.inert)
    return replace(config, carried=carried_fields(unread))


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Return the content of a ``config.json``."""
    family = FAMILIES[config.family]
    raw = merge_fields(family.write(config), config.carried)
    if family.nest is not None:
        raw = family.nest(raw)
    return raw
