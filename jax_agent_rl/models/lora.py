"""Low-rank adapters, W + scale B A, not multiplied out (Hu et al. 2021, LoRA, arXiv 2106.09685).

The base may be quantized (Dettmers et al. 2023, QLoRA, arXiv 2305.14314) and is then dequantized layer by layer.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_agent_rl.errors import ConfigError

TILE = 32  # values that share one scale


class LoRA(nnx.Module):
    """A low-rank addition to a weight, ``scale * b @ a``; stacked over layers or of one.

    Args:
        a: [r, in].
        b: [out, r].
        scale: alpha / r.
    """

    def __init__(self, a: jax.Array, b: jax.Array, *, scale: float) -> None:
        self.a, self.b, self.scale = nnx.LoRAParam(a), nnx.LoRAParam(b), scale

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``scale * x @ (b a).T`` for x [.., in]."""
        low = jnp.einsum("...d,rd->...r", x, self.a[...])
        return jnp.einsum("...r,or->...o", low, self.b[...]) * self.scale

    def merged(self, base: Any) -> jax.Array:
        """Return a stack of weights [L, out, in] with the addition, float32."""
        low_rank = jnp.einsum("lor,lri->loi", self.b[...], self.a[...], preferred_element_type=jnp.float32)
        return restore(base).astype(jnp.float32) + self.scale * low_rank


def quantize(weight: jax.Array, kind: Literal["int8", "nf4"]) -> Any:
    """Quantize a stack [L, out, in] to 8 or 4 bits, with a scale per 32 values along ``in``.

    Raises:
        ConfigError: qwix is not installed, or ``in`` is not a multiple of 32.
    """
    try:
        import qwix
    except ImportError:
        raise ConfigError(
            f"learner.lora.quantize={kind} needs the package qwix: pip install 'jax_agent_rl[qlora]'"
        ) from None
    if weight.shape[-1] % TILE:
        raise ConfigError(
            f"learner.lora.quantize={kind}: a weight of {weight.shape[-1]} inputs does not divide into tiles of {TILE}"
            "; set learner.lora.quantize=none for this model"
        )
    return qwix.quantize(weight, kind, channelwise_axes=[0, 1], tiled_axes={2: TILE})


def restore(weight: Any) -> jax.Array:
    """Return a weight in floats, quantized or not."""
    if isinstance(weight, jax.Array):
        return weight
    import qwix

    return qwix.dequantize(weight)
