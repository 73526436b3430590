"""Delta nets over token trees: every path as if it were alone, outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jax_agent_rl.models.delta_net import DeltaTokens, delta_step
from jax_agent_rl.models.delta_tree import TokenForest, plan_forest, tree_conv, tree_delta_rule

ROWS = 2
LENGTH = 29
CHUNK = 4
HEADS = 2
KEY_SIZE = 4
VALUE_SIZE = 3
KERNEL = 4

Parents = list[int]


def depth_first(choices: list[float]) -> Parents:
    """Parents of a random forest in depth-first order.

    Args:
        choices: for each token, where on the path to the token before it (0: its root's side, 1:
            that token) it hangs; below 0 it is a root.
    """
    parents: Parents = []
    path: list[int] = []
    for token, choice in enumerate(choices):
        if choice < 0:
            path = []
        else:
            path = path[: 1 + int(choice * (len(path) - 1))]
        parents.append(path[-1] if path else -1)
        path.append(token)
    return parents


def marks(parents: Parents) -> tuple[np.ndarray, np.ndarray]:
    """Positions and ends of subtrees of one row."""
    positions = np.zeros(len(parents), np.int32)
    ends = np.arange(1, len(parents) + 1, dtype=np.int32)
    for token, parent in enumerate(parents):
        if parent >= 0:
            positions[token] = positions[parent] + 1
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    return positions, ends


def forest_of(rows: list[Parents], chunk: int = CHUNK) -> TokenForest:
    pairs = [marks(parents) for parents in rows]
    positions, ends = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    return plan_forest(jnp.asarray(positions), jnp.asarray(ends), chunk=chunk)


def random_tokens(seed: int, length: int = LENGTH) -> DeltaTokens:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, ROWS, length, HEADS, KEY_SIZE))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((ROWS, length, HEADS, VALUE_SIZE))
    log_decay = -rng.gamma(0.5, size=(ROWS, length, HEADS))
    beta = rng.random((ROWS, length, HEADS))
    return DeltaTokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta)))


def by_token(tokens: DeltaTokens, parents: jax.Array) -> jax.Array:
    """Every token's state from its parent's, all of them kept; parents int32 [B, T]."""
    rows, length = parents.shape
    states = jnp.zeros((length + 1, rows, HEADS, KEY_SIZE, VALUE_SIZE), tokens.q.dtype)

    def body(states: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A root's parent is -1, the last state, which stays zero.
        state = states[parents[:, t], jnp.arange(rows)]
        output, state = delta_step(jax.tree.map(lambda x: x[:, t], tokens), state)
        return states.at[t].set(state), output

    _, outputs = jax.lax.scan(body, states, jnp.arange(length))
    return jnp.moveaxis(outputs, 0, 1)


@jax.jit
def gradients_in_chunks(
    tokens: DeltaTokens, forest: TokenForest, weights: jax.Array
) -> tuple[jax.Array, DeltaTokens]:
    outputs, pull = jax.vjp(lambda tokens: tree_delta_rule(tokens, forest), tokens)
    return outputs, pull(weights)[0]


@jax.jit
def gradients_by_token(
    tokens: DeltaTokens, parents: jax.Array, weights: jax.Array
) -> tuple[jax.Array, DeltaTokens]:
    outputs, pull = jax.vjp(lambda tokens: by_token(tokens, parents), tokens)
    return outputs, pull(weights)[0]


choices = st.lists(st.one_of(st.just(1.0), st.floats(-0.2, 1.0)), min_size=LENGTH, max_size=LENGTH)


@given(choices=st.tuples(choices, choices), seed=st.integers(0, 2**16))
@example(choices=([1.0] * LENGTH, [-1.0] * LENGTH), seed=0)
@example(choices=([1.0] * 20 + [0.9, 0.7, 0.5] * 3, [1.0, 1.0, 0.5] * 9 + [0.0, 0.0]), seed=1)
@settings(max_examples=25, deadline=None)
def test_outputs_and_gradients_of_any_forest_equal_those_of_its_paths(
    choices: tuple[list[float], list[float]], seed: int
):
    rows = [depth_first(row) for row in choices]
    forest = forest_of(rows)
    np.testing.assert_array_equal(forest.parent, rows)

    tokens = random_tokens(seed)
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((ROWS, LENGTH, HEADS, VALUE_SIZE)).astype(np.float32)
    outputs, gradients = gradients_in_chunks(tokens, forest, weights)
    with jax.enable_x64(True):
        expected, expected_gradients = gradients_by_token(
            jax.tree.map(lambda x: np.asarray(x, np.float64), tokens),
            np.asarray(rows),
            weights.astype(np.float64),
        )
    assert expected.dtype == np.float64
    assert_close(outputs, expected)
    for actual, reference in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, reference)


def assert_close(actual: jax.Array, reference: np.ndarray) -> None:
    scale = max(1.0, np.abs(reference).max())
    np.testing.assert_allclose(actual / scale, reference / scale, atol=1e-5)


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
