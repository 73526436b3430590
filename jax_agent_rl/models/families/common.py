"""Fields that every family's ``config.json`` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope
from jax_agent_rl.models.fields import integer, number, section, token_ids

_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_common(raw: Mapping[str, Any], *, eos: tuple[int, ...], tied: bool = False) -> dict[str, Any]:
    """The arguments of :class:`DecoderConfig` all families share.

    Args:
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
    """The shared fields; ``write`` of a family adds its own."""
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
    """Rotary settings from ``rope_theta`` and the ``rope_scaling`` (or newer ``rope_parameters``) of ``scaling``.

    Raises:
        ModelError: a kind of scaling that is not implemented.
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
    """``rope_scaling`` of a config.json."""
    match rope.scaling:
        case None:
            return None
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as scaling:
            return {"rope_type": "llama3"} | {name: getattr(scaling, name) for name in _LLAMA3_FIELDS}
