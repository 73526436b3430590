"""The whole life of a launch on TPUs, with jax on two hosts: made-up cloud, real processes over loopback."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jax_agent_rl.observe.run_dir import read_records
from tests.cloud import Cloud
from tests.launching import read_until
from tests.ports import free_port
from tests.tiny_run import SMALL, tiny_recipe

# The third step's rollouts wait until the test lets them go. Several processes score: a file counts their calls.
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


def test_a_run_on_two_hosts_that_loses_its_slice_ends_as_one_with_every_step_once(cloud: Cloud, tmp_path: Path):
    recipe, go = tiny_recipe(tmp_path / "recipe", rollout={"jetstream": SMALL}), tmp_path / "go"
    (tmp_path / "recipe" / "reward.py").write_text(_PATIENT_REWARD.format(go=str(go)))
    where = ["--topology", "v5e:4x4", "--bucket", "gs://b", "--config", recipe, "--spot"]
    process = cloud.start(*where, "learner.mesh.fsdp=2", "trainer.steps=4", "reward.timeout=600")
    kept = cloud.folder / "buckets" / "b" / "try"
    read_until(process, "2/4")
    wait_until(lambda: (kept / "checkpoints" / "2").is_dir() and len(steps(kept)) == 2)
    (kept / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()  # what a save leaves that is cut off
    cloud.preempt()
    go.touch()
    assert process.stdout is not None
    rest = process.stdout.read()
    assert process.wait() == 0, rest
    assert "preemption 1 of at most 20" in rest and "[host-0] resumed after step 2" in rest
    assert "the checkpoint of step 3 was cut off while it was written: it is lost" in rest
    assert "[host-0] held-out accuracy" in rest and "[host-1] held-out accuracy" not in rest
    assert steps(kept) == [1, 2, 3, 4] and cloud.node() is None
    summary = json.loads((kept / "run" / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["started"] == summary["trained"] + sum(summary["dropped"].values())
    assert (kept / "checkpoints" / "4").is_dir() and not (kept / "run" / "checkpoints").exists()
    assert {file.name.partition("-2")[0] for file in (kept / "logs").iterdir()} == {"host-0", "host-1"}


def test_hosts_that_learn_and_one_that_samples_are_one_run(cloud: Cloud, tmp_path: Path):
    recipe = tiny_recipe(tmp_path / "recipe", rollout={"jetstream": SMALL})
    split = ["--rollout-hosts", 1, "--rollout-port", free_port(), "learner.mesh.fsdp=2", "trainer.steps=2"]
    where = ["--topology", "v5e:4x4", "--bucket", "gs://b", "--config", recipe]
    result = cloud.launch(*where, *split, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    kept = cloud.folder / "buckets" / "b" / "try"
    summary = json.loads((kept / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["max_logprob_gap"] <= 1e-3  # it samples what both others have learnt
    assert "[rollout-0] serving" in result.stdout and "[rollout-0] stopping" in result.stdout
    assert not [file for file in (kept / "weights").rglob("*") if file.is_file()]
    assert cloud.node() is None and cloud.node("try-rollout-0") is None


def steps(kept: Path) -> list[int]:
    """Those that the bucket's metrics tell of."""
    file = kept / "run" / "metrics.jsonl"
    return [r["step"] for r in read_records(file) if r["kind"] == "step"] if file.exists() else []
