"""Arrays in 8 bits with a scale per vector, for an engine's weights and KV cache.

The largest value of a vector maps to the largest of the type. qwix adds half a step for int8, so that the largest falls
between -127 and -128, and the last bit of a float decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

EightBits = Literal["int8", "fp8"]
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """``numbers * scale``.

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

    >>> quantized(jnp.array([[0.5, -2.0]]), jnp.int8, axis=1).numbers
    Array([[  32, -127]], dtype=int8)
    """
    whole = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if whole else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scale = jnp.where(peak > 0, peak, 1) / largest
    numbers = jnp.clip(jnp.round(x / scale) if whole else x / scale, -largest, largest)
    return Quantized(numbers.astype(dtype), scale)


def split_weight(weight: Any, spec: PartitionSpec) -> Any:
    """Return the specs of a weight [..., in], quantized along ``in`` or not; a scale's axis of 1 is not split.

    >>> split_weight(jnp.zeros((4, 2)), PartitionSpec(None, "tensor"))
    PartitionSpec(None, 'tensor')
    >>> split_weight(jnp.zeros((4, 1)), PartitionSpec(None, "tensor"))
    PartitionSpec(None, None)
    """
    return jax.tree.map(lambda x: spec if x.shape[-1] > 1 else PartitionSpec(*spec[:-1], None), weight)


def product(weight: Any, x: jax.Array) -> jax.Array:
    """Multiply [..., out, in] x [in, B] -> [..., out, B]; scales apply last, so only 8 bits per weight are read."""
    if isinstance(weight, jax.Array):
        return jnp.einsum("...od,db->...ob", weight, x)
    out = jnp.einsum("...od,db->...ob", weight.numbers.astype(x.dtype), x)
    return out * weight.scale.astype(x.dtype)
