"""A TPU kernel for grouped products, which reads matrices in either order.

Rows are ordered by group. A step of the grid multiplies a tile of rows with a group's matrix. A
tile in which groups meet is visited once for each of them, and every visit writes its own rows::

    rows    0 ─────── 512 ────── 1024 ─────── 1536
    groups  └─ 0 ─┘└──── 1 ────┘└──── 2 ────┘
    visits  0    1    1      2    2              (group of each)

Blocks span a matrix' whole inner dimension, so that a matrix stays on the chip for all visits of
its group. Products of several pairs of rows and matrices are added before they are rounded.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

LANES = 128
BLOCK_BYTES = 3 << 20
"""Most bytes of matrices, or of rows, in a block; two blocks of each are on the chip."""


def supports(
    xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], *, transposed: bool
) -> bool:
    """Return whether blocks of these arguments of :func:`sum_of_products` fit the chip."""
    depth_bytes = _depth_bytes(xs)
    columns = _block_columns(_width(weights, transposed=transposed), depth_bytes)
    return columns * depth_bytes <= BLOCK_BYTES


def sum_of_products(
    xs: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    sizes: jax.Array,
    *,
    tile_rows: int,
    transposed: bool,
) -> jax.Array:
    """Multiply rows [N, in] of each x with the matrices of their groups, and add -> [N, out].

    Check :func:`supports` first.

    Args:
        xs: rows ordered by group, a multiple of ``tile_rows``.
        weights: matrices [E, out, in] for each x.
        sizes: int32 [E], rows of each group; rows past the last group are undefined.
        tile_rows: rows of a tile, at most.
        transposed: matrices are [E, in, out].
    """
    num_rows = len(xs[0])
    num_groups = len(sizes)
    width = _width(weights, transposed=transposed)
    depth_bytes = _depth_bytes(xs)
    columns = _block_columns(width, depth_bytes)
    while tile_rows * depth_bytes > BLOCK_BYTES:
        tile_rows //= 2

    (offsets, groups, tiles), visits = make_group_metadata(
        group_sizes=sizes.astype(jnp.int32),
        m=num_rows,
        tm=tile_rows,
        start_group=jnp.int32(0),
        num_nonzero_groups=num_groups,
        visit_empty_groups=False,
    )

    def row_block(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], 0

    def matrix_block(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        if transposed:
            return groups[visit], 0, column
        return groups[visit], column, 0

    def out_block(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], column

    x_specs = []
    weight_specs = []
    flops = 0
    size = num_rows * width * xs[0].dtype.itemsize
    for x, weight in zip(xs, weights, strict=True):
        depth = x.shape[1]
        x_specs.append(pl.BlockSpec((tile_rows, depth), row_block))
        matrix_shape = (None, depth, columns) if transposed else (None, columns, depth)
        weight_specs.append(pl.BlockSpec(matrix_shape, matrix_block))
        flops += 2 * num_rows * depth * width
        # Matrices are read once, and rows once for each block of columns.
        size += x.size * x.dtype.itemsize * (width // columns)
        size += weight.size * weight.dtype.itemsize

    multiply = pl.pallas_call(
        functools.partial(_multiply, transposed=transposed),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), xs[0].dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(width // columns, visits),
            in_specs=[x_specs, weight_specs],
            out_specs=pl.BlockSpec((tile_rows, columns), out_block),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=size),
        name="grouped_products",
    )
    return multiply(offsets, groups, tiles, list(xs), list(weights))


def _multiply(
    offsets: Any, groups: Any, tiles: Any, xs: Any, weights: Any, out: Any, *, transposed: bool
) -> None:
    """Compute one visit: write the tile's rows of the group.

    Args:
        offsets: int32 [E + 1], the first row of each group.
        groups: int32 [visits].
        tiles: int32 [visits].
        xs: [tile, in] each.
        weights: [out, in] each, or transposed.
        out: [tile, out], which keeps the rows of other groups.
    """
    visit = pl.program_id(1)
    group = groups[visit]
    contracted = 0 if transposed else 1
    result = jnp.zeros(out.shape, jnp.float32)
    for x, weight in zip(xs, weights, strict=True):
        result += jax.lax.dot_general(
            x[...],
            weight[...],
            (((1,), (contracted,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    row = tiles[visit] * out.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
    is_of_group = (row >= offsets[group]) & (row < offsets[group + 1])
    other_rows = out[...].astype(jnp.float32)
    out[...] = jnp.where(is_of_group, result, other_rows).astype(out.dtype)


def _width(weights: tuple[jax.Array, ...], *, transposed: bool) -> int:
    """Return the columns of the result."""
    return weights[0].shape[2 if transposed else 1]


def _depth_bytes(xs: tuple[jax.Array, ...]) -> int:
    """Return the bytes of a row of all xs, which are as many as the matrices have for a column."""
    return sum(x.shape[1] for x in xs) * xs[0].dtype.itemsize


def _block_columns(width: int, column_bytes: int) -> int:
    """Return how many of a result's columns a block has: a divisor of all, in whole lanes.

    Where lanes do not divide them, a block has all of them. The least block may be too large.

    Args:
        column_bytes: bytes of the matrices for one column.
    """
    if width % LANES:
        return width
    columns = LANES
    for candidate in range(LANES, width + 1, LANES):
        if width % candidate == 0 and candidate * column_bytes <= BLOCK_BYTES:
            columns = candidate
    return columns
