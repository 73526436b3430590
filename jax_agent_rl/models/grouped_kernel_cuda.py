"""Pallas kernels for NVIDIA GPUs, by Triton, of rows times the matrix of their group.

XLA's CUDA compiler has no such product: it multiplies all rows with the matrix of every group, and
keeps of each result the rows of the group. Here a program computes one tile of the result in
registers. Its rows belong to one group, as the first tile of a group begins with the group's first
row; the last one reads on into the next group, and writes nothing of that. No sum is shared between
programs: results are the same in every run.

Shapes: N rows, E groups, n tiles of rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_LEAST_TILE = 16  # of Triton's products
_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a @ b.T
_COLUMNS_BY_COLUMNS = (((0,), (0,)), ((), ()))  # a.T @ b
_PLAIN = (((1,), (0,)), ((), ()))


class ProductTile(NamedTuple):
    """How a program is cut.

    Attributes:
        rows: of the result; where groups are the result's, of both operands.
        columns: of the result.
        depth: numbers that are contracted at a time; where groups are the result's, rows of it.
        warps: of a program; each has 32 threads.
        stages: tiles of the operands that are loaded ahead, and the one in use.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class RowTiles(NamedTuple):
    """The tiles of rows, int32 [n] each. Those that are not needed come last and have no rows.

    Attributes:
        group: whose matrix the rows are multiplied with.
        first: first row.
        end: end of the group's rows.
    """

    group: Any
    first: Any
    end: Any


def supports(x: jax.Array, weight: jax.Array) -> bool:
    """Return whether tiles fill matrices of these sizes, and products are of one precision.

    The sizes are the last two of ``weight``'s.
    """
    if x.dtype != weight.dtype:
        return False
    return not any(size % _LEAST_TILE for size in (x.shape[1], *weight.shape[1:]))


def supports_outer(left: jax.Array, right: jax.Array) -> bool:
    """Return whether tiles fill the sums of outer products of such rows, of one precision."""
    if left.dtype != right.dtype:
        return False
    return not (left.shape[1] % _LEAST_TILE or right.shape[1] % _LEAST_TILE)


def product(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    interpret: bool = False,
) -> jax.Array:
    """Multiply each row with the matrix of its group.

    Args:
        x: [N, in], ordered by group.
        weight: [E, out, in].
        sizes: int32 [E], rows of each group.
        transposed: matrices are [E, in, out].
        interpret: compute what the kernel does without a GPU.

    Returns:
        [N, out]; rows past the last group are undefined.
    """
    rows, depth = x.shape
    groups = weight.shape[0]
    columns = weight.shape[2 if transposed else 1]
    tile = product_tile(rows, groups, depth, columns, x.dtype.itemsize)
    tiles = plan_tiles(sizes, rows, tile.rows)

    mark = pl.BlockSpec((1,), lambda column, number: (number,))
    run = pl.pallas_call(
        functools.partial(_product_kernel, tile=tile, transposed=transposed),
        grid=(columns // tile.columns, len(tiles.first)),
        in_specs=[
            RowTiles(mark, mark, mark),
            pl.BlockSpec(x.shape, lambda column, number: (0, 0)),
            pl.BlockSpec(weight.shape, lambda column, number: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda column, number: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(rows, depth, columns, x, weight, (rows, columns)),
        interpret=interpret,
        name="grouped_product",
    )
    return run(tiles, x, weight)


def outer(
    left: jax.Array, right: jax.Array, sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Sum the outer products of rows by group.

    Args:
        left: [N, out], ordered by group.
        right: [N, in], likewise.
        sizes: int32 [E], rows of each group.
        interpret: compute what the kernel does without a GPU.

    Returns:
        [E, out, in]; zeros for a group without rows.
    """
    rows, out_size = left.shape
    in_size = right.shape[1]
    groups = len(sizes)
    tile = outer_tile(out_size, in_size, left.dtype.itemsize)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    starts = ends - sizes.astype(jnp.int32)
    shape = (groups, out_size, in_size)

    mark = pl.BlockSpec((1,), lambda column, row, group: (group,))
    run = pl.pallas_call(
        functools.partial(_outer_kernel, tile=tile),
        grid=(in_size // tile.columns, out_size // tile.rows, groups),
        in_specs=[
            mark,
            mark,
            pl.BlockSpec(left.shape, lambda column, row, group: (0, 0)),
            pl.BlockSpec(right.shape, lambda column, row, group: (0, 0)),
        ],
        out_specs=pl.BlockSpec(
            (None, tile.rows, tile.columns), lambda column, row, group: (group, row, column)
        ),
        out_shape=jax.ShapeDtypeStruct(shape, right.dtype),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(rows, out_size, in_size, left, right, shape),
        interpret=interpret,
        name="grouped_outer_product",
    )
    return run(starts, ends, left, right)


def product_tile(rows: int, groups: int, depth: int, columns: int, itemsize: int) -> ProductTile:
    """Return the tile of :func:`product`.

    Tiles are as large as they can be without spilling registers, as ptxas says for sm_90a; and not
    much larger than a group with the mean number of rows, as in decoding.

    Args:
        rows: of all groups.
        groups: number of them.
        depth: numbers of a row.
        columns: numbers of a row of the result.
        itemsize: bytes of a number.
    """
    tile_rows = 128
    while tile_rows > _LEAST_TILE and (tile_rows // 2) * groups >= rows:
        tile_rows //= 2
    return ProductTile(
        rows=tile_rows,
        columns=_largest_divisor(columns, 128),
        depth=_largest_divisor(depth, 128 // itemsize),
        warps=8 if tile_rows == 128 else 4,
        stages=3,
    )


def outer_tile(out_size: int, in_size: int, itemsize: int) -> ProductTile:
    """Return the tile of :func:`outer`; see :func:`product_tile`.

    Args:
        out_size: numbers of a row of the left operand.
        in_size: likewise of the right one.
        itemsize: bytes of a number.
    """
    return ProductTile(
        rows=_largest_divisor(out_size, 128),
        columns=_largest_divisor(in_size, 128),
        depth=128 // itemsize,
        warps=8,
        stages=3,
    )


def plan_tiles(sizes: jax.Array, rows: int, tile_rows: int) -> RowTiles:
    """Cut the rows of each group into tiles.

    There are as many as any sizes can need: a tile more than full ones for each group.

    Args:
        sizes: int32 [E], rows of each group.
        rows: at least their sum.
        tile_rows: rows of a tile.
    """
    groups = len(sizes)
    count = rows // tile_rows + groups
    sizes = sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    tile_counts = -(-sizes // tile_rows)
    tile_ends = jnp.cumsum(tile_counts)

    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.sum(tile_ends <= number[:, None], axis=1, dtype=jnp.int32)
    exists = group < groups
    group = jnp.minimum(group, groups - 1)
    first_of_group = (tile_ends - tile_counts)[group]
    first = (ends - sizes)[group] + (number - first_of_group) * tile_rows
    return RowTiles(group, jnp.where(exists, first, 0), jnp.where(exists, ends[group], 0))


def _largest_divisor(size: int, largest: int) -> int:
    """Return the largest power of two that divides a size, at most ``largest``."""
    divisor = largest
    while size % divisor:
        divisor //= 2
    return divisor


def _cost(
    rows: int, left: int, right: int, x: jax.Array, y: jax.Array, shape: tuple[int, ...]
) -> pl.CostEstimate:
    """Return what a kernel takes if each row meets one group, and everything is read once."""
    result = jax.ShapeDtypeStruct(shape, x.dtype)
    size = sum(array.size * array.dtype.itemsize for array in (x, y, result))
    return pl.CostEstimate(flops=2 * rows * left * right, transcendentals=0, bytes_accessed=size)


# --- in the kernels -------------------------------------------------------------------------------


def _product_kernel(
    tiles: RowTiles,
    x_ref: Any,
    weight_ref: Any,
    out_ref: Any,
    *,
    tile: ProductTile,
    transposed: bool,
) -> None:
    group = tiles.group[0]
    first = tiles.first[0]
    end = tiles.end[0]
    rows = pl.ds(first, tile.rows)
    columns = pl.ds(pl.program_id(0) * tile.columns, tile.columns)
    is_row = (first + jnp.arange(tile.rows, dtype=jnp.int32) < end)[:, None]

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        depth = pl.ds(step * tile.depth, tile.depth)
        # Beyond the last row there is nothing to read.
        x = triton.load(x_ref.at[rows, depth], mask=is_row, other=0)
        if transposed:
            return total + _product(x, weight_ref[group, depth, columns], _PLAIN)
        return total + _product(x, weight_ref[group, columns, depth], _ROWS_BY_ROWS)

    @pl.when(first < end)
    def compute() -> None:
        zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
        total = jax.lax.fori_loop(0, x_ref.shape[1] // tile.depth, add, zeros)
        triton.store(out_ref.at[rows, columns], total.astype(out_ref.dtype), mask=is_row)


def _outer_kernel(
    starts: Any, ends: Any, left_ref: Any, right_ref: Any, out_ref: Any, *, tile: ProductTile
) -> None:
    start = starts[0]
    end = ends[0]
    left_columns = pl.ds(pl.program_id(1) * tile.rows, tile.rows)
    right_columns = pl.ds(pl.program_id(0) * tile.columns, tile.columns)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        first = start + step * tile.depth
        rows = pl.ds(first, tile.depth)
        # Rows of no group may hold anything, also numbers that zeros do not cancel.
        is_row = (first + jnp.arange(tile.depth, dtype=jnp.int32) < end)[:, None]
        left = triton.load(left_ref.at[rows, left_columns], mask=is_row, other=0)
        right = triton.load(right_ref.at[rows, right_columns], mask=is_row, other=0)
        return total + _product(left, right, _COLUMNS_BY_COLUMNS)

    steps = jax.lax.div(end - start + (tile.depth - 1), jnp.int32(tile.depth))
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    out_ref[...] = total.astype(out_ref.dtype)


def _product(a: jax.Array, b: jax.Array, contract: tuple) -> jax.Array:
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
