"""Where the engines of a ``gpu.sh`` run go, and which keys are the driver's."""

from pathlib import Path

import pytest

from jax_agent_rl.deploy.launch.__main__ import main
from jax_agent_rl.deploy.launch.ray_driver import load_run, place_engines
from jax_agent_rl.errors import LaunchError
from tests.messages import raises

QUICKSTART = str(Path(__file__).parents[4] / "configs" / "quickstart.yaml")


def place(free: list[int], *overrides: str) -> tuple[list[str], dict[str, str]]:
    config = load_run(QUICKSTART, overrides)
    engine_overrides, variables = place_engines(config, free)
    load_run(QUICKSTART, [*overrides, *engine_overrides])  # the learner will accept them
    return engine_overrides, variables


def test_every_gpu_that_the_learner_leaves_serves():
    for free, group, engines in (([6, 8], 2, 7), ([3, 3], 2, 2), ([1], 1, 1)):
        engine_overrides, variables = place(free, f"rollout.vllm.tensor_parallel_size={group}")
        wanted = {
            f"rollout.num_engines={engines}",
            f"rollout.gpus_per_engine={group}",
            "rollout.placement=separate",
        }
        assert set(engine_overrides) == wanted
        assert not variables


def test_an_engine_shares_the_learners_gpus_if_too_few_are_left():
    engine_overrides, variables = place([1, 0], "rollout.vllm.tensor_parallel_size=2")
    assert engine_overrides == [
        "rollout.placement=colocated",
        "rollout.vllm.gpu_memory_utilization=0.45",
    ]
    assert variables == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
    assert place([0], "rollout.vllm.gpu_memory_utilization=0.3")[0] == [
        "rollout.placement=colocated"
    ]


def test_a_configuration_that_places_its_engines_is_left_alone():
    assert place([8], "rollout.placement=hybrid", "rollout.gpus_per_engine=1") == ([], {})
    assert place([]) == (["rollout.placement=separate", "rollout.gpus_per_engine=0"], {})


def test_runs_sample_with_vllm_unless_an_override_names_another_engine():
    assert load_run(QUICKSTART, []).rollout.backend == "vllm"
    assert load_run(QUICKSTART, ["rollout.backend=jetstream"]).rollout.backend == "jetstream"


def test_keys_of_the_driver_are_refused():
    with raises(LaunchError, key="learner.multihost.process_id", value=1, fix="gpu.sh"):
        load_run(QUICKSTART, ["seed=1", "learner.multihost.process_id=1"])


def test_one_machine_is_refused_for_a_learner_on_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["learner.multihost.num_processes=2", "--device", "cpu"]) == 1
    assert (
        "learner.multihost.num_processes=2 needs 2 nodes of a Ray cluster"
        in capsys.readouterr().err
    )


def test_a_dry_run_prints_the_job_and_checks_the_configuration(capsys: pytest.CaptureFixture[str]):
    assert main(["--dry-run", "--resume", "trainer.steps=3"]) == 0
    assert "--resume trainer.steps=3" in capsys.readouterr().out
    assert main(["--dry-run", "trainer.step=3"]) == 1
    assert "trainer.step: unknown key; did you mean trainer.steps?" in capsys.readouterr().err
