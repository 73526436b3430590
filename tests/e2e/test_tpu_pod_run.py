"""The whole life of a run on TPUs: made-up cloud and schedulers, real processes with jax over
loopback.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.observe.run_dir import read_records
from tests.cloud import Cloud
from tests.launching import ROOT, read_until
from tests.ports import free_port
from tests.tiny_run import SMALL, tiny_recipe

# The third step's rollouts wait until the test lets them go. Several processes score, so a file
# counts their calls.
_PATIENT_REWARD = """
import pathlib, time
from jax_agent_rl.rewards import register_reward

@register_reward("noise")
def compute_score(solution_str, ground_truth):
    go = pathlib.Path({go!r})
    with open(f"{{go}}.calls", "ab") as calls:
        calls.write(b".")
        last = calls.tell() > 3 + 2 * 8
    while last and not go.exists():
        time.sleep(0.05)
    return float(len(solution_str) % 3 == int(ground_truth))
"""


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """Two hosts with a chip each, as jax sees it."""
    cloud = Cloud(tmp_path / "cloud")
    cloud.write(
        "venv/bin/jax-agent-rl",
        f'#!/usr/bin/env bash\nexec {sys.executable} -m jax_agent_rl.cli "$@"\n',
    )
    (cloud.folder / "venv/bin/jax-agent-rl").chmod(0o755)
    cloud.use_real_trainer()
    cloud.order("hosts", "2")
    yield cloud
    cloud.close()


def wait_until(condition: Callable[[], bool], seconds: float = 400) -> None:
    """Look again and again: the other side is a process that says nothing."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def patient_recipe(folder: Path) -> tuple[Path, Path]:
    """A recipe, and the file that lets its third step go on."""
    recipe = tiny_recipe(folder / "recipe", rollout={"jetstream": SMALL})
    go = folder / "go"
    (folder / "recipe" / "reward.py").write_text(_PATIENT_REWARD.format(go=str(go)))
    return recipe, go


PATIENT = ["learner.mesh.fsdp=2", "trainer.steps=4", "reward.timeout=600"]


def require_every_step_once(folder: Path) -> None:
    assert steps(folder) == [1, 2, 3, 4]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["started"] == summary["trained"] + sum(summary["dropped"].values())
    assert (folder / "checkpoints" / "4").is_dir()
    assert not (folder / "run" / "checkpoints").exists()


def test_a_run_on_two_hosts_survives_the_loss_of_its_slice(cloud: Cloud, tmp_path: Path):
    recipe, go = patient_recipe(tmp_path)
    arguments = [
        "--topology",
        "v5p:2x2x2",
        "--bucket",
        "gs://b",
        "--config",
        recipe,
        "--spot",
        *PATIENT,
    ]
    process = cloud.start(*arguments)
    folder = cloud.folder / "buckets" / "b" / "try"
    read_until(process, "2/4")
    wait_until(lambda: (folder / "checkpoints" / "2").is_dir() and len(steps(folder)) == 2)
    (
        folder / "checkpoints" / "3.orbax-checkpoint-tmp"
    ).mkdir()  # what a save leaves that is cut off
    cloud.preempt()
    assert process.stdout is not None
    printed = process.stdout.read()
    assert (
        process.wait() == 1 and "the slice was preempted (PREEMPTED): --resume continues" in printed
    ), printed
    go.touch()
    result = cloud.launch(*arguments, "--resume")
    printed = result.stdout
    assert result.returncode == 0 and "[host-0] resumed after step 2" in printed, (
        printed + result.stderr
    )
    assert "the checkpoint of step 3 was cut off while it was written: it is lost" in printed
    assert "[host-0] held-out accuracy" in printed
    assert "[host-1] held-out accuracy" not in printed
    assert cloud.node() is None
    require_every_step_once(folder)
    assert {file.name.partition("-2")[0] for file in (folder / "logs").iterdir()} == {
        "host-0",
        "host-1",
    }


def test_a_managed_job_on_two_hosts_recovers_with_every_step_once(cloud: Cloud, tmp_path: Path):
    recipe, go = patient_recipe(tmp_path)
    rendered = cloud.launch(
        *(
            "--topology",
            "v5p:2x2x2",
            "--bucket",
            "gs://b",
            "--config",
            recipe,
            "--render",
            "sky",
            *PATIENT,
        )
    )
    commands = yaml.safe_load(rendered.stdout)["run"]
    bucket = cloud.folder / "buckets" / "b"
    for cloud_path, local_path in {
        "/bucket/": f"{bucket}/",
        "gs://b": str(bucket),
        "/config/run.yaml": str(recipe),
    }.items():
        commands = commands.replace(cloud_path, local_path)

    def launch() -> list[subprocess.Popen[bytes]]:
        """SkyPilot starts the commands on both hosts."""
        launch_commands = commands.replace("8476", str(free_port()))
        job = cloud.environment | {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        }
        how = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "start_new_session": True}
        return [
            subprocess.Popen(
                ["bash", "-c", launch_commands], env=job | {"SKYPILOT_NODE_RANK": str(rank)}, **how
            )
            for rank in range(2)
        ]

    first = launch()
    folder = bucket / "try"
    try:
        wait_until(lambda: (folder / "checkpoints" / "2").is_dir() and len(steps(folder)) == 2)
    finally:
        for process in first:
            os.killpg(process.pid, signal.SIGKILL)  # the slice is preempted
            process.wait()
    go.touch()
    assert [process.wait(timeout=400) for process in launch()] == [0, 0]
    require_every_step_once(folder)


# Slurm's program that runs a command on each of its hosts.
_SRUN = """\
#!{python}
import os, signal, subprocess, sys
place = next(number for number, word in enumerate(sys.argv) if number and not word.startswith("--"))
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:place])
slurm = {{
    "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0", "SLURM_NTASKS": options["ntasks"]
}}
tasks = [
    subprocess.Popen(sys.argv[place:], env=os.environ | slurm | {{"SLURM_PROCID": str(number)}})
    for number in range(int(options["ntasks"]))
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""


def test_hosts_that_learn_and_one_that_samples_are_one_run(cloud: Cloud, tmp_path: Path):
    recipe = tiny_recipe(tmp_path / "recipe", rollout={"jetstream": SMALL})
    rendered = cloud.launch(
        *("--topology", "v5p:2x2x2", "--bucket", "gs://b", "--config", recipe, "--render", "slurm"),
        *(
            "--rollout-hosts",
            1,
            "--rollout-port",
            free_port(),
            "learner.mesh.fsdp=2",
            "trainer.steps=2",
        ),
    )
    bucket = cloud.folder / "buckets" / "b"
    job = rendered.stdout.replace("gs://b", str(bucket)).replace(
        "runs/try", str(bucket / "try" / "run")
    )
    cloud.write("job.sh", job)
    cloud.write("path/srun", _SRUN.format(python=sys.executable)).chmod(0o755)
    cloud.write("path/scontrol", "#!/bin/sh\necho 127.0.0.1\n").chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": (cloud.folder / "orders" / "job").read_text(),
        "SLURM_JOB_NODELIST": "localhost",
    }
    command = ["bash", str(cloud.folder / "job.sh")]
    result = subprocess.run(
        command,
        env=cloud.environment | slurm,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    folder = bucket / "try"
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["max_logprob_gap"] <= 1e-3
    assert "serving" in result.stdout
    assert not [file for file in (folder / "weights").rglob("*") if file.is_file()]


def steps(folder: Path) -> list[int]:
    """Return the steps that the bucket's metrics tell of."""
    file = folder / "run" / "metrics.jsonl"
    return [r["step"] for r in read_records(file) if r["kind"] == "step"] if file.exists() else []
