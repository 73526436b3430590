"""The load-balancing loss equals that of transformers, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.config import Experts
from jax_agent_rl.models.moe import load_balancing_loss, router_load

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("count", [4, 7])
def test_value_and_gradient_of_masked_rows_equal_those_of_transformers(count: int):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    rng = np.random.default_rng(count)
    layers = 3
    rows = 2
    tokens = 11
    width = 8
    x = rng.standard_normal((layers, rows, tokens, width), np.float32)
    routers = rng.standard_normal((layers, count, width), np.float32)
    mask = np.arange(tokens) < np.array([[11], [6]])
    experts = Experts(count=count, per_token=2, intermediate_size=4, normalize=True)

    def loss(routers: jax.Array) -> jax.Array:
        load = sum(
            router_load(
                experts, {"router": routers[i]}, jnp.asarray(x[i]), jnp.asarray(mask, jnp.int32)
            )
            for i in range(3)
        )
        total = jnp.float32(layers * mask.sum())
        return load_balancing_loss(load[1], load[0] / total, total)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(routers))
    theirs = torch.tensor(routers, requires_grad=True)
    gates = tuple((torch.tensor(x[i]) @ theirs[i].T).reshape(-1, count) for i in range(layers))
    expected = load_balancing_loss_func(gates, count, 2, torch.tensor(mask))
    expected.backward()
    np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(gradient, theirs.grad.numpy(), atol=1e-6)
