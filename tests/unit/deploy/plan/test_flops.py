"""Counts are compared with numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jax_agent_rl.deploy.plan.prediction import Flops, count_work
from jax_agent_rl.models import tree_kernel
from jax_agent_rl.models.tree_kernel import TreeMask


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def work_of(function, *args, loops=1) -> Flops:
    return count_work(jax.make_jaxpr(function)(*args).jaxpr, loops=loops)


def test_a_product_counts_two_operations_for_each_pair_and_every_array_once():
    work = work_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shape(5, 2, 3), shape(5, 3, 7))
    assert work.flops == 2 * 5 * 2 * 3 * 7
    assert work.bytes == 4 * 5 * (2 * 3 + 3 * 7 + 2 * 7)


def test_a_scan_counts_as_often_as_it_runs_and_recomputes():
    def loss(weights, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0].sum()

    forward = 2 * 4 * 8 * 8 * 3
    assert work_of(loss, shape(3, 8, 8), shape(4, 8)).flops == forward
    # Forward, the same again, and one product for each of the two derivatives.
    assert work_of(jax.grad(loss), shape(3, 8, 8), shape(4, 8)).flops == 4 * forward


def test_a_loop_of_unknown_length_runs_as_often_as_is_said():
    def loop(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ c[0], c[1] + 1), (x, 0))[0]

    assert (
        work_of(loop, shape(4, 4), jax.ShapeDtypeStruct((), jnp.int32), loops=16).flops
        == 16 * 2 * 4**3
    )


def test_of_branches_the_dearest_counts():
    def choose(x, p):
        return jax.lax.cond(p, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert work_of(choose, shape(4, 4), jax.ShapeDtypeStruct((), bool)).flops == 2 * 2 * 4**3


def test_of_what_each_platform_does_its_own_way_the_tpus_counts():
    ways = {"tpu": lambda x: x @ x, "default": lambda x: x @ x @ x}
    assert work_of(lambda x: jax.lax.platform_dependent(x, **ways), shape(4, 4)).flops == 2 * 4**3
    assert (
        work_of(lambda x: jax.lax.platform_dependent(x, default=ways["default"]), shape(4, 4)).flops
        == 2 * 2 * 4**3
    )


def test_attention_of_a_tree_counts_the_pairs_that_its_kernel_computes():
    ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    heads = shape(1, 4, 256, 64)

    def attend(q, k, v, ends, positions):
        return tree_kernel.forward(q, k, v, TreeMask(subtree_end=ends, positions=positions))

    # Two products of 64 for each head and for each query with half of the keys: it sees nothing
    # that comes later.
    assert work_of(attend, heads, heads, heads, ids, ids).flops == 2 * 2 * 64 * 4 * 256 * 256 // 2


def test_shards_count_together():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    split = jax.sharding.PartitionSpec("x")
    run = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=split, out_specs=split)
    assert work_of(run, shape(4, 4)).flops == 2 * 4**3


def test_what_is_hidden_in_custom_derivatives_is_found():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert work_of(jax.jit(square), shape(4, 4)).flops == 2 * 4**3
    assert work_of(jax.grad(lambda x: square(x).sum()), shape(4, 4)).flops == 3 * 2 * 4**3


def test_a_convolution_counts_its_window():
    run = lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), "VALID")  # noqa: E731
    assert work_of(run, shape(1, 3, 10), shape(5, 3, 4)).flops == 2 * 7 * 5 * 3 * 4


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2)])
def test_rows_of_a_ragged_product_meet_one_expert_each(sizes):
    run = lambda x, w: jax.lax.ragged_dot(x, w, jnp.asarray(sizes, jnp.int32))  # noqa: E731
    assert work_of(run, shape(4, 8), shape(2, 8, 6)).flops == 2 * 4 * 8 * 6
