"""A whole run whose learner spans two processes, started as a user starts it."""

import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.simulated import environment_with
from tests.tiny_run import SMALL, step_records, tiny_recipe
from tests.warm import python

# The third checkpoint meets what looks like a full disk, on one of the processes.
FULL_DISK = """
import resource, sys
from jax_agent_rl import cli
from jax_agent_rl.learner import checkpoint

save, full = checkpoint.Checkpointer.save, [int(sys.argv.pop(1))]

def limited(self, step, *arguments):
    if step == 3 and full and f"learner.multihost.process_id={full.pop()}" in sys.argv:
        # Process 0's own wait would be a command to the others, within one.
        checkpoint.Checkpointer.wait(self)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    save(self, step, *arguments)

checkpoint.Checkpointer.save = limited
cli.main()
"""


def start(
    recipe: Path, *settings: str, processes: int, full: int | None = None
) -> list[subprocess.Popen[str]]:
    """One process per host, each with one device; the disk of ``full`` fills up."""
    port = free_port()
    started = []
    for number in range(processes):
        program = ["-m", "jax_agent_rl.cli"] if full is None else ["-c", FULL_DISK, str(full)]
        command = [*python(), *program, "train", str(recipe), *settings]
        if processes > 1:
            command += [
                f"learner.multihost.coordinator=127.0.0.1:{port}",
                f"learner.multihost.num_processes={processes}",
                f"learner.multihost.process_id={number}",
                f"learner.mesh.fsdp={processes}",
            ]
        environment = environment_with(1)
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
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
def test_two_processes_run_to_the_end_and_one_goes_on_from_their_checkpoint(
    tmp_path: Path, mode: str
):
    recipe = tiny_recipe(tmp_path, rollout={"jetstream": SMALL})
    outputs = finish(start(recipe, "trainer.steps=2", f"trainer.mode={mode}", processes=2), [0, 0])
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["recompilations_after_warmup"] == 0
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values()) == 16
    assert summary["max_logprob_gap"] <= 1e-3  # the engine serves what both processes trained
    assert "held-out accuracy" in outputs[0]
    assert "held-out accuracy" not in outputs[1]
    records = step_records(folder)
    server_counts = {(r["servers_up"], r["servers_lost"], r["stale_served"]) for r in records}
    assert server_counts == {(2, 0, 0)}, outputs  # both sample

    finish(start(recipe, "trainer.steps=3", f"trainer.mode={mode}", "--resume", processes=1), [0])
    steps = [r["step"] for r in step_records(folder)]
    assert steps == [1, 2, 3]


def test_what_stops_process_0_stops_the_other(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, rollout={"jetstream": SMALL})
    outputs = finish(start(recipe, "data.train=/nowhere.jsonl", processes=2), [2, 0])
    assert "dataset file '/nowhere.jsonl' does not exist" in outputs[0]
    assert "Traceback" not in "".join(outputs)


def test_a_signal_to_all_leaves_a_checkpoint_of_all(tmp_path: Path):
    recipe = tiny_recipe(tmp_path, rollout={"jetstream": SMALL})
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
    assert "--resume" in outputs[0]
    assert "Traceback" not in "".join(outputs)
    saved = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    assert len(saved) == 1
    assert int(saved[0].name) >= 2


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_on_one_process_ends_the_run_with_a_message_and_it_resumes(
    full: int, tmp_path: Path
):
    recipe = tiny_recipe(
        tmp_path, trainer={"steps": 6, "checkpoint_every": 1}, rollout={"jetstream": SMALL}
    )
    output, second_output = finish(start(recipe, processes=2, full=full), [2, 0])
    assert "error: a checkpoint could not be written" in output
    assert "checkpoint 2 is intact" in output
    assert f": on process {full}, " in output, output
    (resumed,) = finish(start(recipe, "--resume", processes=1), [0])
    assert "resumed after step 2" in resumed


def test_a_signal_to_process_0_before_training_ends_all(tmp_path: Path):
    started = start(tiny_recipe(tmp_path), processes=2)
    assert started[0].stdout is not None
    for line in started[0].stdout:
        if line.startswith("run folder:"):
            started[0].send_signal(signal.SIGTERM)
            break
    outputs = finish(started, [130, 0])
    assert "interrupted before training; nothing has changed" in outputs[0]
    assert "Traceback" not in "".join(outputs)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
