"""Qwen3-VL (``qwen3_vl``): Qwen3 with a tower for images, whose inner features go to the decoder's first layers.

Videos are not read: the model sees their frames as images between time stamps of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Params, VisionConfig
from jax_agent_rl.models.families.common import ModelFamily, bad_field, integer, refuse, section
from jax_agent_rl.models.families.qwen_vl import PLACEHOLDER_IDS, read_text, tower_names, write_nested

_LAYER = {
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
    "input_norm": "norm1",
    "post_attention_norm": "norm2",
}
_MERGER = {"norm": "norm", "in": "linear_fc1", "out": "linear_fc2"}
_TOP = {
    "patch_embed": "patch_embed.proj",
    "positions": "pos_embed",
    **{f"merger_{part}": f"merger.{module}" for part, module in _MERGER.items()},
    **{f"deepstack_{part}": f"deepstack_merger_list.{{}}.{module}" for part, module in _MERGER.items()},
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` of the family."""
    refuse(section(raw, "text_config"), attention_bias=False)
    common = read_text(raw, theta=500000.0)
    common["rope"] = replace(common["rope"], interleaved_sections=True)
    return DecoderConfig(**common, qk_norm=True, vision=_read_vision(raw, common["hidden_size"]))


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of the family."""
    assert config.vision is not None and config.rope.sections is not None
    sections = {"mrope_section": list(config.rope.sections), "mrope_interleaved": True}
    rope = {"rope_scaling": {"rope_type": "default", **sections}}
    text = {"model_type": "qwen3_vl_text", "attention_bias": False, **rope}
    return write_nested(config, "Qwen3VLForConditionalGeneration", text, _write_vision(config.vision))


def vision_names(config: VisionConfig) -> Params:
    """Return tensor names in the shape of ``params["vision"]``."""
    return tower_names(config, root="model.visual.", top=_TOP, layer=_LAYER)


def _read_vision(raw: Mapping[str, Any], out_size: int) -> VisionConfig:
    fields = section(raw, "vision_config")
    refuse(fields, hidden_act="gelu_pytorch_tanh", out_hidden_size=out_size)
    refuse(section(fields, "rope_parameters"), rope_type="axial", rope_theta=10000.0)
    depth, places = integer(fields, "depth"), integer(fields, "num_position_embeddings", 2304)
    if (side := round(places**0.5)) ** 2 != places:
        raise bad_field(fields, "num_position_embeddings", "a square number")
    deepstack = fields.get("deepstack_visual_indexes", [8, 16, 24])
    if not isinstance(deepstack, list | tuple) or not set(deepstack) <= set(range(depth)):
        raise bad_field(fields, "deepstack_visual_indexes", f"a list of layers from 0 to {depth - 1}")
    placeholders: dict[str, Any] = {name: integer(raw, name) for name in PLACEHOLDER_IDS}
    config = VisionConfig(
        num_layers=depth,
        hidden_size=integer(fields, "hidden_size"),
        intermediate_size=integer(fields, "intermediate_size"),
        num_heads=integer(fields, "num_heads"),
        out_size=out_size,
        in_channels=integer(fields, "in_channels", 3),
        patch_size=integer(fields, "patch_size", 16),
        temporal_patch_size=integer(fields, "temporal_patch_size", 2),
        merge_size=integer(fields, "spatial_merge_size", 2),
        window_size=None,
        tokens_per_second=None,
        layer_norm=True,
        gated=False,
        patch_bias=True,
        position_grid=side,
        deepstack_layers=tuple(deepstack),
        **placeholders,
    )
    if config.hidden_size % (4 * config.num_heads):
        raise ModelError(
            f"config.json: vision_config.hidden_size={config.hidden_size} is not a multiple of 4 x "
            f"num_heads={config.num_heads}; correct the file"
        )
    return config


def _write_vision(config: VisionConfig) -> dict[str, Any]:
    assert config.position_grid is not None
    return {
        "model_type": "qwen3_vl_vision",
        "depth": config.num_layers,
        "hidden_size": config.hidden_size,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "in_channels": config.in_channels,
        "patch_size": config.patch_size,
        "spatial_merge_size": config.merge_size,
        "temporal_patch_size": config.temporal_patch_size,
        "out_hidden_size": config.out_size,
        "num_position_embeddings": config.position_grid**2,
        "deepstack_visual_indexes": list(config.deepstack_layers),
    }


FAMILY = ModelFamily(
    model_types=("qwen3_vl",), read=read, write=write, prefix="model.language_model.", vision_names=vision_names
)
