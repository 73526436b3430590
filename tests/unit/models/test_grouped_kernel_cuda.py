"""The GPU kernels of grouped products, interpreted, against a loop over groups in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.models import grouped_kernel_cuda
from tests.examples import examples

ROWS = 400
INPUTS = 48
OUTPUTS = 80
GROUPS = 4
SIZES = st.lists(st.integers(0, ROWS // GROUPS), min_size=GROUPS, max_size=GROUPS)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def bounds(sizes: list[int]) -> list[tuple[int, int]]:
    """Begin and end of each group's rows."""
    ends = np.cumsum(sizes)
    return list(zip(ends - sizes, ends, strict=True))


@jax.jit
def interpreted(x, weight, d_out, sizes):
    """Output, the rows' gradient and the matrices', by the kernels."""
    product = grouped_kernel_cuda.product
    out = product(x, weight, sizes, transposed=False, interpret=True)
    d_x = product(d_out, weight, sizes, transposed=True, interpret=True)
    return out, d_x, grouped_kernel_cuda.outer(d_out, x, sizes, interpret=True)


@settings(max_examples=examples(10))
@given(sizes=SIZES)
def test_products_and_gradients_equal_those_of_a_loop_over_groups_in_float64(sizes):
    """Groups without rows, rows of no group at the end, tiles that begin in every group."""
    x = drawn(0, ROWS, INPUTS)
    weight = drawn(1, GROUPS, OUTPUTS, INPUTS)
    d_out = drawn(2, ROWS, OUTPUTS)
    count = sum(sizes)
    # What rows of no group hold reaches nothing.
    x[count:] = np.nan
    d_out[count:] = np.nan
    arrays = [jnp.asarray(array, jnp.float32) for array in (x, weight, d_out)]
    out, d_x, d_weight = interpreted(*arrays, jnp.asarray(sizes, jnp.int32))

    for group, (begin, end) in enumerate(bounds(sizes)):
        expected_out = x[begin:end] @ weight[group].T
        expected_d_x = d_out[begin:end] @ weight[group]
        expected_d_weight = d_out[begin:end].T @ x[begin:end]
        np.testing.assert_allclose(out[begin:end], expected_out, atol=1e-4)
        np.testing.assert_allclose(d_x[begin:end], expected_d_x, atol=1e-4)
        np.testing.assert_allclose(d_weight[group], expected_d_weight, atol=1e-4)


@given(sizes=SIZES, tile_rows=st.sampled_from([16, 64, 128]))
def test_every_row_of_a_group_is_in_one_tile_of_its_group(sizes, tile_rows):
    tiles = grouped_kernel_cuda.plan_tiles(jnp.asarray(sizes), ROWS, tile_rows)
    tiles_of_row = np.zeros(ROWS, int)
    for group, first, end in zip(*map(np.asarray, tiles), strict=True):
        begin_of_group, end_of_group = bounds(sizes)[group]
        last = min(first + tile_rows, end)
        tiles_of_row[first:last] += 1
        if first < last:
            assert begin_of_group <= first and end == end_of_group
    assert (tiles_of_row[: sum(sizes)] == 1).all()
    assert (tiles_of_row[sum(sizes) :] == 0).all()


def test_tiles_of_few_rows_are_small_and_tiles_divide_the_matrices():
    decoding = grouped_kernel_cuda.product_tile(1024, 128, 2048, 768, 2)
    training = grouped_kernel_cuda.product_tile(32768, 128, 2048, 768, 2)
    assert decoding.rows < training.rows
    for columns in (768, 2880, 48):
        tile = grouped_kernel_cuda.product_tile(1024, 8, 2880, columns, 2)
        assert columns % tile.columns == 0 and 2880 % tile.depth == 0


def test_matrices_that_tiles_do_not_fill_have_no_kernel():
    x = jnp.zeros((4, 32))
    assert grouped_kernel_cuda.supports(x, jnp.zeros((2, 48, 32)))
    assert not grouped_kernel_cuda.supports(x, jnp.zeros((2, 40, 32)))
    assert grouped_kernel_cuda.supports_outer(x, jnp.zeros((4, 48)))
    assert not grouped_kernel_cuda.supports_outer(x, jnp.zeros((4, 40)))


def test_products_of_two_precisions_are_not_the_kernels():
    x = jnp.zeros((4, 32), jnp.bfloat16)
    assert not grouped_kernel_cuda.supports(x, jnp.zeros((2, 48, 32)))
    assert grouped_kernel_cuda.supports(x, jnp.zeros((2, 48, 32), jnp.bfloat16))
    assert not grouped_kernel_cuda.supports_outer(x, jnp.zeros((4, 48)))
