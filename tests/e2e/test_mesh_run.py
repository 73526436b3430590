"""Whole runs whose learner lies on several devices, with the engine on the first of them or on
others.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.simulated import environment_with
from tests.tiny_run import step_records, tiny_recipe
from tests.warm import python


def train(recipe: Path, *settings: str, devices: int) -> str:
    command = [*python(), "-m", "jax_agent_rl.cli", "train", str(recipe), *settings]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=environment_with(devices)
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def test_the_engine_serves_what_a_mesh_trained_and_one_device_goes_on(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, trainer={"steps": 2, "checkpoint_every": 2})
    train(recipe, "learner.mesh.fsdp=2", devices=2)
    assert "resumed after step 2" in train(recipe, "--resume", "trainer.steps=3", devices=1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["recompilations_after_warmup"] == 0
    steps = step_records(tmp_path / "run")
    assert len(steps) == 3
    assert all(step["trained_tokens"] and step["grad_norm"] for step in steps)
    assert (
        max(step["logprob_gap_max"] for step in steps) < 1e-3
    )  # weights of the step before would show


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_learner_and_engine_on_meshes_side_by_side(tmp_path: Path, mode: str):
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 4, "mode": mode},
        learner={"mesh": {"fsdp": 2, "tensor": 2}},
        rollout={
            "max_in_flight": 16,
            "jetstream": {
                "mesh": {"tensor": 2},
                "device_offset": 4,
                "max_concurrent_decodes": 8,
                "prefill_buckets": [32],
                "decode_steps": 4,
            },
        },
    )
    train(recipe, devices=6)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["recompilations_after_warmup"] == 0
    steps = step_records(tmp_path / "run")
    fresh = [
        step for step in steps if not step.get("staleness_max")
    ]  # what is stale differs by what was learnt since
    assert len(fresh) == 4 if mode == "sync" else fresh
    assert max(step["logprob_gap_max"] for step in fresh) < 1e-3


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_an_engine_on_each_of_the_learners_devices(tmp_path: Path, mode: str):
    """Asynchronous modes, too: an engine of one device exchanges nothing that could wait for the
    learner.
    """
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 2, "mode": mode},
        learner={"mesh": {"fsdp": 4}},
        rollout={
            "max_in_flight": 16,
            "sleep_during_update": mode == "sync",
            "jetstream": {"mesh": {"data": 4}, "prefill_buckets": [32], "decode_steps": 4},
        },
    )
    train(recipe, devices=4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["recompilations_after_warmup"] == 0
    steps = step_records(tmp_path / "run")
    fresh = [step for step in steps if not step.get("staleness_max")]
    assert fresh
    assert max(step["logprob_gap_max"] for step in fresh) < 1e-3


def test_a_deterministic_run_on_a_mesh_has_no_gap_and_its_steps_can_be_repeated(tmp_path: Path):
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 2, "checkpoint_every": 1},
        learner={"pack_length": 64, "learning_rate": 1e-3, "mesh": {"fsdp": 2, "tensor": 2}},
        rollout={
            "prompts_per_step": 2,
            "group_size": 4,
            "max_in_flight": 8,
            "max_model_len": 64,
            "deterministic": True,
            "jetstream": {
                "mesh": {"data": 2, "tensor": 2},
                "max_concurrent_decodes": 4,
                "prefill_buckets": [32],
                "decode_steps": 4,
            },
        },
    )
    train(recipe, devices=4)
    run = tmp_path / "run"
    steps = step_records(run)
    assert [step["compared_gap_max"] for step in steps] == [0.0, 0.0]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["recompilations_after_warmup"] == 0
    assert all(step["trained_tokens"] and step["grad_norm"] for step in steps)

    assert replay(run) == ("equal", "equal")
    on_one_device = ("learner.mesh.fsdp=1", "learner.mesh.tensor=1")
    engine_on_one_device = ("rollout.jetstream.mesh.data=1", "rollout.jetstream.mesh.tensor=1")
    # Gradients are summed in another order there, log-probs are not.
    assert replay(run, *on_one_device, *engine_on_one_device) == ("rounding", "equal")


def replay(run: Path, *settings: str) -> tuple[str, str]:
    """Return the verdicts on step 2, and on its old log-probs alone."""
    command = [*python(), "-m", "jax_agent_rl.cli", "replay", str(run), "--step", "2", "--json"]
    result = subprocess.run(
        [*command, *settings],
        capture_output=True,
        text=True,
        timeout=500,
        env=environment_with(4),
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    summary = json.loads(result.stdout)
    log_probs = next(x for x in summary["comparisons"] if "log-prob" in x["what"])
    all_equal = log_probs["compared"] == log_probs["equal"] > 0
    return summary["verdict"], "equal" if all_equal else "different"
