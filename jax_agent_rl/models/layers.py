"""Layers of decoders for packed rows. Shapes as in ``models.decoder``; [..] stands for any leading axes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.models.attention import sharded_tree_attention
from jax_agent_rl.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Params, Rope, VisionConfig
from jax_agent_rl.models.lora import Adapted
from jax_agent_rl.models.moe import mixture_of_experts, sharded_mixture_of_experts
from jax_agent_rl.models.tree_mask import TreeMask
from jax_agent_rl.models.vision.layout import ImageInputs

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


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


def attention(
    config: DecoderConfig,
    layer: Params,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    tree_mask: TreeMask,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Apply self-attention [B, T, D] -> [B, T, D]; cos and sin are [B, T, h/2]."""
    rows, count, _ = x.shape
    cos, sin = cos[:, None], sin[:, None]

    def heads(name: str) -> jax.Array:
        """Project [B, T, D] -> [B, heads, T, h]."""
        projected = linear(x, layer[name], mesh)
        if config.qkv_bias:
            projected = projected + layer[f"{name}_bias"]
        return projected.reshape(rows, count, -1, config.head_dim).transpose(0, 2, 1, 3)

    q, k = heads("q"), heads("k")
    if config.qk_norm:
        q, k = rms_norm(config, q, layer["q_norm"]), rms_norm(config, k, layer["k_norm"])
    q = rotate(q, cos, sin) * config.score_scale
    mixed = sharded_tree_attention(q, rotate(k, cos, sin), heads("v"), tree_mask, mesh)
    return linear(mixed.transpose(0, 2, 1, 3).reshape(rows, count, -1), layer["o"], mesh)


def feed_forward(config: DecoderConfig, layer: Params, x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Apply the gated network, or the mixture of experts, [B, T, D] -> [B, T, D]."""
    activation = ACTIVATIONS[config.activation]
    if config.experts is not None and mesh is not None:
        return sharded_mixture_of_experts(config.experts, layer, x, activation, mesh)
    if config.experts is not None:
        return mixture_of_experts(config.experts, layer, x.reshape(-1, x.shape[-1]), activation).reshape(x.shape)
    return linear(activation(linear(x, layer["gate"], mesh)) * linear(x, layer["up"], mesh), layer["down"], mesh)


def linear(x: jax.Array, weight: jax.Array | Adapted, mesh: Mesh | None = None) -> jax.Array:
    """Return ``x @ weight.T`` for a weight [out, in], with or without an adapter."""

    def product(x: jax.Array) -> jax.Array:
        return weight.apply(x) if isinstance(weight, Adapted) else jnp.einsum("...d,od->...o", x, weight)

    if mesh is not None and mesh.shape["context"] > 1:
        return product(x)  # flattening split tokens would gather them
    # Flat, so that the weight gradient contracts one axis: one plain product on every platform.
    return product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
