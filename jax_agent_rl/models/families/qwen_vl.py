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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Params, Rope, VisionConfig
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
from jax_agent_rl.models.tensors import Names

_SHARED_FIELDS = ("tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Fields at the top of a file as well as in its ``text_config``, where they may differ."""
_PLACEHOLDER_IDS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
_SIZES = {
    "depth": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_heads",
    "in_channels": "in_channels",
    "patch_size": "patch_size",
    "spatial_merge_size": "merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""From the fields of a ``vision_config`` to the fields of :class:`VisionConfig`."""
_DEFAULTS = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}


@dataclass(frozen=True, kw_only=True)
class _Tower:
    """A family's ``vision_config``, and the names of its tensors.

    Attributes:
        model_type: of the ``vision_config``.
        activation: its ``hidden_act``.
        sizes: from fields of the ``vision_config`` to fields of :class:`VisionConfig`.
        defaults: of sizes that may be absent.
        layers_field: the field of the ``vision_config`` that lists some layers.
        layers_attribute: the field of :class:`VisionConfig` with these layers.
        default_layers: where the list is absent.
        constants: fields of :class:`VisionConfig` that all towers of the family have.
        root: prefix of the tensors.
        top: modules by parameter, except layers; ``{}`` stands for the number in a stack.
        layer: modules of a layer by parameter.
    """

    model_type: str
    activation: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, int]
    layers_field: str
    layers_attribute: str
    default_layers: tuple[int, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    root: str
    top: Mapping[str, str]
    layer: Mapping[str, str]

    def read(self, raw: Fields, out_size: int, **family_fields: Any) -> VisionConfig:
        """Read the ``vision_config`` of a ``config.json``.

        Args:
            out_size: the decoder's ``hidden_size``.
            family_fields: fields of :class:`VisionConfig` that only this family has.
        """
        fields = raw.section("vision_config")
        refuse(fields, hidden_act=self.activation, out_hidden_size=out_size)
        refuse(fields.section("rope_parameters"), rope_type="axial", rope_theta=10000.0)

        sizes: dict[str, Any] = {}
        for name, attribute in self.sizes.items():
            sizes[attribute] = integer(fields, name, self.defaults.get(name))
        if "in_chans" in fields:  # the name of published files
            if "in_channels" in fields:
                refuse(fields, in_chans=sizes["in_channels"])
            else:
                sizes["in_channels"] = integer(fields, "in_chans")

        layers = fields.get(self.layers_field, self.default_layers)
        depth = sizes["num_layers"]
        if not isinstance(layers, list | tuple) or not set(layers) <= set(range(depth)):
            raise bad_field(fields, self.layers_field, f"a list of layers from 0 to {depth - 1}")

        placeholders: dict[str, Any] = {name: integer(raw, name) for name in _PLACEHOLDER_IDS}
        arguments = {
            **family_fields,
            self.layers_attribute: tuple(layers),
            **sizes,
            **self.constants,
            **placeholders,
        }
        config = VisionConfig(out_size=out_size, **arguments)
        if config.hidden_size % (4 * config.num_heads):
            raise ModelError(
                f"config.json: vision_config.hidden_size={config.hidden_size} is not a multiple of"
                f" 4 x num_heads={config.num_heads}; correct the file"
            )
        if not config.window_side:
            raise ModelError(
                f"config.json: vision_config.window_size={config.window_size} holds no square of "
                f"{config.patch_size * config.merge_size} pixels; correct the file"
            )
        return config

    def write(self, config: VisionConfig) -> dict[str, Any]:
        """Write a ``vision_config``."""
        written = {
            "model_type": self.model_type,
            "hidden_act": self.activation,
            "out_hidden_size": config.out_size,
        }
        for name, attribute in self.sizes.items():
            written[name] = getattr(config, attribute)
        written[self.layers_field] = list(getattr(config, self.layers_attribute))
        return written

    def names(self, config: VisionConfig) -> Params:
        """Return tensor names in the shape of ``params["vision"]``."""
        modules = dict(self.top)
        for key, module in self.layer.items():
            modules[key] = f"blocks.{{}}.{module}"

        def parameter_names(key: str, shape: Any) -> Names:
            parameter = key.removesuffix("_bias")
            suffix = "weight" if parameter == key else "bias"
            name = f"{self.root}{modules[parameter]}.{suffix}"
            if "{}" not in name:
                return name
            return [name.format(number) for number in range(shape[0])]

        shapes = config.parameter_shapes()
        layer_shapes = shapes.pop("layers")
        names: Params = {
            "layers": {key: parameter_names(key, shape) for key, shape in layer_shapes.items()}
        }
        for key, shape in shapes.items():
            names[key] = parameter_names(key, shape)
        return names


_ATTENTION = {
    "qkv": "attn.qkv",
    "o": "attn.proj",
    "input_norm": "norm1",
    "post_attention_norm": "norm2",
}
_QWEN2_5 = _Tower(
    model_type="qwen2_5_vl_vision",
    activation="silu",
    sizes=_SIZES | {"window_size": "window_size", "tokens_per_second": "tokens_per_second"},
    defaults=_DEFAULTS | {"patch_size": 14, "window_size": 112, "tokens_per_second": 4},
    layers_field="fullatt_block_indexes",
    layers_attribute="full_attention_layers",
    default_layers=(7, 15, 23, 31),
    root="visual.",
    top={
        "patch_embed": "patch_embed.proj",
        "merger_norm": "merger.ln_q",
        "merger_in": "merger.mlp.0",
        "merger_out": "merger.mlp.2",
    },
    layer=_ATTENTION | {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
)
_QWEN3 = _Tower(
    model_type="qwen3_vl_vision",
    activation="gelu_pytorch_tanh",
    sizes=_SIZES,
    defaults=_DEFAULTS | {"patch_size": 16},
    layers_field="deepstack_visual_indexes",
    layers_attribute="deepstack_layers",
    default_layers=(8, 16, 24),
    constants={
        "window_size": None,
        "tokens_per_second": None,
        "layer_norm": True,
        "gated": False,
        "patch_bias": True,
    },
    root="model.visual.",
    top={
        "patch_embed": "patch_embed.proj",
        "positions": "pos_embed",
        "merger_norm": "merger.norm",
        "merger_in": "merger.linear_fc1",
        "merger_out": "merger.linear_fc2",
        "deepstack_norm": "deepstack_merger_list.{}.norm",
        "deepstack_in": "deepstack_merger_list.{}.linear_fc1",
        "deepstack_out": "deepstack_merger_list.{}.linear_fc2",
    },
    layer=_ATTENTION | {"up": "mlp.linear_fc1", "down": "mlp.linear_fc2"},
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
    vision = _QWEN2_5.read(raw, common["hidden_size"])
    return DecoderConfig(**common, qkv_bias=True, vision=vision)


def read_qwen3(raw: Fields) -> DecoderConfig:
    """Read a ``config.json`` of Qwen3-VL."""
    text = _text_section(raw)
    refuse(text, attention_bias=False)
    common = _read_text(raw, text, _QWEN3_DEFAULTS)
    common["rope"] = replace(common["rope"], interleaved_sections=True)

    fields = raw.section("vision_config")
    positions = integer(fields, "num_position_embeddings", 2304)
    side = round(positions**0.5)
    if side**2 != positions:
        raise bad_field(fields, "num_position_embeddings", "a square number")
    vision = _QWEN3.read(raw, common["hidden_size"], position_grid=side)
    return DecoderConfig(**common, qk_norm=True, vision=vision)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Write a ``config.json`` of either family, with a ``text_config`` and a ``vision_config``."""
    assert config.vision is not None and config.rope.sections is not None
    sections = list(config.rope.sections)
    vision = config.vision
    text: dict[str, Any] = {"hidden_act": "silu"}
    if vision.position_grid is None:
        architecture = "Qwen2_5_VLForConditionalGeneration"
        text |= {"model_type": "qwen2_5_vl_text", "use_sliding_window": False}
        text["rope_scaling"] = {"type": "mrope", "mrope_section": sections}
        tower = _QWEN2_5.write(vision) | {"in_chans": vision.in_channels}
    else:
        architecture = "Qwen3VLForConditionalGeneration"
        text |= {"model_type": "qwen3_vl_text", "attention_bias": False}
        text["rope_scaling"] = {
            "rope_type": "default",
            "mrope_section": sections,
            "mrope_interleaved": True,
        }
        tower = _QWEN3.write(vision) | {"num_position_embeddings": vision.position_grid**2}

    common = write_common(config, architecture)
    top = {name: common.pop(name) for name in ("architectures", "model_type")}
    shared = {name: common[name] for name in _SHARED_FIELDS}
    placeholders = {name: getattr(vision, name) for name in _PLACEHOLDER_IDS}
    sections_of_file = {"text_config": common | text, "vision_config": tower}
    return top | shared | placeholders | sections_of_file


def _text_section(raw: Fields) -> Fields:
    """Return where a file has the decoder's fields: in ``text_config``, or at the top.

    Raises:
        ModelError: both have a field, with different values.
    """
    text = raw.section("text_config")
    if not text:
        return raw
    for name, value in raw.unread().items():
        if name not in text or name in _SHARED_FIELDS or name in INERT:
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
    names = [name for name in ROPE_SECTIONS if text.section(name)]
    if not names:
        names = [ROPE_SECTIONS[0]]  # the error names it

    ropes = []
    for name in names:
        section = text.section(name)
        for kind in ("type", "rope_type"):
            if section.get(kind) not in (None, "default", "mrope"):
                raise bad_field(section, kind, "'mrope' or 'default' in rope_scaling")
        refuse(section, mrope_interleaved=interleaved, partial_rotary_factor=1.0)
        top_theta = number(text, "rope_theta", defaults.rope_theta)
        theta = number(section, "rope_theta", top_theta)
        ropes.append(Rope(theta=theta, sections=_sections(section, head_dim)))
    if len(set(ropes)) > 1:
        raise ModelError("config.json: rope_scaling and rope_parameters differ; remove one of them")
    return ropes[0]


def _sections(rope: Fields, head_dim: int) -> tuple[int, int, int]:
    """Read how many frequencies time, row and column have."""
    value = rope.get("mrope_section")
    sizes = list(value) if isinstance(value, list | tuple) else []
    are_counts = len(sizes) == 3 and all(type(size) is int and size >= 0 for size in sizes)
    if not are_counts or 2 * sum(sizes) != head_dim:
        raise bad_field(
            rope, "mrope_section", f"three numbers that sum to head_dim / 2 = {head_dim / 2:g}"
        )
    return sizes[0], sizes[1], sizes[2]


FAMILY = ModelFamily(
    model_types=("qwen2_5_vl",),
    read=read,
    write=write,
    # Windows need use_sliding_window, which is refused; spatial_patch_size repeats patch_size.
    inert=("max_window_layers", "sliding_window", "spatial_patch_size", "vision_token_id"),
    prefixes={"model.language_model.": "model.", "model.visual.": "visual."},
    vision_names=_QWEN2_5.names,
)
QWEN3_FAMILY = ModelFamily(
    model_types=("qwen3_vl",),
    read=read_qwen3,
    write=write,
    prefix="model.language_model.",
    vision_names=_QWEN3.names,
)
