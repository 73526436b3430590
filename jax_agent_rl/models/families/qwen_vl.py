"""Qwen2.5-VL (``qwen2_5_vl``) and Qwen3-VL (``qwen3_vl``).

They are a vision tower before Qwen, whose rotary positions have three axes.

Several layouts of Qwen2.5-VL are read: published checkpoints have the decoder's fields at the top
of ``config.json`` and tensors ``visual.…`` and ``model.…``; newer transformers writes a
``text_config`` in addition or instead, and some versions wrote tensors ``model.visual.…`` and
``model.language_model.…``. We write a ``text_config`` and the published tensor names, as
transformers 5 does.

The inner features of Qwen3-VL's tower go to the decoder's first layers. Its videos are not read:
the model sees their frames as images between time stamps of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Rope
from jax_agent_rl.models.families.hf_config import (
    FULL_ATTENTION,
    INERT,
    ROPE_SECTIONS,
    Defaults,
    Fields,
    ModelFamily,
    bad_field,
    first_or_none,
    integer,
    number,
    read_common,
    refuse,
    switch,
    token_ids,
    write_common,
)
from jax_agent_rl.models.families.qwen_vision import (
    QWEN2_5_TOWER,
    QWEN3_TOWER,
    SHARED_FIELDS,
    read_sections,
    with_text_section,
)

_QWEN2_5_DEFAULTS = Defaults(
    eos_token_ids=(151645,),
    bos_token_id=151643,
    num_kv_heads=8,
    max_positions=32768,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
_QWEN3_DEFAULTS = Defaults(num_kv_heads=32, head_dim=128, max_positions=128000, rope_theta=500000.0)


def read(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of Qwen2.5-VL."""
    text = _text_section(raw)
    head_dim = integer(text, "hidden_size") // integer(text, "num_attention_heads")
    refuse(text, use_sliding_window=False, head_dim=head_dim)
    common = _read_text(raw, text, _QWEN2_5_DEFAULTS)
    refuse(text, layer_types=[FULL_ATTENTION] * common["num_layers"])
    vision = QWEN2_5_TOWER.read(raw, common["hidden_size"])
    return DecoderConfig(**common, qkv_bias=True, vision=vision)


def read_qwen3(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of Qwen3-VL."""
    text = _text_section(raw)
    refuse(text, attention_bias=False)
    common = _read_text(raw, text, _QWEN3_DEFAULTS)
    common["rope"] = replace(common["rope"], interleaved_sections=True)
    vision = QWEN3_TOWER.read(raw, common["hidden_size"])
    return DecoderConfig(**common, qk_norm=True, vision=vision)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of either family, with a ``text_config`` and a ``vision_config``."""
    assert config.vision is not None and config.rope.sections is not None
    sections = list(config.rope.sections)
    text: dict[str, Any] = {"hidden_act": "silu"}
    if config.vision.position_grid is None:
        architecture = "Qwen2_5_VLForConditionalGeneration"
        text["use_sliding_window"] = False
        text["rope_scaling"] = {"type": "mrope", "mrope_section": sections}
        tower = QWEN2_5_TOWER.write(config)
        tower["vision_config"]["in_chans"] = config.vision.in_channels
    else:
        architecture = "Qwen3VLForConditionalGeneration"
        text["attention_bias"] = False
        text["rope_scaling"] = {
            "rope_type": "default",
            "mrope_section": sections,
            "mrope_interleaved": True,
        }
        tower = QWEN3_TOWER.write(config)
    return with_text_section(write_common(config, architecture) | text | tower)


def _text_section(raw: Fields) -> Fields:
    """Return where a file has the decoder's fields: in ``text_config``, or at the top.

    Raises:
        ModelError: both have a field, with different values.
    """
    text = raw.section("text_config")
    if not text:
        return raw
    for name, value in raw.unread().items():
        if name not in text or name in SHARED_FIELDS or name in INERT:
            continue
        if raw[name] != text[name]:
            raise ModelError(
                f"config.json: {name}={value!r} differs from text_config.{name}={text[name]!r};"
                " remove one of them"
            )
    return text


def _read_text(raw: Fields, text: Fields, defaults: Defaults) -> dict[str, Any]:
    """Read the arguments of :class:`DecoderConfig` that all Qwen-VL share.

    Args:
        raw: a ``config.json``.
        text: where it has the decoder's fields.
    """
    refuse(text, hidden_act="silu")
    common = read_common(text, defaults, family=raw["model_type"])
    # The top wins, as for generation settings; older nested files have tie_word_embeddings only in
    # the section.
    common["tie_word_embeddings"] |= switch(raw, "tie_word_embeddings", False)
    if raw.get("eos_token_id") is not None:
        common["eos_token_ids"] = token_ids(raw, "eos_token_id", ())
    if raw.get("bos_token_id") is not None:
        common["bos_token_id"] = first_or_none(token_ids(raw, "bos_token_id", ()))

    interleaved = raw["model_type"] == "qwen3_vl"
    common["rope"] = _read_rope(text, defaults, common["head_dim"], interleaved=interleaved)
    return common


def _read_rope(text: Fields, defaults: Defaults, head_dim: int, *, interleaved: bool) -> Rope:
    """Read the rotary settings, of the kind ``mrope``: the default kind, on three axes."""
    sections = read_sections(text, head_dim, interleaved=interleaved)
    thetas = set()
    for name in ROPE_SECTIONS:
        rope = text.section(name)
        if not rope:
            continue
        for kind in ("type", "rope_type"):
            if rope.get(kind) not in (None, "default", "mrope"):
                raise bad_field(rope, kind, "'mrope' or 'default' in rope_scaling")
        refuse(rope, partial_rotary_factor=1.0)
        top_theta = number(text, "rope_theta", defaults.rope_theta)
        thetas.add(number(rope, "rope_theta", top_theta))
    if len(thetas) > 1:
        raise ModelError("config.json: rope_scaling and rope_parameters differ; remove one of them")
    return Rope(theta=thetas.pop(), sections=sections)


FAMILY = ModelFamily(
    model_types=("qwen2_5_vl",),
    read=read,
    write=write,
    # Windows need use_sliding_window, which is refused; spatial_patch_size repeats patch_size.
    inert=("max_window_layers", "sliding_window", "spatial_patch_size", "vision_token_id"),
    prefixes={"model.language_model.": "model.", "model.visual.": "visual."},
    vision_names=QWEN2_5_TOWER.names,
)
QWEN3_FAMILY = ModelFamily(
    model_types=("qwen3_vl",),
    read=read_qwen3,
    write=write,
    prefix="model.language_model.",
    vision_names=QWEN3_TOWER.names,
)
