"""The GPU kernels of tree attention, interpreted, against a masked softmax in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.models import tree_kernel_cuda
from jax_agent_rl.models.tree_kernel import TreeMask
from tests.examples import examples
from tests.unit.models.test_tree_kernel import COUNT, RUNS, drawn, forest

GROUP = 3
QUERIES = 150


@jax.jit
def interpreted(q, k, v, mask, d_out):
    """Output and gradients, by the kernels."""
    out, normalizer = tree_kernel_cuda.forward(q, k, v, mask, interpret=True)
    gradients = tree_kernel_cuda.backward(q, k, v, mask, out, normalizer, d_out, interpret=True)
    return out, *gradients


def reference(q, k, v, d_out, visible):
    """Output and gradients in float64, every head by itself."""
    q, k, v, d_out = (np.asarray(x).astype(np.float64) for x in (q, k, v, d_out))
    out = np.zeros(d_out.shape)
    dq = np.zeros(q.shape)
    dk = np.zeros(k.shape)
    dv = np.zeros(v.shape)
    for head in range(q.shape[1]):
        kv_head = head // (q.shape[1] // k.shape[1])
        scores = np.where(visible, q[0, head] @ k[0, kv_head].T, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[0, head] = weights @ v[0, kv_head]
        d_weights = d_out[0, head] @ v[0, kv_head].T
        mean = (d_weights * weights).sum(axis=1, keepdims=True)
        d_scores = weights * (d_weights - mean)
        dq[0, head] = d_scores @ k[0, kv_head]
        dk[0, kv_head] += d_scores.T @ q[0, head]
        dv[0, kv_head] += weights.T @ d_out[0, head]
    return out, dq, dk, dv


def seen(ends, depths, window: int, first: int, queries: int) -> np.ndarray:
    """bool [queries, COUNT]"""
    key = np.arange(COUNT)
    query = first + np.arange(queries)[:, None]
    depths = np.asarray(depths)[0]
    near = depths[query] - depths < window
    return (key <= query) & (query < np.asarray(ends)[0]) & near


def arrays(queries: int, *, size: int, value_size: int):
    q = drawn(0, 1, 2 * GROUP, queries, size) / size**0.5
    d_out = drawn(1, 1, 2 * GROUP, queries, value_size)
    k = drawn(2, 1, 2, COUNT, size)
    v = drawn(3, 1, 2, COUNT, value_size)
    return q, k, v, d_out


@settings(max_examples=examples(15))
@given(runs=RUNS, window=st.integers(1, COUNT), first=st.integers(0, COUNT - QUERIES))
def test_outputs_and_gradients_of_any_forest_equal_those_in_float64(runs, window, first):
    """Windows, groups of query heads, queries that are a part of the row, narrower values."""
    ends, depths = forest(runs)
    mask = TreeMask(ends, depths, jnp.int32(window), jnp.int32(first))
    q, k, v, d_out = arrays(QUERIES, size=24, value_size=20)
    got = interpreted(q, k, v, mask, d_out)
    visible = seen(ends, depths, window, first, QUERIES)
    for result, expected in zip(got, reference(q, k, v, d_out, visible), strict=True):
        np.testing.assert_allclose(result, expected, atol=2e-5)


def test_blocks_between_which_nothing_is_seen_are_left_out():
    ends, depths = forest([(0, 128), (128, 172)])
    mask = TreeMask(ends, depths, jnp.int32(COUNT), jnp.int32(COUNT - QUERIES))
    q, k, v, d_out = arrays(QUERIES, size=24, value_size=20)
    # No weight is too small to carry it on.
    lost_k = k.at[:, :, :128].set(jnp.nan)
    lost_v = v.at[:, :, :128].set(jnp.nan)
    out, dq, dk, dv = interpreted(q, lost_k, lost_v, mask, d_out)
    for result in (out, dq, dk[:, :, 128:], dv[:, :, 128:]):
        assert bool(jnp.isfinite(result).all())


@pytest.mark.parametrize("size", [128, pytest.param(200, marks=pytest.mark.slow)])
@settings(max_examples=examples(3))
@given(runs=RUNS)
def test_rows_without_a_window_equal_those_in_float64_with_wide_heads(size, runs):
    """Tiles are smaller then; 200 numbers are padded to 256."""
    ends, depths = forest(runs)
    q, k, v, d_out = arrays(COUNT, size=size, value_size=size)
    got = interpreted(q, k, v, TreeMask(ends), d_out)
    visible = seen(ends, depths, COUNT, 0, COUNT)
    for result, expected in zip(got, reference(q, k, v, d_out, visible), strict=True):
        np.testing.assert_allclose(result, expected, atol=5e-5)


def test_heads_too_wide_for_a_multiprocessor_have_no_kernel():
    widest = jnp.zeros((1, 1, 1, tree_kernel_cuda.WIDEST_HEAD))
    wider = jnp.zeros((1, 1, 1, tree_kernel_cuda.WIDEST_HEAD + 1))
    assert tree_kernel_cuda.supports(widest, widest)
    assert not tree_kernel_cuda.supports(wider, widest)
