"""SIGTERM, in whatever phase it comes: the last finished step is on disk and the process gone."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.tiny_run import tiny_recipe
from tests.warm import python

PATIENCE = 60.0  # seconds; ten are promised on a machine with nothing else to do
# The number of the call to stop in, and the step that must be saved; None: nothing to save yet.
PHASES = {
    "compile the engine": (3, None),
    "compile the learner": (1, 0),
    "rollout": (8 * 2 + 3, 2),
    "train": (3, 2),
    "evaluate": (3 + 2, 2),
    "save": (1, 2),
}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.getcwd()}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_saves_in_every_phase(phase: str, tmp_path: Path, environment: dict[str, str]):
    when, saved = PHASES[phase]
    recipe = tiny_recipe(
        tmp_path,
        trainer={"steps": 4, "checkpoint_every": 2 if phase == "save" else 0, "eval_every": 2},
    )
    process = subprocess.Popen(
        [*python(), "-m", "tests.stalled_run", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"STALL_PHASE": phase, "STALL_WHEN": str(when)},
    )
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.strip() == "HERE":
            break
    process.send_signal(signal.SIGTERM)
    try:
        remaining_output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        watchdog.cancel()
    output += remaining_output
    assert process.returncode == 130 and "Traceback" not in output, output
    manager = ocp.CheckpointManager(tmp_path / "run" / "checkpoints")
    assert manager.latest_step() == saved, output
    if saved is None:
        return
    assert f"a checkpoint of step {saved} is saved" in output
    resumed = subprocess.run(
        [*python(), "-m", "jax_agent_rl.cli", "train", str(recipe), "--resume"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert resumed.returncode == 0 and f"resumed after step {saved}" in resumed.stdout, (
        resumed.stderr[-2000:]
    )
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "step"] == [1, 2, 3, 4]
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [0, 2, 4]
