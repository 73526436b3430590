"""The cache of latent attention: a vector per position for all heads, not their keys and values.

Shapes: P pages of S positions (or R rows), r numbers of a latent, p of a rotary key. In 8 bits each
position's latent and rotary key have a float32 scale each: the latent is normalized, the rotary key
is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jax_agent_rl.jetstream.kv_cache import is_quantized
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.layers import quantized


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerLatents:
    """What one layer remembers.

    Attributes:
        numbers: [P, 1, r + p, S], latents and then rotated keys.
        scales: float32 [P, 1, 2, S], of latents and of rotary keys; None if not quantized.
        value_size: r, numbers of a latent: of what attention mixes.
    """

    numbers: Any
    scales: Any = None
    value_size: int = field(kw_only=True, metadata={"static": True})

    @property
    def count(self) -> int:
        """Number of pages."""
        return self.numbers.shape[0]

    @property
    def length(self) -> int:
        """Positions of a page."""
        return self.numbers.shape[-1]

    def by_position(self, function: Callable[..., Any], *others: LayerLatents) -> LayerLatents:
        """Map ``function(axis, array, *others' arrays)`` over the arrays.

        ``axis`` is the one of positions.
        """
        scales = None
        if self.scales is not None:
            scales = function(3, self.scales, *(other.scales for other in others))
        numbers = function(3, self.numbers, *(other.numbers for other in others))
        return LayerLatents(numbers, scales, value_size=self.value_size)


def empty_latents(
    config: DecoderConfig, layer: int, count: int, length: int, dtype: jnp.dtype
) -> LayerLatents:
    """Return ``count`` pages of zeros, with scales for int8 or float8."""
    assert config.latent is not None
    numbers = jnp.zeros((count, 1, config.latent.cached_dim, length), dtype)
    scales = None
    if is_quantized(dtype):
        scales = jnp.zeros((count, 1, 2, length), jnp.float32)
    return LayerLatents(numbers, scales, value_size=config.latent.kv_rank)


def to_latents(latents: jax.Array, rank: int, dtype: jnp.dtype) -> LayerLatents:
    """Convert latents and rotary keys [R, 1, r + p, T] to a cache of ``dtype``.

    Args:
        rank: r.
    """
    if not is_quantized(dtype):
        return LayerLatents(latents.astype(dtype), value_size=rank)
    # Separately: the rotary key's numbers may be much larger than the latent's.
    latent = quantized(latents[:, :, :rank], dtype, axis=2)
    rotary_key = quantized(latents[:, :, rank:], dtype, axis=2)
    return LayerLatents(
        jnp.concatenate([latent.numbers, rotary_key.numbers], axis=2),
        jnp.concatenate([latent.scale, rotary_key.scale], axis=2),
        value_size=rank,
    )


def from_latents(cached: LayerLatents, dtype: jnp.dtype) -> jax.Array:
    """Invert :func:`to_latents`: return [R, 1, r + p, T], in ``dtype`` if they are quantized."""
    if cached.scales is None:
        return cached.numbers
    rank = cached.value_size
    latent = cached.numbers[:, :, :rank].astype(jnp.float32) * cached.scales[:, :, :1]
    rotary_key = cached.numbers[:, :, rank:].astype(jnp.float32) * cached.scales[:, :, 1:]
    return jnp.concatenate([latent, rotary_key], axis=2).astype(dtype)
