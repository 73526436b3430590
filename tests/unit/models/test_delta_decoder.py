"""Decoders with delta nets over token trees, and on meshes."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.models.config import DeltaNet, Params, Rope
from jax_agent_rl.models.decoder import Decoder
from tests.simulated import run_on_devices
from tests.tiny import TINY, tiny_params

DELTA = replace(
    TINY,
    family="qwen3_5_text",
    num_layers=2,
    qk_norm=True,
    attention_gate=True,
    norm_offset=1.0,
    rms_norm_eps=1e-2,  # a smaller one makes more of what rounds where outputs are close to 0
    rope=Rope(theta=1e4, partial_rotary=0.25),
    delta_net=DeltaNet(layers=(True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=6),
)


def test_a_tree_has_the_hidden_states_and_gradients_of_its_sequences():
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 97, 70).tolist()  # longer than a chunk
    answers = [rng.integers(3, 97, count).tolist() for count in (20, 3, 41)]
    params = tiny_params(config=DELTA)

    # All answers leave the prompt at its end.
    tree_ids = prompt + answers[0] + answers[1] + answers[2]
    positions = [*range(90), *range(70, 73), *range(70, 111)]
    ends = [134] * 70 + [90] * 20 + [93] * 3 + [134] * 41
    rows = np.zeros((3, 111), np.int32)
    for row, answer in zip(rows, answers, strict=True):
        row[: 70 + len(answer)] = prompt + answer

    def of_tree(params: Params) -> tuple[jax.Array, jax.Array]:
        model = Decoder.from_params(DELTA, params)
        hidden, _ = model(
            jnp.array([tree_ids]), jnp.array([positions], jnp.int32), jnp.array([ends], jnp.int32)
        )
        of_answers = hidden[0, 70:]
        return jnp.sum(jnp.sin(of_answers)), of_answers

    def of_rows(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden, _ = Decoder.from_params(DELTA, params)(jnp.asarray(rows))
        of_answers = jnp.concatenate([hidden[0, 70:90], hidden[1, 70:73], hidden[2, 70:]])
        return jnp.sum(jnp.sin(of_answers)), of_answers

    results = []
    for compute in (of_tree, of_rows):
        (_, hidden), gradients = jax.jit(jax.value_and_grad(compute, has_aux=True))(params)
        results.append((hidden, gradients))

    def assert_close(actual: jax.Array, reference: jax.Array) -> None:
        scale = float(jnp.abs(reference).max())
        assert scale > 0
        # A layer more rounds more than the rule alone, which tests/unit/models/test_delta_tree.py
        # holds to 1e-5.
        np.testing.assert_allclose(actual / scale, reference / scale, atol=3e-5)

    jax.tree.map(assert_close, *results)


MESHES = """
import jax, jax.numpy as jnp, numpy as np
from dataclasses import replace
from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from tests.tiny import tiny_params
from tests.unit.models.test_delta_decoder import DELTA

rng = np.random.default_rng(0)
ids = jnp.asarray(rng.integers(3, 97, (4, 96)))
positions = np.tile(np.concatenate([np.arange(80), np.arange(30, 46)]), (4, 1)).astype(np.int32)
ends = np.tile(np.concatenate([np.full(30, 96), np.full(50, 80), np.full(16, 96)]), (4, 1))

config = replace(DELTA, vocab_size=112)
params = tiny_params(config=config)

def loss(params, mesh):
    hidden, _ = Decoder.from_params(config, params)(
        ids, jnp.asarray(positions), jnp.asarray(ends, jnp.int32), mesh=mesh
    )
    return jnp.sum(jnp.sin(hidden)) / 100

run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
expected = run(params, None)
for shape in (
    {"fsdp": 2, "tensor": 2, "data": 2},
    {"context": 2, "tensor": 2, "fsdp": 2},
    {"context": 8},
):
    mesh = make_mesh(LearnerConfig(mesh=shape).mesh)
    sharded = jax.device_put(params, parameter_shardings(mesh, config.parameter_shapes()))
    actual = run(sharded, mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()),
        actual, expected,
    )
    print(*shape, "equal")
"""


def test_meshes_compute_what_one_device_does():
    # The last one has more devices than heads: each computes all of them.
    lines = run_on_devices(MESHES)
    assert lines == ["fsdp tensor data equal", "context tensor fsdp equal", "context equal"]
