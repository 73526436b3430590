"""Families with experts, biases and windows: read onto a mesh, and trained there as on one device."""

import os
import subprocess
import sys

SCRIPT = """
import sys, tempfile, numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.sharding import make_mesh, parameter_shardings
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.models.config import DecoderConfig, Experts, Rope
from jax_agent_rl.models.hf import load_hf, save_hf
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

base = replace(TINY, vocab_size=96, num_layers=2)
experts = Experts(count=4, per_token=2, intermediate_size=16, normalize=True)
gemma = {"qk_norm": True, "sandwich_norms": True, "norm_offset": 1.0, "activation": "gelu_tanh",
         "attention_scale": 0.25,
         "sliding_window": 4, "windowed_layers": (True, False), "local_rope": Rope(theta=100.0), "embed_scale": 32**0.5}
for config in (
    replace(base, family="qwen2", qkv_bias=True),
    replace(base, family="qwen3_moe", qk_norm=True, experts=experts),
    replace(base, family="gemma3_text", **gemma),
):
    results = []
    with tempfile.TemporaryDirectory() as folder:
        save_hf(folder, config, tiny_params(config=config))
        for shape in ({}, {"fsdp": 2, "tensor": 2, "data": 2}):
            settings = LearnerConfig(learning_rate=1e-3, row_length=32, mesh=shape)
            shardings = parameter_shardings(make_mesh(settings.mesh), config.parameter_shapes())
            read, params = load_hf(folder, shardings=shardings)
            assert replace(read, bos_token_id=1) == config, (read, config)
            assert params["layers"]["q"].sharding == shardings["layers"]["q"]
            made = Learner(config, params, algorithm=AlgorithmConfig(), config=settings, temperature=1.0)
            made.update(random_groups(0, vocabulary=96))
            results.append([np.asarray(x) for x in jax.tree.leaves(made.params)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    print(config.family, "equal")
"""


def test_a_mesh_reads_and_trains_every_family_as_one_device_does():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": os.getcwd()}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=500
    )
    assert result.stdout.split("\n")[:3] == ["qwen2 equal", "qwen3_moe equal", "gemma3_text equal"], result.stderr[
        -2000:
    ]
