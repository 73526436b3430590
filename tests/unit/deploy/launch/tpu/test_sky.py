"""A run as a managed job of SkyPilot: its own parser takes the task, and its commands run on every
host.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.deploy.launch.tpu.gcloud import SHAPES
from jax_agent_rl.deploy.launch.tpu.job import Job, SchedulerOptions, render
from jax_agent_rl.errors import LaunchError
from tests.cloud import job_of
from tests.launching import ROOT
from tests.messages import raises

GOLDEN = Path(__file__).parent / "golden" / "sky.yaml"
# SkyPilot pins older packages than the project: ./launch/test.sh --all makes an environment for it.
SKY = Path(os.environ.get("JAX_AGENT_RL_SKY_VENV", ROOT / ".venv-sky")) / "bin" / "python"
PARSE = """\
import json, sky, sys
for file in sys.argv[1:]:
    task = sky.Task.from_yaml(file)
    print(json.dumps({
        "name": task.name, "nodes": task.num_nodes, "envs": task.envs,
        "secrets": [secret.name for secret in task.managed_secret_refs],
        "setup": task.setup, "run": task.run, "files": task.file_mounts,
        "buckets": {
            where: [store.source, store.mode.value] for where, store in task.storage_mounts.items()
        },
        "slices": sorted([
            [str(r.cloud), r.region, r.zone, r.accelerators, r.accelerator_args, r.use_spot,
             r.job_recovery]
            for r in task.resources
        ], key=str),
    }))
"""


def rendered(job: Job, *zones: str) -> str:
    return render("sky", job, SchedulerOptions(zones=zones or ("us-west4-a",)), root=ROOT)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "my.yaml"
    file.write_text("trainer: {steps: 3}\n")
    return file


def parsed(folder: Path, *texts: str) -> list[dict]:
    """The tasks as SkyPilot understands them."""
    if not SKY.exists():
        pytest.skip(f"{SKY} is not there: ./launch/test.sh --all makes it")
    files = [folder / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    command = [str(SKY), "-c", PARSE, *map(str, files)]
    result = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()[-len(texts) :]]


def test_a_managed_job_is_what_it_was():
    prepare = "python prepare.py --say 'it is \"fine\"' && true"
    job = job_of(
        spot=True,
        config=Path("my.yaml"),
        bucket="gs://b/team",
        prepare=prepare,
        variables={"NO": "a: 'b'", "WANDB_API_KEY": None},
    )
    assert rendered(job, "us-west4-a", "us-east5") == GOLDEN.read_text(), (
        "see what has changed, and why"
    )


def test_skypilot_takes_the_task(config: Path, tmp_path: Path):
    job = job_of(
        spot=True,
        config=config,
        bucket="gs://b/team",
        variables={"NO": "a: 'b'", "KEY": None},
        prepare="echo 'a b'",
    )
    (task,) = parsed(tmp_path, rendered(job, "us-west4-a", "us-east5"))
    slice = (
        {"tpu-v5litepod-16": 1},
        {"runtime_version": "v2-alpha-tpuv5-lite", "tpu_vm": True},
        True,
    )
    recovery = {"strategy": "EAGER_NEXT_REGION"}
    assert task["slices"] == [
        ["GCP", "us-east5", None, *slice, recovery],
        ["GCP", "us-west4", "us-west4-a", *slice, recovery],
    ]
    assert (task["name"], task["nodes"]) == ("my-run", 1)
    assert task["envs"] == {"NO": "a: 'b'"}
    assert task["secrets"] == ["KEY"]
    assert task["files"] == {"/config/run.yaml": str(config)}
    assert task["buckets"] == {"/bucket": ["gs://b", "MOUNT"]}
    assert task["setup"].splitlines()[1] == "./launch/tpu_environment.sh"
    assert "bash -c 'echo '" in task["setup"]
    assert (
        "exec jax-agent-rl train /config/run.yaml seed=1 run_dir=/bucket/team/my-run/run"
        in task["run"]
    )


def test_skypilot_takes_every_slice(tmp_path: Path):
    jobs = []
    for generation, shapes in SHAPES.items():
        jobs += [job_of(f"{generation}:{shape}", config=None) for shape in shapes]
    for job, task in zip(jobs, parsed(tmp_path, *map(rendered, jobs)), strict=True):
        (candidate,) = task["slices"]
        assert candidate[3] == {f"tpu-{job.topology.accelerator_type}": 1}
        assert candidate[4]["runtime_version"] == job.runtime
        assert candidate[5] is False


RECORD = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["LOG"], "a") as log:
    print(json.dumps([os.environ["JAX_PLATFORMS"], os.environ.get("KEY"), *sys.argv[1:]]), file=log)
"""


def executed(commands: str, folder: Path, **variables: str) -> list[str]:
    """What a task's commands call ``jax-agent-rl`` with."""
    program = folder / "venv" / "bin" / "jax-agent-rl"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(RECORD)
    program.chmod(0o755)
    log = folder / "log"
    environment = {
        "PATH": os.environ["PATH"],
        "JAX_AGENT_RL_VENV": str(folder / "venv"),
        "LOG": str(log),
    }
    subprocess.run(["bash", "-c", commands], env=environment | variables, check=True, timeout=300)
    return json.loads(log.read_text().splitlines()[-1])


def test_every_host_runs_the_same_command_and_they_meet_at_the_first(config: Path, tmp_path: Path):
    task = yaml.safe_load(rendered(job_of(config=config, overrides=("a.b=c d",))))
    two_nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    for rank in ("0", "1"):
        platforms, _, *arguments = executed(
            task["run"], tmp_path, **two_nodes, SKYPILOT_NODE_RANK=rank
        )
        assert platforms == "tpu,cpu"
        assert arguments == [
            *("train", "/config/run.yaml", "a.b=c d", "run_dir=/bucket/my-run/run"),
            *("trainer.checkpoint_dir=gs://b/my-run/checkpoints", "--auto-resume"),
            *("learner.multihost.coordinator=10.0.0.5:8476", "learner.multihost.num_processes=2"),
            f"learner.multihost.process_id={rank}",
        ]


def test_a_single_host_meets_nobody(tmp_path: Path):
    task = yaml.safe_load(rendered(job_of("v5e:2x4", config=None)))
    one_node = {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.5",
        "SKYPILOT_NODE_RANK": "0",
    }
    arguments = executed(task["run"], tmp_path, **one_node)[2:]
    assert arguments[:2] == ["train", "configs/quickstart.yaml"]
    assert not any("multihost" in word for word in arguments)


def test_setup_prepares_with_the_environments_programs(config: Path, tmp_path: Path):
    prepare = 'jax-agent-rl fetch-model "it\'s" &&\n  true'
    task = yaml.safe_load(rendered(job_of(config=config, install=False, prepare=prepare)))
    assert executed(task["setup"], tmp_path, JAX_PLATFORMS="")[2:] == ["fetch-model", "it's"]


def test_a_managed_job_needs_a_bucket_and_is_one_slice(config: Path):
    with raises(LaunchError, key="--bucket", fix="gs://NAME"):
        rendered(job_of(config=config, bucket=None))
    with raises(LaunchError, key=("--slices", "--rollout-hosts"), fix="--render gke"):
        rendered(job_of(config=config, slices=2))
