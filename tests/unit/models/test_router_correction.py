"""The correction of a router's choices: no optimizer changes it, and nothing rounds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.jetstream.forward import engine_params
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.parameterization import compute_params
from jax_agent_rl.models.hf import hf_tensors, load_params, save_hf
from jax_agent_rl.models.parameters import rounded_params
from tests.tiny import EXPERTS, tiny_params
from tests.trajectories import random_groups

assert EXPERTS.experts is not None
MODEL = replace(
    EXPERTS,
    family="glm4_moe",
    experts=replace(EXPERTS.experts, scoring="sigmoid", correction=True, shared_size=16),
)
PARAMS = tiny_params(config=MODEL)
CORRECTION = np.asarray(PARAMS["layers"]["router_correction"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_leaves_it_as_it_is(optimizer: str):
    settings = {"optimizer": optimizer, "learning_rate": 0.1, "weight_decay": 0.5}
    config = LearnerConfig.model_validate({"pack_length": 64, "remat": "none", **settings})
    learner = Learner(MODEL, PARAMS, algorithm=AlgorithmConfig(), config=config, temperature=1.0)
    learner.update(random_groups(0))
    layers = learner.params["layers"]
    np.testing.assert_array_equal(layers["router_correction"], CORRECTION)
    assert np.abs(layers["router"] - PARAMS["layers"]["router"]).max() > 1e-3
    assert "router_correction" not in learner.policy.state.params["layers"]


def test_it_stays_float32_on_its_way_to_engines_of_another_dtype(tmp_path: Path):
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    tensors = dict(hf_tensors(MODEL, PARAMS, dtype="bfloat16"))
    np.testing.assert_array_equal(tensors[name], CORRECTION[0])
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == jnp.bfloat16

    save_hf(tmp_path / "model", MODEL, PARAMS)
    file = tmp_path / "model" / "model.safetensors"
    read = load_params([file], MODEL, dtype=jnp.bfloat16)
    for params in (
        read,
        compute_params(PARAMS, "bfloat16"),
        rounded_params(PARAMS, "bfloat16"),
    ):
        np.testing.assert_array_equal(params["layers"]["router_correction"], CORRECTION)
        assert params["layers"]["router"].dtype == jnp.bfloat16

    served = engine_params(MODEL, PARAMS, dtype=jnp.bfloat16, quantize=jnp.int8)
    np.testing.assert_array_equal(served.layers[1]["router_correction"], CORRECTION[1])
    assert served.layers[1]["router"].dtype == jnp.bfloat16
