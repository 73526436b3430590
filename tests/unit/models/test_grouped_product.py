"""Products of rows with the matrix of their group, against a loop over groups in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models import moe
from jax_agent_rl.models.moe import grouped_product

SIZES = [5, 0, 700, 3, 0, 92]  # groups without rows, one that fills a tile, several in one


def expected(
    x: np.ndarray, weight: np.ndarray, d_out: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the output and the gradients with respect to x and weight."""
    out = np.zeros_like(d_out)
    d_x = np.zeros_like(x)
    d_weight = np.zeros_like(weight)
    ends = np.cumsum(SIZES)
    for i, (begin, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
        out[begin:end] = x[begin:end] @ weight[i].T
        d_x[begin:end] = d_out[begin:end] @ weight[i]
        d_weight[i] = d_out[begin:end].T @ x[begin:end]
    return out, d_x, d_weight


def run_tpu_kernels(*args, default, tpu=None, cuda=None):
    if tpu is None:
        return default(*args)
    return tpu(*args)


def run_cuda_kernels(*args, default, tpu=None, cuda=None):
    assert cuda is not None
    return cuda(*args, interpret=True)


@pytest.mark.parametrize(
    ("platform", "columns"),
    [("cpu", None), ("tpu", 1024), ("tpu", 32), ("cuda", None)],
    ids=["xla", "kernel, one tile", "kernel, tiles and a part", "kernels of GPUs"],
)
def test_output_and_gradients_are_those_of_a_loop_over_groups(
    monkeypatch: pytest.MonkeyPatch, platform: str, columns: int | None
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
    weight = draw((len(SIZES), 80, 48))
    d_out = draw((count, 80))
    sizes = jnp.asarray(SIZES, jnp.int32)
    group = jnp.repeat(jnp.arange(len(SIZES)), jnp.asarray(SIZES))

    @jax.jit
    def run(x, weight, d_out):
        out, back = jax.vjp(lambda x, weight: grouped_product(x, weight, sizes, group), x, weight)
        return out, *back(d_out)

    with pltpu.force_tpu_interpret_mode(True):
        actual = run(*(jnp.asarray(value, jnp.float32) for value in (x, weight, d_out)))
    for mine, wanted in zip(actual, expected(x, weight, d_out), strict=True):
        np.testing.assert_allclose(
            mine[:rows] if len(mine) == count else mine, wanted[:rows], rtol=1e-4, atol=1e-4
        )


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
    monkeypatch.setattr(moe, "ragged_product", unwritten)
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
