"""Delta nets over token trees: every path as if it were alone, outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jax_agent_rl.models import sharding
from jax_agent_rl.models.delta_net import DeltaTokens
from jax_agent_rl.models.delta_tree import tree_conv, tree_delta_rule
from jax_agent_rl.models.token_forest import TokenForest
from tests.token_forests import (
    LENGTH,
    assert_close,
    choices,
    depth_first,
    forest_of,
    gradients_in_float64,
    random_tokens,
)

ROWS = 2
CHUNK = 4
HEADS = 2
KEY_SIZE = 4
VALUE_SIZE = 3
KERNEL = 4


@jax.jit
def gradients_in_chunks(
    tokens: DeltaTokens, forest: TokenForest, weights: jax.Array
) -> tuple[jax.Array, DeltaTokens]:
    outputs, pull = jax.vjp(lambda tokens: tree_delta_rule(tokens, forest), tokens)
    return outputs, pull(weights)[0]


@given(choices=st.tuples(choices, choices), seed=st.integers(0, 2**16))
@example(choices=([1.0] * LENGTH, [-1.0] * LENGTH), seed=0)
@example(choices=([1.0] * 20 + [0.9, 0.7, 0.5] * 3, [1.0, 1.0, 0.5] * 9 + [0.0, 0.0]), seed=1)
@settings(max_examples=25, deadline=None)
def test_outputs_and_gradients_of_any_forest_equal_those_of_its_paths(
    choices: tuple[list[float], list[float]], seed: int
):
    rows = [depth_first(row) for row in choices]
    forest = forest_of(rows, CHUNK)
    np.testing.assert_array_equal(forest.parent, rows)

    tokens = random_tokens(seed, ROWS, HEADS, KEY_SIZE, VALUE_SIZE)
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((ROWS, LENGTH, HEADS, VALUE_SIZE)).astype(np.float32)
    outputs, gradients = gradients_in_chunks(tokens, forest, weights)
    expected, expected_gradients = gradients_in_float64(tokens, rows, weights)
    assert_close(outputs, expected)
    for actual, reference in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, reference)


def conv_by_matrices(x: jax.Array, weight: jax.Array, ancestors: jax.Array) -> jax.Array:
    """Ancestors [n - 1, B, T, T] are one-hot rows; those of tokens without one are zero."""
    total = x * weight[:, -1]
    for step, matrix in enumerate(ancestors):
        total += (matrix @ x) * weight[:, -2 - step]
    return jax.nn.silu(total)


@jax.jit
def conv_in_rows(
    x: jax.Array, weight: jax.Array, parent: jax.Array, y_weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y, pull = jax.vjp(lambda x, weight: tree_conv(x, weight, parent), x, weight)
    return y, pull(y_weights)


@given(choices=st.tuples(choices, choices), seed=st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_a_convolution_sees_a_tokens_ancestors_and_no_others(
    choices: tuple[list[float], list[float]], seed: int
):
    rows = [depth_first(row) for row in choices]
    rng = np.random.default_rng(seed)
    x, y_weights = rng.standard_normal((2, ROWS, LENGTH, 3)).astype(np.float32)
    weight = rng.standard_normal((3, KERNEL)).astype(np.float32)

    ancestors = np.zeros((KERNEL - 1, ROWS, LENGTH, LENGTH))
    for row, parents in enumerate(rows):
        for token in range(LENGTH):
            ancestor = parents[token]
            for step in range(KERNEL - 1):
                if ancestor >= 0:
                    ancestors[step, row, token, ancestor] = 1
                    ancestor = parents[ancestor]

    y, gradients = conv_in_rows(x, weight, jnp.asarray(rows), y_weights)
    with jax.enable_x64(True):
        expected, pull = jax.vjp(
            lambda x, weight: conv_by_matrices(x, weight, jnp.asarray(ancestors)),
            x.astype(np.float64),
            weight.astype(np.float64),
        )
        expected_gradients = pull(y_weights.astype(np.float64))
    assert expected.dtype == np.float64
    assert_close(y, expected)
    for actual, reference in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, reference)


def test_a_local_program_is_the_same_where_others_are_compiled_for_tpus(
    monkeypatch: pytest.MonkeyPatch,
):
    rows = [depth_first([1.0] * 20 + [0.9, 0.7, 0.5] * 3)] * ROWS
    forest = forest_of(rows, CHUNK)
    tokens = random_tokens(0, ROWS, HEADS, KEY_SIZE, VALUE_SIZE)
    weights = jnp.ones((ROWS, LENGTH, HEADS, VALUE_SIZE))
    outputs, gradients = gradients_in_chunks(tokens, forest, weights)

    monkeypatch.setattr(sharding, "described_platforms", {"tpu"})
    # Another function: what was traced before chose the plain path.
    both, pull = jax.vjp(jax.jit(lambda tokens: tree_delta_rule(tokens, forest)), tokens)
    np.testing.assert_allclose(both, outputs, atol=1e-6)
    for actual, expected in zip(pull(weights)[0], gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)
