"""Other values of a model config's fields, which an engine might have.

They are generated from the dataclasses themselves. A field is tried with what other models have
(``USUAL``), with its default, and with values that follow from its type:

==================  ==============================================
float               twice, half, ten times and a tenth of it
int                 one more, one less, twice, half
bool                the other one
Literal             the others
tuple[bool, ...]    moved along by one layer and more; all; none
X | None            None; and what other models have in its place
a dataclass         its fields, in turn
==================  ==============================================

So a new field is tried without being named here. ``UNVARIED`` has the fields that do not change
what the model computes, or cannot be varied, each with the reason.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp

from jax_agent_rl.errors import ModelError
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    Experts,
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
_IMAGES = "concerns images; contexts with images are compared, but not diagnosed"
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
    "Experts.first_dense_layers": _SHAPE,
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
    "DecoderConfig.float32_norms": "changes roundings alone",
    "DecoderConfig.shared_kv_layers": _SHAPE,
    "DecoderConfig.wide_shared_layers": _SHAPE,
    "GlobalAttention.num_kv_heads": _SHAPE,
    "GlobalAttention.head_dim": _SHAPE,
    "GlobalAttention.keys_as_values": _SHAPE,
    "PerLayerInputs.vocab_size": _SHAPE,
    "PerLayerInputs.size": _SHAPE,
    "DecoderConfig.logit_softcap": "caps are tried among the changes of logits",
    "DecoderConfig.carried": "has no effect on what is computed",
    "DecoderConfig.vision": _IMAGES,
    "LatentAttention.q_rank": _SHAPE,
    "LatentAttention.kv_rank": _SHAPE,
    "LatentAttention.nope_dim": _SHAPE,
    "LatentAttention.rope_dim": _SHAPE,
    "LatentAttention.value_dim": _SHAPE,
    "DecoderConfig.latent": "other attention has other tensors",
    "DecoderConfig.delta_net": "a delta net has other tensors than attention",
    "Rope.sections": _IMAGES,
    "Rope.interleaved_sections": _IMAGES,
}
"""By class and field, why it is not varied."""

THETAS = (1e3, 1e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)


def _attention_scales(model: DecoderConfig) -> Sequence[float]:
    return (
        model.head_dim**-0.5,
        (model.hidden_size / model.num_heads) ** -0.5,
        256**-0.5,
        1 / model.head_dim,
        1.0,
    )


def _embed_scales(model: DecoderConfig) -> Sequence[float]:
    size = model.hidden_size**0.5
    return (1.0, size, float(jnp.bfloat16(size)))  # transformers rounds Gemma's


def _scalings(model: DecoderConfig) -> Sequence[Any]:
    longest = model.max_position_embeddings
    scalings: list[Any] = [LinearScaling(factor=factor) for factor in (2.0, 4.0, 8.0)]
    for factor in (8.0, 32.0):
        scaling = Llama3Scaling(
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192.0,
        )
        scalings.append(scaling)
    for factor in (2.0, 4.0):
        original = longest / factor
        scalings.append(YarnScaling(factor=factor, original_max_position_embeddings=original))
    scalings.append(DynamicScaling(factor=2.0, trained_positions=longest, positions=2 * longest))
    return scalings


def _ropes(model: DecoderConfig) -> Sequence[Rope]:
    """Return a plain rope, and the rope of windowed layers if they have another."""
    plain = Rope(partial_rotary=model.rope.partial_rotary, interleaved=model.rope.interleaved)
    if model.local_rope is None:
        return [plain]
    return [plain, model.local_rope]


def _local_ropes(model: DecoderConfig) -> Sequence[Rope]:
    if model.local_rope is None:
        return []
    return [model.rope]


def _windows(model: DecoderConfig) -> Sequence[int]:
    """Return the powers of two, and one less, which off-by-one errors make of them."""
    sizes = [2**i for i in range(1, 17)]
    sizes += [2**i - 1 for i in range(3, 17)]
    return sizes


USUAL: Mapping[str, Callable[[DecoderConfig], Sequence[Any]]] = {
    "DecoderConfig.rope": _ropes,
    "DecoderConfig.local_rope": _local_ropes,
    "DecoderConfig.rms_norm_eps": lambda model: (1e-6, 1e-5, 1e-8, 1e-12, 1e-4, 1e-3, 1e-2, 0.0),
    "DecoderConfig.norm_offset": lambda model: (0.0, 1.0),
    "DecoderConfig.embed_scale": _embed_scales,
    "DecoderConfig.attention_scale": _attention_scales,
    "DecoderConfig.sliding_window": _windows,
    "DecoderConfig.experts": lambda model: (),
    "Rope.theta": lambda model: THETAS,
    "Rope.scaling": _scalings,
    "Rope.partial_rotary": lambda model: (1.0, 0.75, 0.5, 0.25),
    "YarnScaling.attention_factor": lambda model: (1.0,),
    "YarnScaling.mscale": lambda model: (1.0,),
    "YarnScaling.mscale_all_dim": lambda model: (1.0,),
    "Experts.per_token": lambda model: (1, 2, 4, 8),
    "Experts.shared_size": lambda model: (0,),
}
"""By class and field, values of known models."""


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A field of a config, or of a dataclass in it, with values that it might have instead.

    Attributes:
        path: path in the config, such as ``rope.scaling.factor``.
        value: the model's value.
        usual: values that other models have, and the default.
        derived: values that follow from its type.
        config_with: returns the config with another value of the field.
    """

    path: str
    value: Any
    usual: tuple[Any, ...]
    derived: tuple[Any, ...]
    config_with: Callable[[Any], DecoderConfig]

    @property
    def is_number(self) -> bool:
        """Whether values between two others may be tried as well."""
        return isinstance(self.value, float) and self.value > 0


def config_fields(model: DecoderConfig) -> list[ConfigField]:
    """Return every field with the values that an engine might have instead.

    Each value makes the model compute something else than the model's own and than values before.
    """
    config_fields = []
    for field in _walk(model, model, "", lambda config: config):
        known = [_normalized(model)]
        usual = _distinct(field, field.usual, known)
        derived = _distinct(field, field.derived, known)
        config_fields.append(replace(field, usual=usual, derived=derived))
    return config_fields


def _distinct(
    field: ConfigField, values: Sequence[Any], known: list[DecoderConfig]
) -> tuple[Any, ...]:
    """Return the values that compute something new, and add their configs to ``known``."""
    distinct = []
    for value in values:
        try:
            config = _normalized(field.config_with(value))
        except ModelError:  # no engine can have what no config can be
            continue
        if config not in known and is_complete(config):
            known.append(config)
            distinct.append(value)
    return tuple(distinct)


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

        def config_with(
            other: Any, with_value: Callable[[Any], DecoderConfig] = with_value
        ) -> DecoderConfig:
            return _completed(with_value(other))

        usual: list[Any] = []
        if key in USUAL:
            usual += USUAL[key](model)
        if field.default is not MISSING and not is_dataclass(field.default):
            usual.append(field.default)
        yield ConfigField(
            path=prefix + field.name,
            value=value,
            usual=tuple(usual),
            derived=tuple(_derived(hints[field.name], value)),
            config_with=config_with,
        )
        if is_dataclass(value):
            yield from _walk(model, value, f"{prefix}{field.name}.", with_value)


def _derived(hint: Any, value: Any) -> Iterator[Any]:
    """Yield other values of a field's type; none for a type without a rule."""
    options: tuple[Any, ...] = (hint,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
    if type(None) in options and value is not None:
        yield None

    for option in options:
        if option is type(None):
            continue
        if typing.get_origin(option) is Literal:
            yield from typing.get_args(option)
        elif option is bool:
            yield not value
        elif option is float and value is not None:
            for factor in (2.0, 0.5, 10.0, 0.1):
                yield float(f"{value * factor:.12g}")
        elif option is int and value is not None:
            for number in (value + 1, value - 1, 2 * value, value // 2):
                if number > 0:
                    yield number
        elif typing.get_origin(option) is tuple and typing.get_args(option) == (bool, ...):
            layers = value or ()
            for i in range(1, min(len(layers), 9)):
                yield layers[-i:] + layers[:-i]
            yield (True,) * len(layers)
            yield (False,) * len(layers)


def _completed(config: DecoderConfig) -> DecoderConfig:
    """Change what has to change together.

    The size of a window alone has no effect in a model without windowed layers, so all layers get
    it. Both rotary tables rotate the same numbers. A gate goes with its shared expert.
    """
    if config.sliding_window is not None and not config.windowed_layers:
        config = replace(config, windowed_layers=(True,) * config.num_layers)
    if config.local_rope is not None:
        local_rope = replace(
            config.local_rope,
            partial_rotary=config.rope.partial_rotary,
            interleaved=config.rope.interleaved,
        )
        config = replace(config, local_rope=local_rope)
    experts = config.experts
    if experts is not None and not experts.shared_size:
        config = replace(config, experts=replace(experts, shared_gated=False))
    return config


def _normalized(config: DecoderConfig) -> DecoderConfig:
    """Return the same config for all configs that compute the same."""
    config = replace(config, attention_scale=config.score_scale)
    scaling = config.rope.scaling
    if isinstance(scaling, YarnScaling):
        magnitude = scaling.magnitude
        # The scale of scores has the rest of ``mscale_all_dim``.
        scaling = replace(scaling, attention_factor=magnitude, mscale=None, mscale_all_dim=None)
        config = replace(config, rope=replace(config.rope, scaling=scaling))
    if not config.qk_norm:
        config = replace(config, qk_norm_over="head")
    experts = config.experts
    if experts is not None and experts.groups_per_token == experts.groups:
        experts = replace(experts, groups=1, groups_per_token=1)  # all experts are candidates
        config = replace(config, experts=experts)
    if config.sliding_window is None or not any(config.windowed_layers):
        return replace(config, windowed_layers=(), sliding_window=None, local_rope=None)
    return replace(config, local_rope=config.local_rope or config.rope)


def is_complete(config: DecoderConfig) -> bool:
    """Return whether a config can be computed."""
    for rope in (config.rope, config.local_rope or config.rope):
        if not 0 < rope.partial_rotary <= 1:
            return False
        rotated_size = int(config.rotary_dim * rope.partial_rotary)
        if rotated_size % 2 != 0 or rope.theta <= 1:
            return False
    if config.experts is not None and not _can_choose(config.experts):
        return False
    if config.latent is not None and any(config.windowed_layers):
        return False
    return config.rms_norm_eps >= 0


def _can_choose(experts: Experts) -> bool:
    """Return whether there are as many candidates as a token takes, in groups of one size."""
    if experts.count % experts.groups or experts.groups_per_token > experts.groups:
        return False
    group_size = experts.count // experts.groups
    if experts.groups > 1 and group_size < 2:
        return False
    return experts.per_token <= experts.groups_per_token * group_size


def fitted_params(model: DecoderConfig, params: Params, other: DecoderConfig) -> Params | None:
    """Return a model's weights as another config of it has them.

    Tensors that the other config has no use for are left out. Norms, biases and sinks that only it
    has are as they are made, the identity and zeros: an engine that loads nothing into them has
    the same. None if it needs other tensors that do not exist.
    """
    model_shapes = model.parameter_shapes()["layers"]
    layers = {}
    for name, shape in other.parameter_shapes()["layers"].items():
        if model_shapes.get(name) == shape:
            layers[name] = params["layers"][name]
            continue
        kind = parameter_at(["layers", name]).kind
        if name in model_shapes or kind not in (Kind.NORM, Kind.BIAS, Kind.SINK):
            return None
        initial = 0.0
        if kind is Kind.NORM:
            initial = 1.0 - other.norm_offset
        layers[name] = jnp.full(shape, initial, params["embed"].dtype)
    return params | {"layers": layers}
