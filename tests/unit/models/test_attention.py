"""Blockwise tree attention against a plain masked softmax in float64 numpy, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.tree_mask import TreeMask


def plain(q, k, v, subtree_end):
    """Every head by itself, all scores at once."""
    group = q.shape[1] // k.shape[1]
    index = jnp.arange(q.shape[2])
    visible = (index[None, None] <= index[None, :, None]) & (index[None, :, None] < subtree_end[:, None])
    k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf)), v)


def scaled(q, k, v, subtree_end):
    return tree_attention(q * q.shape[-1] ** -0.5, k, v, TreeMask(subtree_end))


@pytest.mark.parametrize("length", [1, 100, 128, 300])
def test_outputs_and_gradients_equal_those_of_plain_attention(length: int):
    rng = np.random.default_rng(length)
    q = rng.standard_normal((2, 6, length, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, length, 8)).astype(np.float32) for _ in range(2))
    # Any nested intervals will do: chains of random lengths, each closed where the next begins.
    ends = np.full((2, length), length, np.int32)
    for row in range(2):
        cuts = [0, *sorted(rng.integers(1, length + 1, 3)), length]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            ends[row, begin:end] = end

    def loss(function):
        return lambda q, k, v: jnp.sum(jnp.sin(function(q, k, v, jnp.asarray(ends))))

    np.testing.assert_allclose(scaled(q, k, v, jnp.asarray(ends)), plain(q, k, v, jnp.asarray(ends)), atol=2e-5)
    got = jax.grad(loss(scaled), argnums=(0, 1, 2))(q, k, v)
    expected = jax.grad(loss(plain), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)
