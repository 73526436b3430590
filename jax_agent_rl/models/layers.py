"""Building blocks of decoders and vision towers. Shapes as in ``models.decoder``; [..] stands for any leading axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_agent_rl.models.attention import SAVED
from jax_agent_rl.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Params, Rope, VisionConfig
from jax_agent_rl.models.lora import LoRA, restore
from jax_agent_rl.models.vision.layout import ImageInputs

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_and_attention": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def rope_frequencies(rope: Rope, head_dim: int) -> jax.Array:
    """Return rotary frequencies float32 [h/2], scaled for long contexts if configured."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
            return frequencies * (keep + (1 - keep) / scaling.factor)
    return frequencies


def rope_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin float32 [.., h/2] of the rotary angles at int32 positions [..]."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def mrope_tables(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return M-RoPE tables at int32 positions [.., 3]: time, row and column, each for its section of frequencies."""
    assert rope.sections is not None
    axis_of_frequency = np.repeat(np.arange(3), rope.sections)
    angles = positions[..., axis_of_frequency].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def place_features(x: jax.Array, images: ImageInputs) -> jax.Array:
    """Replace the embeddings of placeholders in [B, T, D] by image features."""
    features = rows_at(images.features, jnp.maximum(images.feature_index, 0))
    return jnp.where(images.feature_index[..., None] >= 0, features.astype(x.dtype), x)


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``x[b, index[b, i]]``, [B, I, D], of x [B, N, D] and index int32 [B, I]."""
    return jax.vmap(lambda x, index: x[index])(x, index)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, axis: int = -1) -> jax.Array:
    """Rotate halves along ``axis`` (Hugging Face's layout); cos and sin broadcast against a half."""
    first, second = jnp.split(x, 2, axis=axis)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return rotated.astype(x.dtype)


def rms_norm(config: DecoderConfig | VisionConfig, x: jax.Array, weight: jax.Array, *, axis: int = -1) -> jax.Array:
    """Apply an RMS norm over ``axis`` in float32, rounded where Hugging Face's models round."""
    shape = [1] * x.ndim
    shape[axis] = -1
    weight = weight.reshape(shape)
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + config.rms_norm_eps)
    if config.norm_offset:
        return (scaled * (config.norm_offset + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * scaled.astype(x.dtype)


def embed(config: DecoderConfig, table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Return embeddings [.., D] of int32 ids [..] from the embedding matrix [V, D]."""
    x = table[token_ids]
    return x * jnp.asarray(config.embed_scale, x.dtype) if config.embed_scale != 1.0 else x


def linear(x: jax.Array, weight: Any, mesh: Mesh | None = None, adapter: LoRA | None = None) -> jax.Array:
    """Multiply ``x @ weight.T``.

    Args:
        x: [..., in].
        weight: [out, in], quantized or not.
        mesh: what rows and tokens are split over; None on one device.
        adapter: adds its product.
    """

    def product(x: jax.Array) -> jax.Array:
        y = jnp.einsum("...d,od->...o", x, restore(weight).astype(x.dtype))
        return y if adapter is None else y + adapter(x)

    if mesh is not None and mesh.shape["context"] > 1:
        return product(x)  # flattening split tokens would gather them
    # Flat, so that the weight gradient contracts one axis: one plain product on every platform.
    return product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


class Module(nnx.Module):
    """A module whose parameters are those of a table of shapes, under its names.

    Args:
        config: of the model.
        shapes: by name; those of submodules, which are tables themselves, are skipped.
        rngs: draws initial values: matrices normal, biases 0, norms the identity.
        dtype: of the parameters.
    """

    def __init__(
        self, config: Any, shapes: Mapping[str, Any], *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32
    ) -> None:
        self.config = config
        for name, shape in shapes.items():
            if isinstance(shape, tuple):
                setattr(self, name, nnx.Param(self._draw(name, shape, rngs).astype(dtype)))

    def _draw(self, name: str, shape: tuple[int, ...], rngs: nnx.Rngs) -> jax.Array:
        if name.endswith("norm"):
            return jnp.full(shape, 1.0 - self.config.norm_offset)
        return jnp.zeros(shape) if name.endswith("bias") else 0.02 * jax.random.normal(rngs.params(), shape)

    def linear(self, name: str, x: jax.Array, mesh: Mesh | None = None, adapter: LoRA | None = None) -> jax.Array:
        """Apply the matrix ``name``, and the bias ``name_bias`` if there is one; arguments as :func:`linear`."""
        y = linear(x, getattr(self, name).get_value(), mesh, adapter)
        bias = getattr(self, f"{name}_bias", None)
        return y if bias is None else y + bias[...]

    @classmethod
    def from_params(cls, config: Any, params: Params) -> Self:
        """Return the module that holds these very parameters: arrays, tracers, shapes or shardings.

        Args:
            config: the only argument of the subclass, but for ``rngs`` and ``dtype``.
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


def stack(kind: Callable[..., nnx.Module], config: Any, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> Any:
    """Return all layers of a model as one, with parameters [L, ...].

    Args:
        kind: of the layers.
        config: of the model.
        rngs: draws each layer's initial values.
        dtype: of the parameters.
    """

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return kind(config, rngs=rngs, dtype=dtype)

    return make(rngs)
