"""Which branch a program takes."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.models import sharding


def test_what_was_traced_before_tpus_were_described_is_traced_again(monkeypatch):
    monkeypatch.setattr(sharding, "described_platforms", set())
    function = jax.jit(lambda x: sharding.by_platform(x, tpu=jnp.sin, default=jnp.cos))
    x = jnp.float32(1)
    np.testing.assert_allclose(function(x), np.cos(1), rtol=1e-6)
    sharding.expect_described("tpu")
    program = jax.jit(lambda x: function(x)).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "sine" in program and "cosine" not in program
    np.testing.assert_allclose(function(x), np.cos(1), rtol=1e-6)
