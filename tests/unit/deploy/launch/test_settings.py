"""What is read of a configuration, with and without the environment that can read it."""

import sys
from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.settings import assume, read, refuse_own_keys
from jax_agent_rl.errors import LaunchError

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def read_quickstart(*overrides: str):
    return read(Path(sys.executable), QUICKSTART, overrides, root=ROOT)


def test_the_environments_python_reads_and_checks_the_configuration():
    chosen = read_quickstart("learner.mesh.fsdp=4", "learner.mesh.data=2", "rollout.vllm.tensor_parallel_size=2")
    assert (chosen.learner_devices, chosen.tensor_parallel_size, chosen.gpu_memory_utilization) == (8, 2, None)
    assert read_quickstart("rollout.vllm.gpu_memory_utilization=0.5").gpu_memory_utilization == 0.5
    with pytest.raises(LaunchError, match="learner.learning_rat: unknown key; did you mean learner.learning_rate"):
        read_quickstart("learner.learning_rat=1")


def test_without_it_the_quickstarts_placing_is_known():
    assert assume(QUICKSTART, ["seed=1"]) == read_quickstart("seed=1")


@pytest.mark.parametrize("override", ["learner.mesh.fsdp=2", "rollout.vllm.tensor_parallel_size=2", "run_dir=x"])
def test_without_it_nothing_that_matters_is_guessed(override: str):
    with pytest.raises(LaunchError, match="the environment that reads configurations is not there yet"):
        assume(QUICKSTART, [override])


def test_without_it_a_file_that_places_is_not_guessed_either(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("run_dir: x\nlearner:\n  mesh: {fsdp: 8}\n")
    with pytest.raises(LaunchError, match="mesh: {fsdp: 8}"):
        assume(tmp_path / "c.yaml", [])


def test_keys_of_the_launcher_are_refused():
    with pytest.raises(LaunchError, match="rollout.backend=jetstream: gpu.sh sets"):
        refuse_own_keys(["seed=1", "rollout.backend=jetstream"])
