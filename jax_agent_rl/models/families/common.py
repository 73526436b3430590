"""Reading Hugging Face's ``config.json``: typed fields with named errors, and the fields all families share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Params,
    Rope,
    Scaling,
    VisionConfig,
    YarnScaling,
)
from jax_agent_rl.models.tensors import Packed


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family; ``docs/write/model.md`` tells how to add one.

    Attributes:
        model_types: of ``config.json``.
        read: parses a ``config.json``.
        write: writes one.
        names: Hugging Face's modules by parameter of a layer, where they differ from ``models.hf.LAYER``.
        packed: parameters of a layer that share a tensor, or are stored transposed; names without the layer's prefix.
        prefix: of the decoder's tensors.
        prefixes: how tensor names of newer files begin, and how published ones do.
        vision_names: where the vision tower's parameters are stored, in the shape of ``params["vision"]``.
    """

    model_types: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, Packed] = field(default_factory=dict)
    prefix: str = "model."
    prefixes: Mapping[str, str] = field(default_factory=dict)
    vision_names: Callable[[VisionConfig], Params] | None = None


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


def read_common(
    raw: Mapping[str, Any],
    *,
    eos: tuple[int, ...],
    tied: bool = False,
    theta: float = 10000.0,
    partial_rotary: float = 1.0,
) -> dict[str, Any]:
    """Read the arguments of :class:`DecoderConfig` that all families share.

    Args:
        raw: a ``config.json``.
        eos: the family's default where ``eos_token_id`` is absent.
        tied: the family's default of ``tie_word_embeddings``.
        theta: of ``rope_theta``.
        partial_rotary: of ``partial_rotary_factor``.
    """
    rope = {**raw, **section(raw, "rope_parameters"), **section(raw, "rope_scaling")}
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
        "rope": read_rope(rope, theta=theta, partial_rotary=partial_rotary),
        "rms_norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", tied)),
        "max_position_embeddings": integer(raw, "max_position_embeddings", 2048),
        "eos_token_ids": token_ids(raw, "eos_token_id", eos),
        "bos_token_id": next(iter(token_ids(raw, "bos_token_id", ())), None),
    }


_LAYER_KINDS = ("full_attention", "sliding_attention")


def read_layer_kinds(raw: Mapping[str, Any], count: int, *, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Read which of ``count`` layers are windowed from ``layer_types``; the default if absent or null."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in _LAYER_KINDS for kind in kinds):
        raise bad_field(raw, "layer_types", f"{count} of {list(_LAYER_KINDS)}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def write_layer_kinds(config: DecoderConfig) -> list[str]:
    """Return ``layer_types`` of a ``config.json``."""
    return [_LAYER_KINDS[config.is_windowed(i)] for i in range(config.num_layers)]


def write_common(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    """Write the shared fields; ``write`` of a family adds its own."""
    eos = list(config.eos_token_ids) if len(config.eos_token_ids) > 1 else next(iter(config.eos_token_ids), None)
    partial = {} if config.rope.partial_rotary == 1 else {"partial_rotary_factor": config.rope.partial_rotary}
    return partial | {
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


def read_rope(raw: Mapping[str, Any], *, theta: float = 10000.0, partial_rotary: float = 1.0) -> Rope:
    """Read rotary settings.

    Args:
        raw: a ``config.json`` with the fields of its ``rope_scaling`` (or newer ``rope_parameters``) at the top.
        theta: the family's default base.
        partial_rotary: the family's default fraction of a head.

    Raises:
        ModelError: the kind of scaling is not implemented.
    """
    return Rope(
        theta=number(raw, "rope_theta", theta),
        scaling=_read_scaling(raw),
        partial_rotary=number(raw, "partial_rotary_factor", partial_rotary),
    )


def _read_scaling(raw: Mapping[str, Any]) -> Scaling | None:
    match kind := raw.get("rope_type", raw.get("type", "default")):
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=number(raw, "factor"))
        case "llama3":
            return Llama3Scaling(**{name: number(raw, name) for name in _LLAMA3_FIELDS})
        case "yarn":
            return _read_yarn(raw)
        case "dynamic":
            longest = integer(raw, "max_position_embeddings", 2048)
            trained = integer(raw, "max_trained_positions", longest)
            return DynamicScaling(factor=number(raw, "factor"), trained_positions=trained, positions=longest)
    raise ModelError(
        f"config.json: rope_scaling type {kind!r} is not supported, only 'linear', 'llama3', 'yarn' and 'dynamic'"
    )


def _read_yarn(raw: Mapping[str, Any]) -> YarnScaling:
    longest = integer(raw, "max_position_embeddings", 2048)
    original = number(raw, "original_max_position_embeddings", longest)
    factor = number(raw, "factor", longest / original)
    given = raw.get("attention_factor")
    attention_factor = None if given is None else number(raw, "attention_factor")
    if given is None and raw.get("mscale") and raw.get("mscale_all_dim"):
        stretched = [0.1 * number(raw, name) * math.log(factor) + 1 for name in ("mscale", "mscale_all_dim")]
        attention_factor = stretched[0] / stretched[1]
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=number(raw, "beta_fast", 32.0),
        beta_slow=number(raw, "beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=bool(raw.get("truncate", True)),
    )


def write_scaling(rope: Rope) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of a ``config.json``."""
    match rope.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3"} | {name: getattr(scaling, name) for name in _LLAMA3_FIELDS}
        case YarnScaling() as scaling:
            fields = {name: value for name, value in asdict(scaling).items() if value is not None}
            return {"rope_type": "yarn"} | fields
        case DynamicScaling(factor=factor, trained_positions=trained):
            return {"rope_type": "dynamic", "factor": factor, "max_trained_positions": trained}
