"""Other values of a model config's fields, which an engine might have: generated from the dataclasses themselves.

A field is tried with what other models have (``USUAL``), with its default, and with values that
follow from its type:

==================  ==============================================
float               twice, half, ten times and a tenth of it
int                 one more, one less, twice, half
bool                the other one
Literal             the others
tuple[bool, ...]    moved along by one layer and more; all; none
X | None            None; and what other models have in its place
a dataclass         its fields, in turn
==================  ==============================================

So a new field is tried without being named here. ``UNVARIED`` has those that do not change what the
model computes, or cannot, each with the reason.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Params,
    Rope,
    YarnScaling,
)
from jax_agent_rl.models.parameters import Kind, parameter_at

_SHAPE = (
    "tensors of that size would not fit; layers left out and heads in another order are hypotheses"
    " about tensors"
)
_IMAGES = "of images; contexts with images are compared, but not diagnosed"
UNVARIED: Mapping[str, str] = {
    "DecoderConfig.family": (
        "names tensors in files; everything that is computed is in the other fields"
    ),
    "DecoderConfig.vocab_size": (
        f"{_SHAPE}; rows that pad a vocabulary are tried among the changes of logits"
    ),
    "DecoderConfig.hidden_size": _SHAPE,
    "DecoderConfig.intermediate_size": _SHAPE,
    "DecoderConfig.num_layers": _SHAPE,
    "DecoderConfig.num_heads": _SHAPE,
    "DecoderConfig.num_kv_heads": _SHAPE,
    "DecoderConfig.head_dim": _SHAPE,
    "Experts.count": _SHAPE,
    "Experts.intermediate_size": _SHAPE,
    "DecoderConfig.max_position_embeddings": (
        "bounds the length of contexts; scaling has a length of its own"
    ),
    "DecoderConfig.eos_token_ids": (
        "end generations; forbidden ids are tried among the changes of logits"
    ),
    "DecoderConfig.bos_token_id": (
        "begins contexts; tried among the ids that an engine may have seen"
    ),
    "DecoderConfig.tie_word_embeddings": "which head is read is tried on the last hidden states",
    "DecoderConfig.carried": "has no effect on what is computed",
    "DecoderConfig.vision": _IMAGES,
    "Rope.sections": _IMAGES,
    "Rope.interleaved_sections": _IMAGES,
}
"""By class and field, why it is not varied."""

THETAS = (1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)


def _attention_scales(model: DecoderConfig) -> Sequence[float]:
    sizes = (model.head_dim, model.hidden_size / model.num_heads, 256)
    return (*(size**-0.5 for size in sizes), 1 / model.head_dim, 1.0)


def _embed_scales(model: DecoderConfig) -> Sequence[float]:
    size = model.hidden_size**0.5
    return (1.0, size, float(jnp.bfloat16(size)))  # transformers rounds Gemma's


def _scalings(model: DecoderConfig) -> Sequence[Any]:
    longest = model.max_position_embeddings
    llama = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }
    return (
        *(LinearScaling(factor=factor) for factor in (2.0, 4.0, 8.0)),
        *(Llama3Scaling(factor=factor, **llama) for factor in (8.0, 32.0)),
        *(YarnScaling(factor=f, original_max_position_embeddings=longest / f) for f in (2.0, 4.0)),
        DynamicScaling(factor=2.0, trained_positions=longest, positions=2 * longest),
    )


def _plain_ropes(model: DecoderConfig) -> Sequence[Rope]:
    plain = Rope(partial_rotary=model.rope.partial_rotary, interleaved=model.rope.interleaved)
    return (plain,) if model.local_rope is None else (plain, model.local_rope)


USUAL: Mapping[str, Callable[[DecoderConfig], Sequence[Any]]] = {
    "DecoderConfig.rope": _plain_ropes,
    "DecoderConfig.local_rope": lambda model: [model.rope] if model.local_rope else [],
    "DecoderConfig.rms_norm_eps": lambda model: (1e-6, 1e-5, 1e-8, 1e-12, 1e-4, 1e-3, 1e-2, 0.0),
    "DecoderConfig.norm_offset": lambda model: (0.0, 1.0),
    "DecoderConfig.embed_scale": _embed_scales,
    "DecoderConfig.attention_scale": _attention_scales,
    "DecoderConfig.sliding_window": lambda model: (
        *(2**i for i in range(1, 17)),
        *(2**i - 1 for i in range(3, 17)),
    ),
    "DecoderConfig.experts": lambda model: (),
    "Rope.theta": lambda model: THETAS,
    "Rope.scaling": _scalings,
    "Rope.partial_rotary": lambda model: (1.0, 0.75, 0.5, 0.25),
    "YarnScaling.attention_factor": lambda model: (1.0,),
    "Experts.per_token": lambda model: (1, 2, 4, 8),
}
"""By class and field, values of known models."""


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A field of a config, or of a dataclass in it, with values that it might have instead.

    Attributes:
        path: in the config, such as ``rope.scaling.factor``.
        value: the model's.
        usual: what other models have, None, the default.
        derived: values that follow from its type.
        config_with: returns the config with another value.
    """

    path: str
    value: Any
    usual: tuple[Any, ...]
    derived: tuple[Any, ...]
    config_with: Callable[[Any], DecoderConfig]

    @property
    def is_number(self) -> bool:
        """Whether values between two that were tried may be tried, too."""
        return isinstance(self.value, float) and self.value > 0


def config_fields(model: DecoderConfig) -> list[ConfigField]:
    """Return every field with the values that it might have in an engine, all of which compute something else."""
    same = _normalized(model)
    found = []
    for field in _walk(model, model, "", lambda config: config):
        values: dict[str, list[Any]] = {"usual": [], "derived": []}
        tried = [same]
        for kind, candidates in (("usual", field.usual), ("derived", field.derived)):
            for value in candidates:
                config = _normalized(field.config_with(value))
                if config not in tried and is_complete(config):
                    tried.append(config)
                    values[kind].append(value)
        found.append(replace(field, usual=tuple(values["usual"]), derived=tuple(values["derived"])))
    return found


def _walk(
    model: DecoderConfig, owner: Any, prefix: str, rebuild: Callable[[Any], DecoderConfig]
) -> Iterator[ConfigField]:
    hints = typing.get_type_hints(type(owner))
    for field in fields(owner):
        key = f"{type(owner).__name__}.{field.name}"
        value = getattr(owner, field.name)
        if key in UNVARIED:
            continue

        def with_value(other: Any, name: str = field.name) -> DecoderConfig:
            return rebuild(replace(owner, **{name: other}))

        usual = list(USUAL[key](model)) if key in USUAL else []
        if field.default is not MISSING and not is_dataclass(field.default):
            usual.append(field.default)
        derived = list(_derived(hints[field.name], value))
        yield ConfigField(
            path=prefix + field.name,
            value=value,
            usual=tuple(usual),
            derived=tuple(derived),
            config_with=lambda other, change=with_value: _completed(change(other)),
        )
        if is_dataclass(value):
            yield from _walk(model, value, f"{prefix}{field.name}.", with_value)


def _derived(hint: Any, value: Any) -> Iterator[Any]:
    """Yield other values of a field's type; none of types that nothing is known of."""
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    if type(None) in options and value is not None:
        yield None
    for option in options:
        if option is type(None):
            continue
        if typing.get_origin(option) is Literal:
            yield from typing.get_args(option)
        elif option is bool:
            yield not value
        elif option is float:
            if value is not None:
                yield from (float(f"{value * times:.12g}") for times in (2.0, 0.5, 10.0, 0.1))
        elif option is int:
            if value is not None:
                yield from (
                    number for number in (value + 1, value - 1, 2 * value, value // 2) if number > 0
                )
        elif typing.get_origin(option) is tuple and typing.get_args(option) == (bool, ...):
            layers = value or ()
            yield from (layers[-i:] + layers[:-i] for i in range(1, min(len(layers), 9)))
            yield from ((True,) * len(layers), (False,) * len(layers))


def _completed(config: DecoderConfig) -> DecoderConfig:
    """Change what has to change together.

    The size of a window alone has no effect in a model without windowed layers: all get it. Both
    rotary tables rotate the same numbers.
    """
    if config.sliding_window is not None and not config.windowed_layers:
        config = replace(config, windowed_layers=(True,) * config.num_layers)
    if config.local_rope is not None:
        layout = {
            "partial_rotary": config.rope.partial_rotary,
            "interleaved": config.rope.interleaved,
        }
        config = replace(config, local_rope=replace(config.local_rope, **layout))
    return config


def _normalized(config: DecoderConfig) -> DecoderConfig:
    """Return the one config of all that compute the same."""
    windowed = (
        config.windowed_layers
        if config.sliding_window is not None and any(config.windowed_layers)
        else ()
    )
    return replace(
        config,
        attention_scale=config.score_scale,
        windowed_layers=windowed,
        sliding_window=config.sliding_window if windowed else None,
        local_rope=(config.local_rope or config.rope) if windowed else None,
    )


def is_complete(config: DecoderConfig) -> bool:
    """Return whether a config can be computed."""
    ropes = [config.rope, config.local_rope or config.rope]
    if any(
        not 0 < rope.partial_rotary <= 1 or int(config.head_dim * rope.partial_rotary) % 2
        for rope in ropes
    ):
        return False
    experts = config.experts
    if experts is not None and experts.per_token > experts.count:
        return False
    return all(rope.theta > 1 for rope in ropes) and config.rms_norm_eps >= 0


def fitted_params(model: DecoderConfig, params: Params, other: DecoderConfig) -> Params | None:
    """Return a model's weights as another config of it has them; None if it needs some that do not exist.

    What the other has no use for is left out. Norms, biases and sinks that it has besides are as
    they are made, the identity and zeros: an engine that loads nothing into them has the same.
    """
    shapes = other.layer_shapes()
    model_shapes = model.layer_shapes()
    layers = {}
    for name, shape in shapes.items():
        if model_shapes.get(name) == shape:
            layers[name] = params["layers"][name]
            continue
        kind = parameter_at(["layers", name]).kind
        if name in model_shapes or kind not in (Kind.NORM, Kind.BIAS, Kind.SINK):
            return None
        initial = 1.0 - other.norm_offset if kind is Kind.NORM else 0.0
        layers[name] = jnp.full((model.num_layers, *shape), initial, params["embed"].dtype)
    return params | {"layers": layers}
