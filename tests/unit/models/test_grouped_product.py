"""Products of rows with the matrix of their group, against a loop over groups in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jax_agent_rl.models import moe
from jax_agent_rl.models.moe import grouped_product

SIZES = [5, 0, 700, 3, 0, 92]  # groups without rows, one that fills a tile, several in one


def expected(x: np.ndarray, weight: np.ndarray, d_out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the output and the gradients with respect to x and weight."""
    out, d_x, d_weight = np.zeros_like(d_out), np.zeros_like(x), np.zeros_like(weight)
    ends = np.cumsum(SIZES)
    for i, (begin, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
        out[begin:end] = x[begin:end] @ weight[i].T
        d_x[begin:end] = d_out[begin:end] @ weight[i]
        d_weight[i] = d_out[begin:end].T @ x[begin:end]
    return out, d_x, d_weight


@pytest.mark.parametrize("columns", [None, 1024, 32], ids=["xla", "kernel, one tile", "kernel, tiles and a part"])
def test_output_and_gradients_are_those_of_a_loop_over_groups(monkeypatch: pytest.MonkeyPatch, columns: int | None):
    if columns is not None:
        monkeypatch.setattr(moe, "by_platform", lambda *args, tpu, default: tpu(*args))
        monkeypatch.setattr(moe, "TILE_COLUMNS", columns)
    rows, count = sum(SIZES), sum(SIZES) + 100  # the last are in no group
    draw = np.random.default_rng(0).standard_normal
    x, weight, d_out = draw((count, 48)), draw((len(SIZES), 40, 48)), draw((count, 40))
    sizes, group = jnp.asarray(SIZES, jnp.int32), jnp.repeat(jnp.arange(len(SIZES)), jnp.asarray(SIZES))

    @jax.jit
    def run(x, weight, d_out):
        out, back = jax.vjp(lambda x, weight: grouped_product(x, weight, sizes, group), x, weight)
        return out, *back(d_out)

    with pltpu.force_tpu_interpret_mode(True):
        found = run(*(jnp.asarray(value, jnp.float32) for value in (x, weight, d_out)))
    for mine, wanted in zip(found, expected(x, weight, d_out), strict=True):
        np.testing.assert_allclose(mine[:rows] if len(mine) == count else mine, wanted[:rows], rtol=1e-4, atol=1e-4)
