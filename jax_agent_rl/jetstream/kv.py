"""Keys and values an engine keeps, in its own precision or in 8 bits.

Shapes: N pages (or rows of several, where they were gathered), K key/value heads, h head size, S positions of each. In
8 bits each position's key, and its value, has one scale per head, float32; they lie with positions last, or a TPU would
pad each to 128.
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
    """One layer's, in the layouts its products read in order.

    Attributes:
        keys: [N, K, h, S].
        values: [N, K, S, h].
        scales: float32 [N, K, 2, S], of keys and of values; None where they are not quantised.
    """

    keys: Any
    values: Any
    scales: Any = None

    def by_position(self, function: Callable[..., Any], *others: LayerKV) -> LayerKV:
        """``function(axis, array, *others' arrays)`` of each array; ``axis`` is that of positions."""
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
    """Those of all layers."""

    layers: tuple[LayerKV, ...]

    @property
    def count(self) -> int:
        """Pages."""
        return self.layers[0].keys.shape[0]

    @property
    def length(self) -> int:
        """Positions of a page."""
        return self.layers[0].keys.shape[-1]


def empty_cache(config: DecoderConfig, count: int, length: int, dtype: jnp.dtype) -> KVCache:
    """A cache of ``count`` pages of zeros; int8 or float8 has scales."""
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
    """Keys [R, K, h, T] and values [R, K, T, h] as a cache of ``dtype`` keeps them."""
    if not is_quantized(dtype):
        return LayerKV(keys.astype(dtype), values.astype(dtype))
    own_keys, own_values = quantized(keys, dtype, axis=2), quantized(values, dtype, axis=3)
    scales = jnp.concatenate([own_keys.scale, own_values.scale.mT], axis=2)
    return LayerKV(own_keys.numbers, own_values.numbers, scales)


def restored(kept: LayerKV, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Keys and values of what :func:`stored` keeps; in ``dtype`` where they are quantised."""
    if kept.scales is None:
        return kept.keys, kept.values
    keys = kept.keys.astype(jnp.float32) * kept.scales[:, :, :1]
    values = kept.values.astype(jnp.float32) * kept.scales[:, :, 1, :, None]
    return keys.astype(dtype), values.astype(dtype)
