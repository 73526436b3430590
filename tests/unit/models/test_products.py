"""Products of layers, and what TPU programs compute before what reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_agent_rl.models import sharding
from jax_agent_rl.models.layers import apart, gradient_apart, linear
from jax_agent_rl.models.lora import LoRA


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    heads=st.sampled_from((1, 2, 6)),
    head_dim=st.sampled_from((2, 4)),
    adapted=st.booleans(),
)
def test_heads_may_be_an_axis_of_what_a_product_reads(
    rows: int, heads: int, head_dim: int, adapted: bool
):
    rng = np.random.default_rng(heads)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    features = heads * head_dim
    adapter = LoRA(draw(2, features), draw(8, 2), scale=0.5) if adapted else None
    x = draw(rows, 5, heads, head_dim)
    weight = draw(8, features)
    flat = linear(x.reshape(rows, 5, features), weight, adapter=adapter)
    by_head = linear(x, weight, adapter=adapter, by_head=True)
    np.testing.assert_allclose(by_head, flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("separated", "barriers"), [(apart, 2), (gradient_apart, 1)])
def test_tpu_programs_compute_a_value_or_its_gradient_before_its_readers(
    monkeypatch: pytest.MonkeyPatch, separated, barriers: int
):
    monkeypatch.setattr(sharding, "described_platforms", set())
    sharding.expect_described("tpu")
    program = jax.jit(jax.value_and_grad(lambda x: jnp.sin(separated(x * x))))
    x = jnp.float32(0.7)

    traced = program.trace(x)
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert on_tpu.count("stablehlo.optimization_barrier") == barriers
    assert "optimization_barrier" not in traced.lower(lowering_platforms=("cpu",)).as_text()

    value, gradient = program(x)
    np.testing.assert_allclose(value, np.sin(0.49), rtol=1e-6)
    np.testing.assert_allclose(gradient, 1.4 * np.cos(0.49), rtol=1e-6)
