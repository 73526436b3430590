"""Reading Hugging Face's ``config.json``: typed fields with named errors, and the fields all families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope

_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read a positive integer; the default if absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_field(config, name, "a positive integer")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Read a positive number; the default if absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise bad_field(config, name, "a positive number")
    return float(value)


def token_ids(config: Mapping[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read a token id or a list of them; none if null."""
    value = config.get(name, default)
    ids = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise bad_field(config, name, "a token id, a list of them, or null")
    return ids


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an object; empty if absent or null."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise bad_field(config, name, "an object or null")
    return value


def refuse(config: Mapping[str, Any], **expected: Any) -> None:
    """Refuse fields with values other than the supported ones; absent and null fields pass.

    Raises:
        ModelError: a field has another value.
    """
    for name, value in expected.items():
        if config.get(name) not in (None, value):
            raise ModelError(f"config.json: {name}={config[name]!r} is not supported, only {value!r}")


def bad_field(config: Mapping[str, Any], name: str, expected: str) -> ModelError:
    """Make the error for a field that is missing or of a wrong type."""
    found = f"{name}={config[name]!r}" if name in config else f"{name} is missing"
    return ModelError(f"config.json: {found}, expected {expected}; correct the file or download the model again")


def read_common(raw: Mapping[str, Any], *, eos: tuple[int, ...], tied: bool = False) -> dict[str, Any]:
    """Read the arguments of :class:`DecoderConfig` that all families share.

    Args:
        raw: a ``config.json``.
        eos: the family's default where ``eos_token_id`` is absent.
        tied: the family's default of ``tie_word_embeddings``.
    """
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    return {
        "family": raw["model_type"],
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size"),
        "num_layers": integer(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", heads),
        "head_dim": integer(raw, "head_dim", hidden // heads),
        "rope": read_rope({**raw, **section(raw, "rope_parameters")}, scaling=raw),
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", tied)),
        "max_position_embeddings": integer(raw, "max_position_embeddings", 2048),
        "eos_token_ids": token_ids(raw, "eos_token_id", eos),
        "bos_token_id": next(iter(token_ids(raw, "bos_token_id", ())), None),
    }


def write_common(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """Write the shared fields; ``write`` of a family adds its own."""
    eos = list(config.eos_token_ids) if len(config.eos_token_ids) > 1 else next(iter(config.eos_token_ids), None)
    return {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "rope_scaling": write_scaling(config.rope),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": eos,
        "bos_token_id": config.bos_token_id,
    }


def read_rope(raw: Mapping[str, Any], *, scaling: Mapping[str, Any], theta: float = 10000.0) -> Rope:
    """Read rotary settings from ``rope_theta`` and the ``rope_scaling`` (or newer ``rope_parameters``) of ``scaling``.

    Raises:
        ModelError: the kind of scaling is not implemented.
    """
    fields = section(scaling, "rope_scaling") or section(scaling, "rope_parameters")
    kind = fields.get("rope_type", fields.get("type", "default"))
    base = number(raw, "rope_theta", theta)
    match kind:
        case "default":
            return Rope(theta=base)
        case "linear":
            return Rope(theta=base, scaling=LinearScaling(factor=number(fields, "factor")))
        case "llama3":
            return Rope(theta=base, scaling=Llama3Scaling(**{name: number(fields, name) for name in _LLAMA3_FIELDS}))
    raise ModelError(f"config.json: rope_scaling type {kind!r} is not supported, only 'linear' and 'llama3'")


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a ``config.json``."""
    match rope.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3"} | {name: getattr(scaling, name) for name in _LLAMA3_FIELDS}
