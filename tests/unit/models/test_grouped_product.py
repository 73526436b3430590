"""Products of rows with the matrix of their group, against a loop over groups in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models import moe
from jax_agent_rl.models.moe import grouped_products

SIZES = [5, 0, 700, 3, 0, 92]  # groups without rows, one that fills a tile, several in one


def expected(
    x: np.ndarray, weights: list[np.ndarray], d_outs: list[np.ndarray]
) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Return the outputs and the gradients with respect to x and weights."""
    outs = [np.zeros_like(d_out) for d_out in d_outs]
    d_x = np.zeros_like(x)
    d_weights = [np.zeros_like(weight) for weight in weights]
    ends = np.cumsum(SIZES)
    for i, (begin, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
        for number, weight in enumerate(weights):
            d_out = d_outs[number][begin:end]
            outs[number][begin:end] = x[begin:end] @ weight[i].T
            d_x[begin:end] += d_out @ weight[i]
            d_weights[number][i] = d_out.T @ x[begin:end]
    return outs, d_x, d_weights


def run_tpu_kernels(*args, default, tpu=None, cuda=None):
    if tpu is None:
        return default(*args)
    return tpu(*args)


def run_cuda_kernels(*args, default, tpu=None, cuda=None):
    assert cuda is not None
    return cuda(*args, interpret=True)


@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize(
    ("platform", "columns"),
    [("cpu", None), ("tpu", 1024), ("tpu", 32), ("cuda", None)],
    ids=["xla", "kernel, one tile", "kernel, tiles and a part", "kernels of GPUs"],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_groups(
    monkeypatch: pytest.MonkeyPatch, platform: str, columns: int | None, matrices: int
):
    if platform == "tpu":
        monkeypatch.setattr(moe, "by_platform", run_tpu_kernels)
        monkeypatch.setattr(moe, "TILE_COLUMNS", columns)
    if platform == "cuda":
        monkeypatch.setattr(moe, "by_platform", run_cuda_kernels)
    rows = sum(SIZES)
    count = sum(SIZES) + 100  # the last are in no group
    draw = np.random.default_rng(0).standard_normal
    x = draw((count, 48))
    weights = [draw((len(SIZES), 80, 48)) for _ in range(matrices)]
    d_outs = [draw((count, 80)) for _ in range(matrices)]
    sizes = jnp.asarray(SIZES, jnp.int32)
    group = jnp.repeat(jnp.arange(len(SIZES)), jnp.asarray(SIZES))

    @jax.jit
    def run(x, weights, d_outs):
        def products(x, weights):
            return grouped_products(x, weights, sizes, group)

        outs, back = jax.vjp(products, x, weights)
        return outs, *back(d_outs)

    given = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), (x, weights, d_outs))
    with pltpu.force_tpu_interpret_mode(True):
        actual = run(*given)
    for mine, wanted in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected(x, weights, d_outs)), strict=True
    ):
        np.testing.assert_allclose(
            mine[:rows] if len(mine) == count else mine, wanted[:rows], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("inputs", "outputs", "is_read"),
    [(2048, 768, True), (48, 80, True), (2880, 2880, False)],
    ids=["whole lanes", "small", "gpt-oss"],
)
def test_matrices_whose_blocks_would_not_fit_a_tpu_are_left_to_xla(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, is_read: bool
):
    offered = []

    def note_kernels(*args, default, tpu=None, cuda=None):
        offered.append(tpu is not None)
        return default(*args)

    monkeypatch.setattr(moe, "by_platform", note_kernels)
    x = jax.ShapeDtypeStruct((512, inputs), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4, outputs, inputs), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    jax.eval_shape(
        lambda x, weight, sizes: moe.ragged_products(x, (weight,), sizes), x, weight, sizes
    )
    assert offered == [is_read]


@jax.custom_vjp
def unwritten(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """A product that leaves NaN in the rows of no group, as memory that a kernel does not write may
    hold.
    """
    return _ended(jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes), sizes, jnp.nan)


def _ended(rows: jax.Array, sizes: jax.Array, value: float) -> jax.Array:
    return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], rows, value)


def _backward(saved, d_out):
    x, weight, sizes = saved
    product = lambda x, weight: jax.lax.ragged_dot(x, weight.swapaxes(1, 2), sizes)  # noqa: E731
    d_x, d_weight = jax.vjp(product, _ended(x, sizes, 0), weight)[1](
        _ended(d_out, sizes, 0)
    )  # as a kernel reads
    return _ended(d_x, sizes, jnp.nan), d_weight, None


unwritten.defvjp(lambda *args: (unwritten(*args), args), _backward)


def test_what_a_product_leaves_in_rows_of_other_shards_reaches_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    def unwritten_products(x, weights, sizes):
        return tuple(unwritten(x, weight, sizes) for weight in weights)

    monkeypatch.setattr(moe, "ragged_products", unwritten_products)
    count = 4
    tokens = 12
    draw = np.random.default_rng(0).standard_normal
    shapes = {
        "expert_gate": (count, 6, 8),
        "expert_up": (count, 6, 8),
        "expert_down": (count, 8, 6),
    }
    layer = {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}
    layer |= {
        f"{name}_bias": jnp.asarray(draw(shape[:2]), jnp.float32) for name, shape in shapes.items()
    }
    x = jnp.asarray(draw((tokens, 8)), jnp.float32)
    weights = jnp.asarray(draw((tokens, 2)), jnp.float32)
    chosen = jnp.asarray(
        np.random.default_rng(1).permuted(np.tile(np.arange(count + 2), (tokens, 1)), axis=1)[:, :2]
    )
    chosen = jnp.minimum(chosen, count)  # a third of the choices are other shards'

    def grouped(layer, x, weights):
        return jnp.sum(
            moe.weighted_outputs(layer, x, weights, chosen, lambda gate, up: jax.nn.silu(gate) * up)
            ** 2
        )

    def one_by_one(layer, x, weights):
        def of(token, choice):
            pick = {
                name: value[jnp.minimum(chosen[token, choice], count - 1)]
                for name, value in layer.items()
            }
            gate, up = (
                pick[name] @ x[token] + pick[f"{name}_bias"]
                for name in ("expert_gate", "expert_up")
            )
            out = pick["expert_down"] @ (jax.nn.silu(gate) * up) + pick["expert_down_bias"]
            return jnp.where(chosen[token, choice] < count, weights[token, choice] * out, 0)

        return sum(jnp.sum((of(token, 0) + of(token, 1)) ** 2) for token in range(tokens))

    actual = jax.value_and_grad(grouped, argnums=(0, 1, 2))(layer, x, weights)
    wanted = jax.value_and_grad(one_by_one, argnums=(0, 1, 2))(layer, x, weights)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), actual, wanted
    )


@pytest.mark.parametrize("on_this_shard", [0.0, 0.2, 1.0], ids=["none", "a pass", "several"])
def test_passes_add_up_to_one_pass_over_all_choices(
    monkeypatch: pytest.MonkeyPatch, on_this_shard: float
):
    monkeypatch.setattr(moe, "TILE_ROWS", 8)
    count = 4
    tokens = 40
    draw = np.random.default_rng(0)
    shapes = {
        "expert_gate": (count, 6, 8),
        "expert_up": (count, 6, 8),
        "expert_down": (count, 8, 6),
        "expert_down_bias": (count, 8),
    }
    layer = {}
    for name, shape in shapes.items():
        layer[name] = jnp.asarray(draw.standard_normal(shape), jnp.float32)
    x = jnp.asarray(draw.standard_normal((tokens, 8)), jnp.float32)
    weights = jnp.asarray(draw.standard_normal((tokens, 2)), jnp.float32)
    is_here = draw.random((tokens, 2)) < on_this_shard
    chosen = jnp.asarray(np.where(is_here, draw.integers(0, count, (tokens, 2)), count))

    def activation(gate, up):
        return jax.nn.silu(gate) * up

    def in_passes(layer, x, weights):
        outputs = moe.outputs_in_passes(layer, x, weights, chosen, activation, shards=4)
        return jnp.sum(outputs**2), outputs

    def at_once(layer, x, weights):
        outputs = moe.weighted_outputs(layer, x, weights, chosen, activation)
        return jnp.sum(outputs**2), outputs

    results = []
    for compute in (in_passes, at_once):
        gradient = jax.jit(jax.value_and_grad(compute, argnums=(0, 1, 2), has_aux=True))
        results.append(gradient(layer, x, weights))
    jax.tree.map(
        lambda mine, wanted: np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5),
        *results,
    )
