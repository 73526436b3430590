"""Every mesh of simulated devices gives the losses and gradients of one device."""

import os
import subprocess
import sys

import pytest

from jax_agent_rl.config import LearnerConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.sharding import make_mesh, parameter_shardings

SCRIPT = """
import sys, json, numpy as np, jax
from dataclasses import replace
from jax_agent_rl.config import AlgorithmConfig, LearnerConfig
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.models.config import Experts, Rope
from tests.tiny import TINY, tiny_params
from tests.trajectories import random_groups

base = replace(TINY, vocab_size=96, num_layers=2)
MODELS = {
    "dense": replace(base, qk_norm=True, sandwich_norms=True, sliding_window=4, windowed_layers=(True, False),
                     local_rope=Rope(theta=100.0)),
    "experts": replace(base, qk_norm=True,
                       experts=Experts(count=8, per_token=2, intermediate_size=16, normalize=True)),
}
config, groups = MODELS[sys.argv[1]], random_groups(0, vocabulary=96)

def results(mesh, **changes):
    settings = LearnerConfig(**{"learning_rate": 1e-3, "row_length": 48, "mesh": mesh} | changes)
    made = Learner(config, tiny_params(config=config), algorithm=AlgorithmConfig(entropy_coeff=0.01), config=settings,
                   temperature=0.8)
    (mini,), experience = made._prepare(groups)
    gradients, statistics = made._policy.gradients(made._place(made._with_terms(mini, experience).of_policy))
    return mini.batch.num_rows, float(statistics["sum"]["loss"]), [np.asarray(x) for x in jax.tree.leaves(gradients)]

rows, loss, expected = results({})
for case in json.loads(sys.argv[2]):
    _, own, got = results(case["mesh"], **case.get("changes", {}))
    assert abs(own - loss) < 1e-5 * max(1, abs(loss)), (case, own, loss)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max(), err_msg=str(case))
    print("equal", case, flush=True)
print("rows", rows)
"""

ONE_AXIS = [{"data": 8}, {"fsdp": 8}, {"tensor": 2}, {"context": 8}]
MIXED = [
    {"mesh": {"data": 2, "context": 2, "tensor": 2}},
    {"mesh": {"fsdp": 2, "context": 4}, "changes": {"remat": "full"}},
    {"mesh": {"context": 3, "fsdp": 2}, "changes": {"rows_per_micro_batch": 2, "remat": "none"}},
    {"mesh": {"context": 2, "tensor": 4}},  # two key/value heads on four shards
]
WITH_EXPERTS = [
    {"mesh": {"expert": 8}},
    {"mesh": {"expert": 2, "fsdp": 2, "tensor": 2}},
    {"mesh": {"expert": 4, "context": 2}, "changes": {"remat": "full"}},
    {"mesh": {"data": 2, "fsdp": 2}, "changes": {"rows_per_micro_batch": 2, "remat": "none"}},
]


@pytest.mark.parametrize(
    ("model", "cases"),
    [("dense", [{"mesh": mesh} for mesh in ONE_AXIS]), ("dense", MIXED), ("experts", WITH_EXPERTS)],
    ids=["one axis", "mixed", "experts"],
)
def test_a_mesh_gives_the_loss_and_gradient_of_one_device(model: str, cases: list[dict]):
    import json

    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SCRIPT, model, json.dumps(cases)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("equal")] == [f"equal {case}" for case in cases], result.stderr[
        -3000:
    ]
    rows = int(lines[-1].split()[1])
    assert rows % 8, "the test wants rows that do not divide"


def test_more_devices_than_there_are_names_the_axes_asked_for():
    with pytest.raises(ConfigError, match="context=16, tensor=4 = 64 devices, there are 1; lower learner.mesh"):
        make_mesh(LearnerConfig(mesh={"context": 16, "tensor": 4}).mesh)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("expert_up", (2, 6, 16, 32), "experts dimension of 6 is not divisible by learner.mesh.expert=4"),
        ("expert_up", (2, 8, 15, 32), "mlp dimension of 15 is not divisible by learner.mesh.tensor=2"),
        ("q", (2, 32, 33), "embed dimension of 33 is not divisible by learner.mesh.fsdp=2"),
    ],
)
def test_a_dimension_that_does_not_divide_names_parameter_and_key(name: str, shape: tuple[int, ...], message: str):
    class Mesh:
        shape = {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 2}

    with pytest.raises(ConfigError, match=f"parameter '{name}'.*{message}"):
        parameter_shardings(Mesh(), {"layers": {name: shape}})  # type: ignore[arg-type]


def test_rows_that_do_not_divide_over_context_name_the_length_that_does():
    with pytest.raises(ValueError, match="row_length=1000 is not divisible by learner.mesh.context=3; .*=1002"):
        LearnerConfig(row_length=1000, mesh={"context": 3})
