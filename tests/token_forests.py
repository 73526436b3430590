"""Random forests of tokens, and the delta rule along their paths, token by token in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_agent_rl.models.delta_net import DeltaTokens, delta_step
from jax_agent_rl.models.token_forest import TokenForest, plan_forest

LENGTH = 29
"""Tokens of a row."""

choices = st.lists(st.one_of(st.just(1.0), st.floats(-0.2, 1.0)), min_size=LENGTH, max_size=LENGTH)
"""Of one row, for :func:`depth_first`."""

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


def subtree_ends(parents: Parents) -> np.ndarray:
    """Ends of the subtrees of one row."""
    ends = np.arange(1, len(parents) + 1, dtype=np.int32)
    for token in reversed(range(len(parents))):
        if parents[token] >= 0:
            ends[parents[token]] = max(ends[parents[token]], ends[token])
    return ends


def forest_of(rows: list[Parents], chunk: int) -> TokenForest:
    ends = np.stack([subtree_ends(parents) for parents in rows])
    return plan_forest(jnp.asarray(ends), chunk=chunk)


def random_tokens(seed: int, rows: int, heads: int, key_size: int, value_size: int) -> DeltaTokens:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, rows, LENGTH, heads, key_size))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((rows, LENGTH, heads, value_size))
    log_decay = -rng.gamma(0.5, size=(rows, LENGTH, heads))
    beta = rng.random((rows, LENGTH, heads))
    return DeltaTokens(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta)))


def by_token(tokens: DeltaTokens, parents: jax.Array) -> jax.Array:
    """Every token's state from its parent's, all of them kept; parents int32 [B, T]."""
    rows, length = parents.shape
    state_shape = (*tokens.k.shape[2:], tokens.v.shape[-1])
    states = jnp.zeros((length + 1, rows, *state_shape), tokens.q.dtype)

    def body(states: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A root's parent is -1, the last state, which stays zero.
        state = states[parents[:, t], jnp.arange(rows)]
        output, state = delta_step(jax.tree.map(lambda x: x[:, t], tokens), state)
        return states.at[t].set(state), output

    _, outputs = jax.lax.scan(body, states, jnp.arange(length))
    return jnp.moveaxis(outputs, 0, 1)


@jax.jit
def _gradients_by_token(
    tokens: DeltaTokens, parents: jax.Array, weights: jax.Array
) -> tuple[jax.Array, DeltaTokens]:
    outputs, pull = jax.vjp(lambda tokens: by_token(tokens, parents), tokens)
    return outputs, pull(weights)[0]


def gradients_in_float64(
    tokens: DeltaTokens, rows: list[Parents], weights: np.ndarray
) -> tuple[jax.Array, DeltaTokens]:
    """Outputs of :func:`by_token`, and gradients of their sum with these weights."""
    with jax.enable_x64(True):
        outputs, gradients = _gradients_by_token(
            jax.tree.map(lambda x: np.asarray(x, np.float64), tokens),
            np.asarray(rows),
            weights.astype(np.float64),
        )
    assert outputs.dtype == np.float64
    return outputs, gradients


def assert_close(actual: jax.Array, reference: np.ndarray) -> None:
    scale = max(1.0, np.abs(reference).max())
    np.testing.assert_allclose(actual / scale, reference / scale, atol=1e-5)
