"""The TPU kernels of tree attention, interpreted, against the blocks that XLA gets elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models import tree_kernel
from jax_agent_rl.models.attention import tree_attention
from jax_agent_rl.models.tree_kernel import TreeMask
from tests.examples import examples

COUNT = 300  # of tokens in a row: two blocks of 128 and a part of one


def forest(runs: list[tuple[int, int]]) -> tuple[jax.Array, jax.Array]:
    """Ends of subtrees and depths of tokens in depth-first order: each run goes back some steps,
    then straight on.

    What is left of the row are trees of one token, as padding is.
    """
    depths: list[int] = []
    for back, length in runs:
        begin = max(0, depths[-1] + 1 - back) if depths else 0
        depths += range(begin, begin + length)
    depths = (depths + [0] * COUNT)[:COUNT]
    ends = []
    for i, depth in enumerate(depths):
        end = i + 1
        while end < COUNT and depths[end] > depth:
            end += 1
        ends.append(end)
    return jnp.array([ends], jnp.int32), jnp.array([depths], jnp.int32)


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@jax.jit
def interpreted(q, k, v, mask, d_out):
    """Output and gradients, by the kernels."""
    with pltpu.force_tpu_interpret_mode(
        True
    ):  # as XLA's operations; the default's callbacks take seconds
        out, normalizer = tree_kernel.forward(q, k, v, mask, block=128)
        return out, *tree_kernel.backward(q, k, v, mask, out, normalizer, d_out, block=128)


@jax.jit
def expected(q, k, v, mask, d_out):
    """Output and gradients, as they are on this machine."""
    out, gradients = jax.vjp(lambda q, k, v: tree_attention(q, k, v, mask), q, k, v)
    return out, *gradients(d_out)


RUNS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=5)


def assert_equal_to_blocks(
    mask: TreeMask, *, group: int, asking: slice = slice(None), value_size: int = 8
) -> None:
    q = drawn(0, 1, 2 * group, COUNT, 8)[:, :, asking]
    d_out = drawn(1, 1, 2 * group, COUNT, value_size)[:, :, asking]
    k = drawn(2, 1, 2, COUNT, 8)
    v = drawn(3, 1, 2, COUNT, value_size)
    for got, wanted in zip(
        interpreted(q, k, v, mask, d_out),
        expected(q, k, v, mask, d_out),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@settings(max_examples=examples(20))
@given(runs=RUNS, group=st.sampled_from([1, 3]))
def test_outputs_and_gradients_of_any_forest_equal_those_of_plain_blocks(runs, group):
    assert_equal_to_blocks(TreeMask(forest(runs)[0]), group=group)


@settings(max_examples=examples(20))
@given(runs=RUNS, window=st.integers(1, 200))
def test_a_window_counts_steps_of_the_tree(runs, window):
    assert_equal_to_blocks(TreeMask(*forest(runs), jnp.int32(window)), group=2)


@settings(max_examples=examples(20))
@given(runs=RUNS, window=st.integers(1, 200), shard=st.integers(0, 2))
def test_a_shard_asks_from_where_it_stands_in_the_row(runs, window, shard):
    mask = TreeMask(*forest(runs), jnp.int32(window), jnp.int32(shard * 100))
    assert_equal_to_blocks(mask, group=2, asking=slice(shard * 100, shard * 100 + 100))


def test_blocks_between_which_nothing_is_seen_are_left_out():
    ends, _ = forest([(0, 128), (128, 172)])
    q = drawn(0, 1, 2, COUNT, 8)
    k = drawn(1, 1, 2, COUNT, 8)
    lost = k.at[:, :, :128].set(jnp.nan)  # no weight is too small to carry it on
    out, dq, dk, dv = interpreted(q, lost, lost, TreeMask(ends), q)
    assert all(bool(jnp.isfinite(x[:, :, 128:]).all()) for x in (out, dq, dk, dv))


def test_values_may_be_narrower_than_keys():
    mask = TreeMask(forest([(0, 90), (30, 100), (200, 60)])[0])
    assert_equal_to_blocks(mask, group=3, value_size=5)
