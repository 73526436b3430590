"""A whole run whose learner spans two processes, started as a user starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from jax_agent_rl.observe.metrics import read_records


def start(recipe: Path, *settings: str, processes: int) -> list[subprocess.Popen[str]]:
    """One process per host, each with one device."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started = []
    for number in range(processes):
        command = [sys.executable, "-m", "jax_agent_rl.cli", "train", str(recipe), *settings]
        if processes > 1:
            command += [
                f"learner.multihost.coordinator=127.0.0.1:{port}",
                f"learner.multihost.num_processes={processes}",
                f"learner.multihost.process_id={number}",
                f"learner.mesh.data={processes}",
            ]
        environment = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
        }
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return started


def finish(started: Sequence[subprocess.Popen[str]], codes: Sequence[int]) -> list[str]:
    """What each process wrote to its output; all must end with their exit code."""
    try:
        outputs = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [*codes], "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_two_processes_run_to_the_end_and_one_goes_on_from_their_checkpoint(recipe: Path, tmp_path: Path, mode: str):
    outputs = finish(start(recipe, "trainer.steps=2", f"trainer.mode={mode}", processes=2), [0, 0])
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["recompilations_after_warmup"] == 0
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values()) == 8
    assert summary["max_logprob_gap"] <= 1e-3  # the engine serves what both processes trained
    assert "held-out accuracy" in outputs[0] and "held-out accuracy" not in outputs[1]

    finish(start(recipe, "trainer.steps=3", f"trainer.mode={mode}", "--resume", processes=1), [0])
    steps = [r["step"] for r in read_records(folder / "metrics.jsonl") if r["kind"] == "step"]
    assert steps == [1, 2, 3]


def test_what_stops_process_0_stops_the_other(recipe: Path):
    outputs = finish(start(recipe, "data.train=/nowhere.jsonl", processes=2), [2, 0])
    assert "dataset file '/nowhere.jsonl' does not exist" in outputs[0] and "Traceback" not in "".join(outputs)


def test_a_signal_to_all_leaves_a_checkpoint_of_all(recipe: Path, tmp_path: Path):
    started = start(recipe, "trainer.steps=400", "trainer.checkpoint_every=0", processes=2)
    watchdog = threading.Timer(300, lambda: [process.kill() for process in started])
    watchdog.start()
    assert started[0].stdout is not None
    for line in started[0].stdout:
        if line.split()[:1] == ["2/400"]:
            for process in started:
                process.send_signal(signal.SIGTERM)
            break
    outputs = finish(started, [130, 0])
    watchdog.cancel()
    assert "--resume" in outputs[0] and "Traceback" not in "".join(outputs)
    saved = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    assert len(saved) == 1 and int(saved[0].name) >= 2
