"""A mixture whose first layers are dense: its layers one after the other, its files, and gradients.

``tests/parity`` compares it with transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.models.config import Params
from jax_agent_rl.models.decoder import Decoder
from jax_agent_rl.models.decoder_layer import decoder_layer
from jax_agent_rl.models.hf import load_hf, save_hf, tensor_names
from jax_agent_rl.models.layer_weights import LayerWeights
from jax_agent_rl.models.layers import rms_norm
from jax_agent_rl.models.mixers.mixer import TokenTrees
from jax_agent_rl.models.mixers.table import MIXERS
from tests.tiny import EXPERTS, TINY, tiny_params

assert EXPERTS.experts is not None
MODEL = replace(
    EXPERTS,
    family="qwen3_moe",
    num_layers=5,
    experts=replace(EXPERTS.experts, first_dense_layers=2),
)
IDS = np.random.default_rng(0).integers(3, TINY.vocab_size, (2, 12))
COPIES = np.ones(IDS.shape, np.int32)
Compute = Callable[[Params], tuple[jax.Array, jax.Array]]


def test_a_parameter_is_stacked_over_the_layers_that_have_it():
    assert MODEL.layers_with("q") == (0, 1, 2, 3, 4)
    assert MODEL.layers_with("gate") == (0, 1)
    assert MODEL.layers_with("router") == MODEL.expert_layers == (2, 3, 4)
    shapes = MODEL.parameter_shapes()["layers"]
    assert shapes["down"] == (2, 32, 48)
    assert shapes["expert_down"] == (3, 8, 32, 16)
    assert "router" not in MODEL.layer_shapes(1)
    assert "gate" not in MODEL.layer_shapes(2)


def test_files_name_the_layer_and_not_the_place_in_a_stack(tmp_path: Path):
    names = tensor_names(MODEL)["layers"]
    assert names["gate"] == [f"model.layers.{i}.mlp.gate_proj.weight" for i in (0, 1)]
    assert names["router"] == [f"model.layers.{i}.mlp.gate.weight" for i in (2, 3, 4)]

    params = tiny_params(config=MODEL)
    save_hf(tmp_path / "model", MODEL, params)
    config, read = load_hf(tmp_path / "model")
    assert replace(config, bos_token_id=1) == MODEL
    jax.tree.map(np.testing.assert_array_equal, read, params)


def layer_by_layer(params: Params) -> tuple[jax.Array, jax.Array]:
    """Final hidden states and expert loads, layer after layer, without a loop over runs."""
    count = IDS.shape[1]
    tokens = TokenTrees(
        positions=jnp.broadcast_to(jnp.arange(count), IDS.shape),
        subtree_end=jnp.full(IDS.shape, count, jnp.int32),
    )
    mixer = MIXERS["attention"]
    shared = mixer.prepare(MODEL, False, tokens)
    x = params["embed"][IDS]
    loads = jnp.zeros((2, 8))
    for layer in range(MODEL.num_layers):
        weights = {}
        for name in MODEL.layer_shapes(layer):
            weights[name] = params["layers"][name][MODEL.layers_with(name).index(layer)]
        alone = LayerWeights(config=MODEL, kind=MODEL.layer_kind(layer), params=weights)
        mix = functools.partial(mixer.mix, alone)
        x, load = decoder_layer(alone, x, lambda y, mix=mix: mix(y, shared), copies=COPIES)
        assert load is not None
        loads = loads + load
    return rms_norm(MODEL, x, params["final_norm"]), loads


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_loop_over_runs_is_the_layers_one_after_the_other(remat: str):
    params = tiny_params(config=MODEL)

    def in_runs(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden, loads = Decoder.from_params(MODEL, params)(IDS, copies=COPIES, remat=remat)
        assert loads is not None
        return hidden, loads

    results = []
    for compute in (in_runs, layer_by_layer):

        def loss(params: Params, compute: Compute = compute) -> tuple[jax.Array, Any]:
            hidden, loads = compute(params)
            return jnp.sum(jnp.sin(hidden)) + jnp.sum(loads[1] ** 2), (hidden, loads)

        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    ((_, outputs), gradients), ((_, expected_outputs), expected_gradients) = results

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5), outputs, expected_outputs
    )
    for gradient, expected in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(gradient, expected, atol=1e-5 * np.abs(expected).max())
        assert np.abs(expected).max() > 0


def test_replayed_experts_are_those_of_the_layers_that_have_any():
    params = tiny_params(config=MODEL)
    rng = np.random.default_rng(1)
    routed = rng.integers(0, 8, (*IDS.shape, 3, 2))
    _, loads = jax.jit(
        lambda params: Decoder.from_params(MODEL, params)(
            IDS, copies=COPIES, routed_experts=jnp.asarray(routed)
        )
    )(params)
    assert loads is not None
    chosen = np.bincount(routed.reshape(-1), minlength=8)
    np.testing.assert_array_equal(loads[0], chosen)
