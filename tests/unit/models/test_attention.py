"""Blockwise tree attention against a masked softmax in float64 numpy, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.tree_kernel import TreeMask


def plain(q, k, v, subtree_end, sinks=None):
    """Every head by itself, all scores at once."""
    group = q.shape[1] // k.shape[1]
    index = jnp.arange(q.shape[2])
    visible = (index[None, None] <= index[None, :, None]) & (
        index[None, :, None] < subtree_end[:, None]
    )
    k = jnp.repeat(k, group, 1)
    v = jnp.repeat(v, group, 1)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sinks is not None:  # a column of its own, as in transformers, that has no value
        column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores)[..., : k.shape[2]], v)


def scaled(q, k, v, subtree_end, sinks=None):
    return tree_attention(q * q.shape[-1] ** -0.5, k, v, TreeMask(subtree_end), sinks)


@pytest.mark.parametrize(
    ("length", "with_sinks"), [(1, False), (100, False), (128, True), (300, False), (300, True)]
)
def test_outputs_and_gradients_equal_those_of_plain_attention(length: int, with_sinks: bool):
    rng = np.random.default_rng(length)
    q = rng.standard_normal((2, 6, length, 8)).astype(np.float32)
    k = rng.standard_normal((2, 2, length, 8)).astype(np.float32)
    v = rng.standard_normal((2, 2, length, 8)).astype(np.float32)
    # Any nested intervals will do: chains of random lengths, each closed where the next begins.
    ends = np.full((2, length), length, np.int32)
    for row in range(2):
        cuts = [0, *sorted(rng.integers(1, length + 1, 3)), length]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            ends[row, begin:end] = end

    sinks = 2 * rng.standard_normal(6).astype(np.float32) if with_sinks else None

    def loss(function):
        return lambda arrays: jnp.sum(jnp.sin(function(*arrays[:3], jnp.asarray(ends), arrays[3])))

    arrays = (q, k, v, sinks)
    np.testing.assert_allclose(
        scaled(q, k, v, jnp.asarray(ends), sinks),
        plain(q, k, v, jnp.asarray(ends), sinks),
        atol=2e-5,
    )
    got = jax.tree.leaves(jax.grad(loss(scaled))(arrays))
    expected = jax.tree.leaves(jax.grad(loss(plain))(arrays))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)
