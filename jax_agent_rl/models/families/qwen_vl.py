"""Qwen2.5-VL (``qwen2_5_vl``): Qwen2.5 with a tower for images and videos, and rotary positions of three axes.

Several layouts are read: published checkpoints have the decoder's fields at the top of ``config.json`` and tensors
``visual.…`` and ``model.…``; newer transformers writes a ``text_config`` besides or instead, and some versions wrote
tensors ``model.visual.…`` and ``model.language_model.…``. Written are a ``text_config`` and the published tensor names,
as transformers 5 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Params, Rope, VisionConfig
from jax_agent_rl.models.families.common import (
    ModelFamily,
    bad_field,
    integer,
    read_common,
    refuse,
    section,
    write_common,
)
from jax_agent_rl.models.tensor_files import Names

_TOP_IDS = ("eos_token_id", "bos_token_id")
PLACEHOLDER_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_VISION_LAYER = {
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "norm1",
    "post_attention_norm": "norm2",
}
_VISION_TOP = {
    "patch_embed": "patch_embed.proj",
    "merger_norm": "merger.ln_q",
    "merger_in": "merger.mlp.0",
    "merger_out": "merger.mlp.2",
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    text = section(raw, "text_config") or raw
    head_dim = integer(text, "hidden_size") // integer(text, "num_attention_heads")
    refuse(text, use_sliding_window=False, head_dim=head_dim)
    common = read_text(raw, theta=1e6)
    return DecoderConfig(**common, qkv_bias=True, vision=_read_vision(raw, common["hidden_size"]))


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.vision is not None and config.rope.sections is not None
    text = {
        "model_type": "qwen2_5_vl_text",
        "use_sliding_window": False,
        "rope_scaling": {"type": "mrope", "mrope_section": list(config.rope.sections)},
    }
    return write_nested(config, "Qwen2_5_VLForConditionalGeneration", text, _write_vision(config.vision))


def vision_names(config: VisionConfig) -> Params:
    """Return tensor names in the shape of ``params["vision"]``."""
    return tower_names(config, root="visual.", top=_VISION_TOP, layer=_VISION_LAYER)


def read_text(raw: Mapping[str, Any], *, theta: float) -> dict[str, Any]:
    """Read the arguments of :class:`DecoderConfig` that all Qwen-VL share.

    Args:
        raw: a ``config.json``, with the decoder's fields in ``text_config`` or at the top.
        theta: the family's default of ``rope_theta``.
    """
    nested = section(raw, "text_config")
    # Top-level fields win, as for generation settings; older nested files have tie_word_embeddings only there.
    top = {name: raw[name] for name in _TOP_IDS if raw.get(name) is not None}
    tied = bool(raw.get("tie_word_embeddings") or nested.get("tie_word_embeddings"))
    text = {**(nested or raw), **top, "tie_word_embeddings": tied, "model_type": raw["model_type"]}
    refuse(text, hidden_act="silu")
    rope = _plain_rope(text, theta)
    common = read_common({**text, "rope_scaling": rope, "rope_parameters": rope}, eos=())
    common["rope"] = Rope(theta=common["rope"].theta, sections=_sections(rope, common["head_dim"]))
    return common


def write_nested(
    config: DecoderConfig, architecture: str, text: Mapping[str, Any], vision: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a ``config.json`` with a ``text_config`` and a ``vision_config``.

    Args:
        config: the model.
        architecture: transformers' class.
        text: the decoder's fields that are not in all families.
        vision: the tower's fields.
    """
    common = write_common(config, architecture) | {"hidden_act": "silu"}
    top = {name: common.pop(name) for name in ("architectures", "model_type")}
    shared = {name: common[name] for name in ("tie_word_embeddings", *_TOP_IDS)}
    placeholders = {name: getattr(config.vision, name) for name in PLACEHOLDER_IDS}
    return top | shared | placeholders | {"text_config": {**common, **text}, "vision_config": dict(vision)}


def tower_names(config: VisionConfig, *, root: str, top: Mapping[str, str], layer: Mapping[str, str]) -> Params:
    """Return tensor names of a tower in the shape of its parameters.

    Args:
        config: the tower.
        root: the prefix of its tensors.
        top: modules by parameter; of a stack with ``{}`` for the number.
        layer: the same of a layer.
    """

    def names(key: str, shape: Any) -> Names:
        module = key.removesuffix("_bias")
        name = f"{root}{top[module]}.{'weight' if module == key else 'bias'}"
        return [name.format(i) for i in range(shape[0])] if "{}" in name else name

    shapes = config.parameter_shapes()
    top = {**top, **{key: f"blocks.{{}}.{module}" for key, module in layer.items()}}
    layers = {key: names(key, shape) for key, shape in shapes.pop("layers").items()}
    return {"layers": layers} | {key: names(key, shape) for key, shape in shapes.items()}


def _plain_rope(text: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return the rotary fields without their kind ``mrope``, the default kind on three axes."""
    rope = section(text, "rope_scaling") or section(text, "rope_parameters")
    for name in ("type", "rope_type"):
        if rope.get(name) not in (None, "default", "mrope"):
            raise bad_field(rope, name, "'mrope' or 'default' in rope_scaling")
    return {"rope_theta": text.get("rope_theta") or theta} | {**rope, "type": "default", "rope_type": "default"}


def _sections(rope: Mapping[str, Any], head_dim: int) -> tuple[int, int, int]:
    found = rope.get("mrope_section")
    sizes = list(found) if isinstance(found, list | tuple) else []
    whole = len(sizes) == 3 and all(type(size) is int and size >= 0 for size in sizes)
    if not whole or 2 * sum(sizes) != head_dim:
        raise bad_field(rope, "mrope_section", f"three numbers that sum to head_dim / 2 = {head_dim / 2:g}")
    return sizes[0], sizes[1], sizes[2]


def _read_vision(raw: Mapping[str, Any], out_size: int) -> VisionConfig:
    fields = section(raw, "vision_config")
    refuse(fields, hidden_act="silu", out_hidden_size=out_size)
    refuse(section(fields, "rope_parameters"), rope_type="axial", rope_theta=10000.0)
    channels = "in_channels" if "in_channels" in fields else "in_chans"
    depth = integer(fields, "depth")
    placeholders: dict[str, Any] = {name: integer(raw, name) for name in PLACEHOLDER_IDS}
    config = VisionConfig(
        num_layers=depth,
        hidden_size=integer(fields, "hidden_size"),
        intermediate_size=integer(fields, "intermediate_size"),
        num_heads=integer(fields, "num_heads"),
        out_size=out_size,
        in_channels=integer(fields, channels, 3),
        patch_size=integer(fields, "patch_size", 14),
        temporal_patch_size=integer(fields, "temporal_patch_size", 2),
        merge_size=integer(fields, "spatial_merge_size", 2),
        window_size=integer(fields, "window_size", 112),
        full_attention_layers=_full_attention_layers(fields, depth),
        tokens_per_second=integer(fields, "tokens_per_second", 4),
        **placeholders,
    )
    if config.hidden_size % (4 * config.num_heads):
        raise ModelError(
            f"config.json: vision_config.hidden_size={config.hidden_size} is not a multiple of 4 x "
            f"num_heads={config.num_heads}; correct the file"
        )
    if not config.window_side:
        raise ModelError(
            f"config.json: vision_config.window_size={config.window_size} holds no square of "
            f"{config.patch_size * config.merge_size} pixels; correct the file"
        )
    return config


def _full_attention_layers(fields: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    found = fields.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(found, list | tuple) or not set(found) <= set(range(depth)):
        raise bad_field(fields, "fullatt_block_indexes", f"a list of layers from 0 to {depth - 1}")
    return tuple(found)


def _write_vision(config: VisionConfig) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl_vision",
        "depth": config.num_layers,
        "hidden_size": config.hidden_size,
        "hidden_act": "silu",
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "in_channels": config.in_channels,
        "in_chans": config.in_channels,
        "patch_size": config.patch_size,
        "spatial_merge_size": config.merge_size,
        "temporal_patch_size": config.temporal_patch_size,
        "tokens_per_second": config.tokens_per_second,
        "window_size": config.window_size,
        "out_hidden_size": config.out_size,
        "fullatt_block_indexes": list(config.full_attention_layers),
    }


FAMILY = ModelFamily(
    model_types=("qwen2_5_vl",),
    read=read,
    write=write,
    prefixes={"model.language_model.": "model.", "model.visual.": "visual."},
    vision_names=vision_names,
)
