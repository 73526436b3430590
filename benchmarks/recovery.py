"""Recovery: throughput while engines, tools and networks fail, and what a run that is killed loses.

    python benchmarks/recovery.py [--seconds 60] [--seed 1] [--steps 4]

``throughput_share``: trajectories trained per second by the small real system of ``tests/chaos``
under faults of a kind, over those without any; 1 is the limit. Engines are killed every 5 s on
average, frozen every 9, hung every 12. ``servers_lost`` counts the times that requests had to
continue elsewhere, ``attempts`` how often one was sent.

``killed run``: the quickstart with a checkpoint after each step is killed in the middle of its
third step and resumed. ``start_seconds`` and ``restart_seconds``: from the command to its first
step. ``lost_seconds``: work after the last checkpoint. ``effective_share``: the time of the steps
that count, over all time since the first one began; 1 is the limit. RobustRL (arXiv 2512.22492)
reports its effective training time ratio on 256 GPUs at a failure frequency of 10 %: above 0.8, and
0.6 for ByteRobust, which restarts the whole run. The last line is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, cpu

from jax_agent_rl.observe.run_dir import read_records

COMMAND = [sys.executable, "-m", "jax_agent_rl.cli"]
KINDS = ("kill_engine", "freeze_engine", "hang_engine", "kill_tool_server", "all")
KILLED_AFTER = 2


def under_faults(kind: str, seconds: float, seed: int) -> dict[str, float]:
    """Run the chaos command; return its figures.

    Raises:
        subprocess.CalledProcessError: an invariant did not hold.
    """
    command = [sys.executable, "-m", "tests.chaos", "--json"]
    command += [f"--seconds={seconds}", f"--seed={seed}"]
    if kind != "all":
        command += ["--only", kind]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    report = json.loads(process.stdout.splitlines()[-1])
    return {
        "strikes": sum(report["faults"].values()),
        "servers_lost": report["servers_lost"],
        "attempts": report["mean_attempts"],
        "per_second": report["trained_per_second"],
        "throughput_share": report["throughput_share"],
    }


def step_seconds(folder: Path) -> dict[int, float]:
    """Return the duration of every step so far."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return {}
    seconds = {}
    for record in read_records(file):
        if record["kind"] == "step":
            seconds[record["step"]] = record["step_seconds"]
    return seconds


def wait_for_step(process: subprocess.Popen, folder: Path, step: int) -> float:
    """Return the time at which a step was over.

    Raises:
        RuntimeError: the run ended before.
    """
    while step not in step_seconds(folder):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with status {process.returncode} before step {step}")
        time.sleep(0.1)
    return time.monotonic()


def kill_and_resume(folder: Path, steps: int) -> dict[str, float]:
    """Train, kill the run in the middle of a step, and resume it.

    Raises:
        RuntimeError: a run ended too early, or the resumed one failed.
    """
    settings = [
        f"run_dir={folder}",
        f"trainer.steps={steps}",
        "trainer.checkpoint_every=1",
        # Nothing but steps.
        "data.eval=null",
        "data.eval_limit=null",
        "rollout.eval_temperature=null",
    ]
    command = [*COMMAND, "train", "configs/quickstart.yaml", *settings]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        saved = wait_for_step(process, folder, KILLED_AFTER)
        seconds_before_kill = step_seconds(folder)
        time.sleep(seconds_before_kill[KILLED_AFTER] / 2)
        process.kill()
    killed = time.monotonic()

    with subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        next_step_ended = wait_for_step(process, folder, KILLED_AFTER + 1)
        ended = wait_for_step(process, folder, steps)
        if process.wait():
            raise RuntimeError(f"the resumed run ended with status {process.returncode}")

    seconds = step_seconds(folder)
    first_step_began = saved - sum(seconds_before_kill.values())
    next_step_began = next_step_ended - seconds[KILLED_AFTER + 1]
    return {
        "start_seconds": round(first_step_began - started, 1),
        "step_seconds": round(sum(seconds.values()) / steps, 1),
        "lost_seconds": round(killed - saved, 1),
        "restart_seconds": round(next_step_began - killed, 1),
        "effective_share": round(sum(seconds.values()) / (ended - first_step_began), 3),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60, help="of each kind of fault, a quarter without any"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="of the run that is killed")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        result["killed run"] = kill_and_resume(Path(folder) / "run", arguments.steps)
    print(f"{'killed run':16}", result["killed run"], flush=True)
    for kind in KINDS:
        result[kind] = under_faults(kind, arguments.seconds, arguments.seed)
        print(f"{kind:16}", result[kind], flush=True)
    print(json.dumps({"cpu": cpu(), **result}))


if __name__ == "__main__":
    main()
