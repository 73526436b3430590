"""The KV cache, in the engine's precision or in 8 bits.

Shapes: N pages (or rows of several, where they were gathered), K key/value heads, h head size, S positions of each. In
8 bits each position's key and value have one float32 scale per head, with positions last: a TPU would pad any other
axis to 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.quantized import quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer, in the layouts that products read contiguously.

    Attributes:
        keys: [N, K, h, S].
        values: [N, K, S, h].
        scales: float32 [N, K, 2, S], of keys and of values; None if not quantized.
    """

    keys: Any
    values: Any
    scales: Any = None

    def by_position(self, function: Callable[..., Any], *others: LayerKV) -> LayerKV:
        """Map ``function(axis, array, *others' arrays)`` over the arrays; ``axis`` is that of positions."""
        scales = None
        if self.scales is not None:
            scales = function(3, self.scales, *(other.scales for other in others))
        return LayerKV(
            keys=function(3, self.keys, *(other.keys for other in others)),
            values=function(2, self.values, *(other.values for other in others)),
            scales=scales,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers."""

    layers: tuple[LayerKV, ...]

    @property
    def count(self) -> int:
        """Number of pages."""
        return self.layers[0].keys.shape[0]

    @property
    def length(self) -> int:
        """Positions of a page."""
        return self.layers[0].keys.shape[-1]


def empty_cache(config: DecoderConfig, count: int, length: int, dtype: jnp.dtype) -> KVCache:
    """Return a cache of ``count`` pages of zeros, with scales for int8 or float8."""
    heads, size = config.num_kv_heads, config.head_dim

    def layer() -> LayerKV:
        return LayerKV(
            keys=jnp.zeros((count, heads, size, length), dtype),
            values=jnp.zeros((count, heads, length, size), dtype),
            scales=jnp.zeros((count, heads, 2, length), jnp.float32) if is_quantized(dtype) else None,
        )

    return KVCache(tuple(layer() for _ in range(config.num_layers)))


def is_quantized(dtype: jnp.dtype) -> bool:
    """Whether a cache of this type has scales."""
    return jnp.dtype(dtype).itemsize == 1


def stored(keys: jax.Array, values: jax.Array, dtype: jnp.dtype) -> LayerKV:
    """Convert keys [R, K, h, T] and values [R, K, T, h] to a cache of ``dtype``."""
    if not is_quantized(dtype):
        return LayerKV(keys.astype(dtype), values.astype(dtype))
    own_keys, own_values = quantized(keys, dtype, axis=2), quantized(values, dtype, axis=3)
    scales = jnp.concatenate([own_keys.scale, own_values.scale.mT], axis=2)
    return LayerKV(own_keys.numbers, own_values.numbers, scales)


def restored(kept: LayerKV, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Invert :func:`stored`: return keys and values, in ``dtype`` if they are quantized."""
    if kept.scales is None:
        return kept.keys, kept.values
    keys = kept.keys.astype(jnp.float32) * kept.scales[:, :, :1]
    values = kept.values.astype(jnp.float32) * kept.scales[:, :, 1, :, None]
    return keys.astype(dtype), values.astype(dtype)
