"""Products of rows with the matrix of their group, as a mixture of experts needs them.

libtpu has a kernel for ``jax.lax.ragged_dot``, but its gradient with respect to the weights becomes a masked product of
all rows for every group. On TPUs that gradient is Megablox' kernel (``tgmm``), which reads each row once.

Shapes: N rows ordered by group, E groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from jax_agent_rl.models.mesh import by_platform

TILE_ROWS, TILE_COLUMNS = 512, 1024
"""Tile of the kernel: rows of the operands, and at most so much of each dimension of the result."""


def grouped_product(x: jax.Array, weight: Any, sizes: jax.Array, group: jax.Array) -> jax.Array:
    """Multiply each row of x [N, in] with the matrix of its group in [E, out, in] -> [N, out].

    Args:
        x: rows ordered by group.
        weight: matrices, quantized (``models.quantized``) or not.
        sizes: int32 [E], rows of each group.
        group: int32 [N], group of each row; rows past the last group are undefined, forward and backward.
    """
    if isinstance(weight, jax.Array):
        return _product(x, weight, sizes)
    out = jax.lax.ragged_dot(x, weight.numbers.astype(x.dtype).swapaxes(1, 2), sizes)
    return out * weight.scale[..., 0].at[group].get(mode="clip").astype(x.dtype)


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)


def _forward(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x, weight, sizes), (x, weight, sizes)


def _backward(kept: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weight, sizes = kept
    d_weight = by_platform(d_out, x, sizes, tpu=_outer_kernel, default=_outer)
    return jax.lax.ragged_dot(d_out, weight, sizes), d_weight.astype(weight.dtype), None


_product.defvjp(_forward, _backward)


def _outer(d_out: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sum the outer products of rows [N, out] and [N, in] by group -> [E, out, in]."""
    rows = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    return jax.lax.ragged_dot_general(d_out, x, sizes, rows)


def _outer_kernel(d_out: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
    d_out, x = (jnp.pad(rows, ((0, -len(rows) % TILE_ROWS), (0, 0))) for rows in (d_out, x))  # whole tiles
    tiling = (TILE_ROWS, min(TILE_COLUMNS, d_out.shape[1]), min(TILE_COLUMNS, x.shape[1]))
    return tgmm(d_out.T, x, sizes, preferred_element_type=x.dtype, tiling=tiling)
