"""What Qwen-VL and Qwen3.5 share of their ``config.json``: vision towers and rotary sections.

Qwen3.5's tower is the one of Qwen3-VL, but gives the decoder no features of inner layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import DecoderConfig, Params, VisionConfig
from jax_agent_rl.models.families.hf_config import (
    ROPE_SECTIONS,
    Fields,
    bad_field,
    integer,
    refuse,
)
from jax_agent_rl.models.tensors import Names

SHARED_FIELDS = ("tie_word_embeddings", "eos_token_id", "bos_token_id")
"""Fields at the top of a file as well as in its ``text_config``, where they may differ."""
PLACEHOLDER_IDS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Fields at the top of a file, and of :class:`VisionConfig`."""
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
_DEEPSTACK = "deepstack_visual_indexes"


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A family's ``vision_config``, and the names of its tensors.

    Attributes:
        activation: its ``hidden_act``.
        sizes: from fields of the ``vision_config`` to fields of :class:`VisionConfig`.
        defaults: of sizes that may be absent.
        layers_field: the field of the ``vision_config`` that lists some layers.
        layers_attribute: the field of :class:`VisionConfig` with these layers.
        default_layers: where the list is absent.
        default_positions: learned positions where their number is absent; None if the tower has
            none.
        fixed: fields of the ``vision_config`` with one supported value.
        constants: fields of :class:`VisionConfig` that all towers of the family have.
        root: prefix of the tensors.
        top: modules by parameter, except layers; ``{}`` stands for the number in a stack.
        layer: modules of a layer by parameter.
    """

    activation: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, int]
    layers_field: str
    layers_attribute: str
    default_layers: tuple[int, ...]
    default_positions: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    root: str
    top: Mapping[str, str]
    layer: Mapping[str, str]

    def read(self, raw: Fields, out_size: int) -> VisionConfig:
        """Read the ``vision_config`` of a ``config.json``.

        Args:
            raw: the whole file.
            out_size: the decoder's ``hidden_size``.
        """
        fields = raw.section("vision_config")
        refuse(fields, hidden_act=self.activation, out_hidden_size=out_size, **self.fixed)
        refuse(fields.section("rope_parameters"), rope_type="axial", rope_theta=10000.0)

        sizes: dict[str, Any] = {}
        for name, attribute in self.sizes.items():
            sizes[attribute] = integer(fields, name, self.defaults.get(name))
        if "in_chans" in fields:  # the name of published files
            if "in_channels" in fields:
                refuse(fields, in_chans=sizes["in_channels"])
            else:
                sizes["in_channels"] = integer(fields, "in_chans")
        if self.default_positions is not None:
            sizes["position_grid"] = self._read_position_grid(fields)

        layers = fields.get(self.layers_field, self.default_layers)
        depth = sizes["num_layers"]
        if not isinstance(layers, list | tuple) or not set(layers) <= set(range(depth)):
            raise bad_field(fields, self.layers_field, f"a list of layers from 0 to {depth - 1}")

        placeholders: dict[str, Any] = {name: integer(raw, name) for name in PLACEHOLDER_IDS}
        arguments = {
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

    def _read_position_grid(self, fields: Fields) -> int:
        """Read the side of the square of learned positions from their number."""
        positions = integer(fields, "num_position_embeddings", self.default_positions)
        side = round(positions**0.5)
        if side**2 != positions:
            raise bad_field(fields, "num_position_embeddings", "a square number")
        return side

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the fields of a ``config.json`` about a model's tower, on its top level."""
        vision = config.vision
        assert vision is not None
        section = {
            "model_type": f"{config.family}_vision",
            "hidden_act": self.activation,
            "out_hidden_size": vision.out_size,
        }
        for name, attribute in self.sizes.items():
            section[name] = getattr(vision, attribute)
        section[self.layers_field] = list(getattr(vision, self.layers_attribute))
        if vision.position_grid is not None:
            section["num_position_embeddings"] = vision.position_grid**2

        placeholders = {name: getattr(vision, name) for name in PLACEHOLDER_IDS}
        return placeholders | {"vision_config": section}

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
QWEN2_5_TOWER = Tower(
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
QWEN3_TOWER = Tower(
    activation="gelu_pytorch_tanh",
    sizes=_SIZES,
    defaults=_DEFAULTS | {"patch_size": 16},
    layers_field=_DEEPSTACK,
    layers_attribute="deepstack_layers",
    default_layers=(8, 16, 24),
    default_positions=2304,
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
QWEN3_5_TOWER = replace(QWEN3_TOWER, default_layers=(), fixed={_DEEPSTACK: []})


def with_text_section(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with a tower whose text model has a ``text_config``.

    Args:
        fields: the same with the fields of the text model at the top.
    """
    top = {}
    text = {}
    for name, value in fields.items():
        is_of_tower = name == "vision_config" or name in PLACEHOLDER_IDS
        if name in ("architectures", "model_type") or is_of_tower:
            top[name] = value
            continue
        text[name] = value
        if name in SHARED_FIELDS:
            top[name] = value
    text["model_type"] = f"{fields['model_type']}_text"
    return top | {"text_config": text}


def read_sections(
    text: Fields, rotary_dim: int, *, interleaved: bool = True
) -> tuple[int, int, int]:
    """Read how many frequencies of the decoder's heads time, row and column have.

    Args:
        text: where a file has the decoder's fields.
        rotary_dim: numbers of a head that rotate.
        interleaved: whether the frequencies of the axes take turns.

    Raises:
        ModelError: they are missing, are not half of ``rotary_dim``, or stand in two sections of
            the file that differ.
    """
    ropes = [text.section(name) for name in ROPE_SECTIONS if text.section(name)]
    if not ropes:
        ropes = [text.section(ROPE_SECTIONS[0])]  # the error names it

    found = set()
    for rope in ropes:
        refuse(rope, mrope_interleaved=interleaved)
        found.add(_read_counts(rope, rotary_dim))
    if len(found) > 1:
        raise ModelError(
            f"config.json: {text.path}rope_scaling and rope_parameters differ in mrope_section;"
            " remove one of them"
        )
    return found.pop()


def _read_counts(rope: Fields, rotary_dim: int) -> tuple[int, int, int]:
    value = rope.get("mrope_section")
    sizes = list(value) if isinstance(value, list | tuple) else []
    are_counts = len(sizes) == 3 and all(type(size) is int and size >= 0 for size in sizes)
    if not are_counts or 2 * sum(sizes) != rotary_dim:
        expected = f"three numbers that sum to {rotary_dim / 2:g}"
        raise bad_field(rope, "mrope_section", f"{expected}, half of what rotates of a head")
    return sizes[0], sizes[1], sizes[2]
