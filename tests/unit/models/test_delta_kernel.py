"""The TPU kernels of the delta rule, interpreted, against every path of a tree in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models import delta_kernel
from jax_agent_rl.models.delta_net import DeltaTokens
from jax_agent_rl.models.token_forest import TokenForest
from tests.examples import examples
from tests.token_forests import (
    LENGTH,
    assert_close,
    choices,
    depth_first,
    forest_of,
    gradients_in_float64,
    random_tokens,
)

SHAPES = {  # rows, heads, sizes of keys and values, tokens of a chunk
    "pairs of heads": (2, 4, 4, 3, 4),
    "single heads": (1, 3, 8, 8, 8),
}


@jax.jit
def interpreted(
    tokens: DeltaTokens, forest: TokenForest, weights: jax.Array
) -> tuple[jax.Array, DeltaTokens]:
    """Outputs and gradients, by the kernels."""
    with pltpu.force_tpu_interpret_mode(True):  # as XLA's operations
        outputs, corrections, starts = delta_kernel.forward(tokens, forest)
        return outputs, delta_kernel.backward(tokens, forest, corrections, starts, weights)


def assert_equal_to_paths(
    shape: tuple[int, int, int, int, int], row_choices: tuple[list[float], ...], seed: int
) -> None:
    row_count, heads, key_size, value_size, chunk = shape
    rows = [depth_first(row) for row in row_choices[:row_count]]
    tokens = random_tokens(seed, row_count, heads, key_size, value_size)
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((row_count, LENGTH, heads, value_size)).astype(np.float32)
    outputs, gradients = interpreted(tokens, forest_of(rows, chunk), weights)

    expected, expected_gradients = gradients_in_float64(tokens, rows, weights)
    assert_close(outputs, expected)
    for actual, reference in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, reference)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@given(row_choices=st.tuples(choices, choices), seed=st.integers(0, 2**16))
@settings(max_examples=examples(20), deadline=None)
def test_outputs_and_gradients_of_any_forest_equal_those_of_its_paths(
    shape: tuple[int, int, int, int, int], row_choices: tuple[list[float], list[float]], seed: int
):
    assert_equal_to_paths(shape, row_choices, seed)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_branches_start_from_states_of_far_chunks(shape: tuple[int, int, int, int, int]):
    # One row is a chain with short branches off its first tokens, the other has runs in runs.
    chain = [1.0] * 12 + [0.1, 1.0, 1.0, 0.1, 1.0, 0.2] * 2 + [1.0] * 5
    nested = [1.0, 1.0, 0.5] * 9 + [0.0, 0.0]
    assert_equal_to_paths(shape, (chain, nested), seed=1)


def test_nothing_of_another_tree_reaches_a_chunk():
    tokens = random_tokens(2, 1, 2, 4, 4)
    forest = forest_of([depth_first([1.0] * 12 + [-1.0] + [1.0] * (LENGTH - 13))], 4)
    outputs, _ = interpreted(tokens, forest, jnp.ones((1, LENGTH, 2, 4)))

    # A state of the first tree would carry it on, multiplied by however little.
    broken = tokens._replace(v=tokens.v.at[:, :12].set(jnp.nan))
    broken_outputs, gradients = interpreted(broken, forest, jnp.ones((1, LENGTH, 2, 4)))
    np.testing.assert_array_equal(broken_outputs[:, 12:], outputs[:, 12:])
    assert np.isfinite(gradients.v[:, 12:]).all()
