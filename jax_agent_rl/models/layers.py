"""Building blocks of decoders and vision towers, and arrays in 8 bits.

Shapes as in ``models.decoder``; [..] stands for any leading axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jax_agent_rl.models.attention import ATTENTION_INPUTS, ATTENTION_OUTPUT
from jax_agent_rl.models.config import (
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Params,
    ProportionalScaling,
    Rope,
    VisionConfig,
    YarnScaling,
)
from jax_agent_rl.models.lora import LoRA, restore
from jax_agent_rl.models.parameters import PARAMETERS, VISION_PARAMETERS, Kind
from jax_agent_rl.models.row_blocks import RowBlocks
from jax_agent_rl.models.sharding import by_platform
from jax_agent_rl.models.vision_context import ImageInputs


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Apply gpt-oss's gate: clamped inputs, a steeper sigmoid, and ``up + 1``, as in its code."""
    gate = jnp.minimum(gate, 7.0)
    up = jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped_swiglu": _clamped_swiglu,
}
"""From the two products of a gated network to its hidden units."""


def _save_dots_and(*names: str) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(*names)
    )


REMAT_POLICIES = {
    "dots": _save_dots_and(ATTENTION_OUTPUT),
    "dots_and_attention": _save_dots_and(ATTENTION_INPUTS, ATTENTION_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rope_frequencies(rope: Rope, head_dim: int) -> jax.Array:
    """Return rotary frequencies float32 [r/2] of the r numbers that rotate.

    They are scaled for long contexts if ``rope`` says so.
    """
    size = int(head_dim * rope.partial_rotary)
    exponents = jnp.arange(0, size, 2, dtype=jnp.float32) / size
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
            low = scaling.low_freq_factor
            high = scaling.high_freq_factor
            unscaled_share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
            return frequencies * (unscaled_share + (1 - unscaled_share) / scaling.factor)
        case YarnScaling() as scaling:
            unscaled_share = 1 - _yarn_ramp(scaling, rope.theta, size)
            return frequencies * (unscaled_share + (1 - unscaled_share) / scaling.factor)
        case DynamicScaling(factor=factor, trained_positions=trained, positions=longest):
            growth = factor * longest / trained - factor + 1
            theta = rope.theta * growth ** (size / (size - 2))
            return 1.0 / theta**exponents
        case ProportionalScaling(fraction=fraction, factor=factor):
            rotating = int(fraction * size // 2)
            is_rotating = jnp.arange(size // 2) < rotating
            return jnp.where(is_rotating, frequencies / factor, 0.0)
    return frequencies


def _yarn_ramp(scaling: YarnScaling, theta: float, size: int) -> np.ndarray:
    """Return float32 [r/2], from 0 at the frequencies that YaRN keeps to 1 where it divides."""

    def frequency_index(turns: float) -> float:
        """Return the (fractional) index of the frequency that turns so often in the context."""
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return size * math.log(wavelength) / (2 * math.log(theta))

    low = frequency_index(scaling.beta_fast)
    high = frequency_index(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)

    width = high - low
    if width == 0:
        width = 0.001  # the ramp is a step
    return np.clip((np.arange(size // 2, dtype=np.float32) - low) / width, 0, 1)


def rope_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin float32 [.., r/2] of the rotary angles at int32 positions [..]."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return _cos_and_sin(rope, angles)


def _cos_and_sin(rope: Rope, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin of angles, in YaRN multiplied by its magnitude."""
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if isinstance(rope.scaling, YarnScaling):
        return cos * rope.scaling.magnitude, sin * rope.scaling.magnitude
    return cos, sin


def mrope_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return M-RoPE tables, cos and sin float32 [.., r/2].

    Args:
        positions: int32 [.., 3]: time, row and column, each for its section of the frequencies.
    """
    assert rope.sections is not None
    axis_of_frequency = np.repeat(np.arange(3), rope.sections)
    if rope.interleaved_sections:
        index = np.arange(sum(rope.sections))
        turn = index % 3
        # Where an axis has no frequencies left, time takes its turns.
        axis_of_frequency = np.where(index < 3 * np.array(rope.sections)[turn], turn, 0)
    frequency_positions = positions[..., axis_of_frequency].astype(jnp.float32)
    return _cos_and_sin(rope, frequency_positions * rope_frequencies(rope, head_dim))


def place_features(x: jax.Array, images: ImageInputs) -> jax.Array:
    """Replace the embeddings of placeholders in [B, T, D] by image features.

    The first D numbers of a feature are for this; the others are for :func:`deepstack_features`.
    """
    features = rows_at(images.features[..., : x.shape[-1]], jnp.maximum(images.feature_index, 0))
    return jnp.where(images.feature_index[..., None] >= 0, features.astype(x.dtype), x)


def deepstack_features(images: ImageInputs, layer: jax.Array | int, size: int) -> jax.Array:
    """Return what image features add after a layer of the decoder, [B, T, D], zeros at text.

    Args:
        images: features [B, N, (1 + n) D].
        layer: below n.
        size: D.
    """
    features = jax.lax.dynamic_slice_in_dim(images.features, (1 + layer) * size, size, axis=-1)
    is_image = images.feature_index[..., None] >= 0
    return jnp.where(is_image, rows_at(features, jnp.maximum(images.feature_index, 0)), 0)


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``x[b, index[b, i]]``, [B, I, D], of x [B, N, D] and index int32 [B, I]."""
    return jax.vmap(lambda x, index: x[index])(x, index)


def rotate(
    rope: Rope, x: jax.Array, cos: jax.Array, sin: jax.Array, *, axis: int = -1
) -> jax.Array:
    """Rotate the first numbers along an axis.

    Args:
        rope: says which numbers are pairs.
        x: heads.
        cos: of the angle of each pair, broadcast against the pairs; ``sin`` as well.
        axis: of a head's numbers.
    """
    axis %= x.ndim
    pairs = cos.shape[axis - x.ndim]
    rotating, unrotated = jnp.split(x, [2 * pairs], axis=axis)
    if rope.interleaved:
        paired = rotating.reshape(*x.shape[:axis], pairs, 2, *x.shape[axis + 1 :])
        first = jax.lax.index_in_dim(paired, 0, axis + 1, keepdims=False)
        second = jax.lax.index_in_dim(paired, 1, axis + 1, keepdims=False)
        rotated_pairs = [first * cos - second * sin, second * cos + first * sin]
        rotated = jnp.stack(rotated_pairs, axis=axis + 1).reshape(rotating.shape)
    else:
        first, second = jnp.split(rotating, 2, axis=axis)
        rotated_pairs = [first * cos - second * sin, second * cos + first * sin]
        rotated = jnp.concatenate(rotated_pairs, axis=axis)
    rotated = rotated.astype(x.dtype)

    if not unrotated.shape[axis]:
        return rotated
    return jnp.concatenate([rotated, unrotated], axis=axis)


def root_mean_square_scaled(x: jax.Array, *, eps: float, axis: int = -1) -> jax.Array:
    """Divide by the root of the mean square over ``axis``, float32."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + eps)


def rms_norm(
    config: DecoderConfig | VisionConfig,
    x: jax.Array,
    weight: jax.Array,
    *,
    axis: int = -1,
    eps: float | None = None,
) -> jax.Array:
    """Apply an RMS norm over ``axis`` in float32, rounded where Hugging Face's models round.

    ``eps`` is ``config.rms_norm_eps`` if it is None.
    """
    if eps is None:
        eps = config.rms_norm_eps
    shape = [1] * x.ndim
    shape[axis] = -1
    weight = weight.reshape(shape)
    scaled = root_mean_square_scaled(x, axis=axis, eps=eps)
    if config.norm_offset or config.float32_norms:
        return (scaled * (config.norm_offset + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * scaled.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, *, eps: float) -> jax.Array:
    """Apply a layer norm over the last axis, in float32."""
    x_float32 = x.astype(jnp.float32)
    centred = x_float32 - jnp.mean(x_float32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(variance + eps)
    return (scaled * weight + bias).astype(x.dtype)


def embed(config: DecoderConfig, table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return embeddings [.., D] of int32 ids [..] from the embedding matrix [V, D]."""
    x = table[token_ids]
    if config.embed_scale == 1.0:
        return x
    return x * jnp.asarray(config.embed_scale, x.dtype)


def softcapped(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return logits within -cap and cap (``DecoderConfig.logit_softcap``)."""
    if cap is None:
        return logits
    return cap * jnp.tanh(logits / cap)


def linear(
    x: jax.Array,
    weight: Any,
    mesh: Mesh | None = None,
    adapter: LoRA | None = None,
    *,
    by_head: bool = False,
) -> jax.Array:
    """Multiply ``x @ weight.T``.

    Args:
        x: [..., in].
        weight: [out, in], quantized or not.
        mesh: what rows and tokens are split over; None on one device.
        adapter: adds its product.
        by_head: x is [..., H, in / H]. TPUs read it as attention laid it out, without a copy.
    """
    features = x.shape[-2:] if by_head else x.shape[-1:]

    def product(x: jax.Array) -> jax.Array:
        matrix = restore(weight).astype(x.dtype)
        if by_head:
            y = jnp.einsum("...hk,ohk->...o", x, matrix.reshape(-1, *features))
        else:
            y = jnp.einsum("...d,od->...o", x, matrix)
        if adapter is None:
            return y
        return y + adapter(x.reshape(*x.shape[: -len(features)], -1))

    if mesh is not None and mesh.shape["context"] > 1:
        return product(x)  # flattening split tokens would gather them
    # Flat, so that the weight gradient contracts one axis: one plain product on every platform.
    return product(x.reshape(-1, *features)).reshape(*x.shape[: -len(features)], -1)


def _apart(x: jax.Array) -> jax.Array:
    return by_platform(x, tpu=jax.lax.optimization_barrier, default=_same)


def _same(x: jax.Array) -> jax.Array:
    return x


@jax.custom_vjp
def apart(x: jax.Array) -> jax.Array:
    """Return ``x``; TPU programs compute it, and its gradient, before what reads them.

    XLA computes a product together with the sums over its results, and with what its inputs are
    made of, once more for each block. On TPUs that takes up to three times as long as the product
    and the rest one after the other.
    """
    return _apart(x)


apart.defvjp(lambda x: (_apart(x), None), lambda _, d_x: (_apart(d_x),))


@jax.custom_vjp
def gradient_apart(x: jax.Array) -> jax.Array:
    """Return ``x``; TPU programs compute its gradient before what reads it, see :func:`apart`."""
    return x


gradient_apart.defvjp(lambda x: (x, None), lambda _, d_x: (_apart(d_x),))


class Buffer(nnx.Variable):
    """A parameter that no optimizer changes."""


class Module(nnx.Module):
    """A module with the parameters of a table of shapes, under its names.

    Args:
        shapes: by name; the tables of submodules among them are skipped.
        rngs: draws initial values, float32: matrices normal, biases 0, norms and constants
            the identity.
    """

    def __init__(self, config: Any, shapes: Mapping[str, Any], *, rngs: nnx.Rngs) -> None:
        self.config = config
        for name, shape in shapes.items():
            if not isinstance(shape, tuple):
                continue
            parameter = PARAMETERS.get(name) or VISION_PARAMETERS[name]
            value = self._draw(parameter.kind, shape, rngs)
            variable = nnx.Param if parameter.is_trained else Buffer
            setattr(self, name, variable(value))

    def _draw(self, kind: Kind, shape: tuple[int, ...], rngs: nnx.Rngs) -> jax.Array:
        if kind is Kind.NORM:
            return jnp.full(shape, 1.0 - self.config.norm_offset)
        if kind in (Kind.CONSTANT, Kind.PLAIN_NORM, Kind.FACTOR, Kind.DECAY):
            return jnp.ones(shape)
        if kind in (Kind.BIAS, Kind.SINK, Kind.CORRECTION):
            return jnp.zeros(shape)
        return 0.02 * jax.random.normal(rngs.params(), shape)

    def linear(self, name: str, x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """Apply the matrix ``name``, and the bias ``name_bias`` if there is one.

        For ``mesh`` see :func:`linear`.
        """
        y = linear(x, getattr(self, name).get_value(), mesh)
        bias = getattr(self, f"{name}_bias", None)
        if bias is None:
            return y
        return y + bias[...]

    @classmethod
    def from_params(cls, config: Any, params: Params) -> Self:
        """Return the module that holds these very parameters: arrays, tracers, shapes or shardings.

        Args:
            config: the only argument of the subclass, but for ``rngs``.
            params: a tree as ``nnx.to_pure_dict`` returns of the module's state.
        """
        return nnx.merge(cls.graphdef(config), params)

    @classmethod
    def graphdef(cls, config: Any) -> nnx.GraphDef:
        """Return the structure of the module, without parameters."""
        return _graphdef(cls, config)


@functools.cache
def _graphdef(kind: Callable[..., Module], config: Any) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))


def stack(kind: Callable[..., nnx.Module], config: Any, *, rngs: nnx.Rngs) -> Any:
    """Return all layers of a kind as one, with parameters [L, ...].

    Args:
        rngs: draws each layer's initial values.
    """

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return kind(config, rngs=rngs)

    return make(rngs)


EightBits = Literal["int8", "fp8"]
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """An array in 8 bits with a scale per vector: ``numbers * scale``.

    Engines keep weights and KV caches so.

    Attributes:
        numbers: int8 or float8_e4m3fn.
        scale: float32, of the same shape but 1 along the vectors.
    """

    numbers: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape


def quantized(x: jax.Array, dtype: jnp.dtype, *, axis: int) -> Quantized:
    """Quantize vectors along ``axis``; the largest value of each maps to the largest of ``dtype``.

    qwix adds half a step for int8, so that the largest falls between -127 and -128; the last bit of
    a float decides.

    >>> quantized(jnp.array([[0.5, -2.0]]), jnp.int8, axis=1).numbers
    Array([[  32, -127]], dtype=int8)
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer:
        largest = float(jnp.iinfo(dtype).max)
    else:
        largest = float(jnp.finfo(dtype).max)

    x = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scale = jnp.where(peak > 0, peak, 1) / largest
    numbers = x / scale
    if is_integer:
        numbers = jnp.round(numbers)
    numbers = jnp.clip(numbers, -largest, largest)
    return Quantized(numbers.astype(dtype), scale)


def split_weight(weight: Any, spec: PartitionSpec) -> Any:
    """Return the specs of a weight, quantized or not; a scale's axis of 1 is not split.

    >>> split_weight(jnp.zeros((4, 2)), PartitionSpec(None, "tensor"))
    PartitionSpec(None, 'tensor')
    >>> split_weight(jnp.zeros((4, 1)), PartitionSpec(None, "tensor"))
    PartitionSpec(None, None)
    """

    def array_spec(x: Any) -> PartitionSpec:
        axes = []
        for axis, size in zip(spec, x.shape, strict=True):
            axes.append(axis if size > 1 else None)
        return PartitionSpec(*axes)

    return jax.tree.map(array_spec, weight)


def product_by_head(weight: Any, x: jax.Array) -> jax.Array:
    """Multiply each head's matrix [H, out, in] with its x [H, in, B] -> [H, out, B].

    Scales apply as in :func:`product`.
    """
    if isinstance(weight, jax.Array):
        return jnp.einsum("hod,hdb->hob", weight, x)
    out = jnp.einsum("hod,hdb->hob", weight.numbers.astype(x.dtype), x)
    return out * weight.scale.astype(x.dtype)


def product(weight: Any, x: jax.Array) -> jax.Array:
    """Multiply [..., out, in] x [in, B] -> [..., out, B].

    The scales of a quantized weight apply last, so that only 8 bits per weight are read.
    """
    if isinstance(weight, jax.Array):
        return jnp.einsum("...od,db->...ob", weight, x)
    if isinstance(weight, RowBlocks):
        return weight.product(x)
    out = jnp.einsum("...od,db->...ob", weight.numbers.astype(x.dtype), x)
    return out * weight.scale.astype(x.dtype)
