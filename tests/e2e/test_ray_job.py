"""``gpu.sh`` on Ray: on a cluster of its own, and on one of several raylets, some of which die,
come late or stall.
"""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.runtime.ray_cluster import secure_own_cluster
from tests.launching import ROOT, ended_after, read_until, wait_for_end
from tests.ports import free_port
from tests.simulated import environment_with
from tests.tiny_run import SMALL, saved_steps, step_records, tiny_recipe

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(1200),  # each starts Ray, learners and engines two or three times
]
STALL_SECONDS = 4
STEPS = 30  # about a second each: a node that is removed at the fifth is gone long before the last


def start(recipe: Path, *arguments: str, address: str | None = None) -> subprocess.Popen[str]:
    """Start gpu.sh with the embedded engine, on a cluster or on one of its own; both outputs are
    one pipe.
    """
    variables = {"JAX_AGENT_RL_VENV": sys.prefix} | ({"RAY_ADDRESS": address} if address else {})
    command = [ROOT / "launch" / "gpu.sh", "--device", "cpu", "--no-install", "--config", recipe]
    return subprocess.Popen(
        [*command, "rollout.backend=jetstream", *arguments],
        env={name: value for name, value in environment_with(1).items() if name != "RAY_ADDRESS"}
        | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def learners(recipe: Path) -> list[psutil.Process]:
    """Process 0 of a recipe's learner, under its watchdog."""
    wanted = {str(recipe), "learner.multihost.process_id=0"}
    return [p for p in psutil.process_iter(["cmdline"]) if wanted <= set(p.info["cmdline"] or [])]


def processes_with(*texts: str) -> list[psutil.Process]:
    """Processes whose command lines contain these texts, without their watchdogs."""
    lines = {p: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    processes = []
    for process, line in lines.items():
        if all(text in line for text in texts) and "ray_process" not in line:
            processes.append(process)
    return processes


def test_ctrl_c_saves_and_a_second_one_kills(tmp_path: Path):
    port = free_port()
    tools = tmp_path / "tools.yaml"
    tools.write_text(f"port: {port}")
    recipe = tiny_recipe(
        tmp_path,
        agent={
            "tool_server_url": f"http://127.0.0.1:{port}",
            "min_turns": 1,
            "max_turns": 2,
            "max_action_length": 4,
        },
        rollout={"jetstream": SMALL},
        trainer={"checkpoint_every": 0, "steps": 1000},
    )
    process = start(recipe, f"--tool-server={tools}")
    read_until(process, " 1/1000 ")
    (server,) = processes_with(f"--config {tools}", "jax_agent_rl.cli tool-server")
    server.kill()
    read_until(process, "[tool server] ended with status 137: starting it again")
    read_until(process, "[tool server] tool server on ")
    step = int(read_until(process, "/1000 ")[-1].split("/")[0])
    read_until(process, f" {step + 2}/1000 ")
    records = read_records(tmp_path / "run" / "trajectories.jsonl")
    assert {record["agent_name"] for record in records} == {"server_tool_agent"}
    assert {
        call["error"] for r in records for turn in r["turns"] for call in turn["tool_calls"]
    } == {"invalid_action"}
    remaining_output = "".join(ended_after(process, signal.SIGINT))
    assert process.returncode == 130 and "is saved. Go on with --resume" in remaining_output, (
        remaining_output
    )
    assert not learners(recipe)
    (saved,) = saved_steps(tmp_path / "run")

    resumed = start(recipe, f"--tool-server={tools}", "--resume")
    read_until(resumed, f"resumed after step {saved}")
    read_until(resumed, f" {saved + 1}/1000 ")
    steps = [r["step"] for r in step_records(tmp_path / "run")]
    assert steps[: saved + 1] == list(range(1, saved + 2))
    *_, stuck = learners(recipe)
    stuck.suspend()
    resumed.send_signal(signal.SIGINT)
    read_until(resumed, "interrupted: the run saves a checkpoint")
    remaining_output = "".join(ended_after(resumed, signal.SIGINT))
    assert resumed.returncode == 130 and "the run is killed" in remaining_output, remaining_output
    wait_for_end(stuck.pid)


def test_a_learner_that_is_killed_takes_its_cluster_with_it(tmp_path: Path):
    placed = {"jetstream": SMALL, "placement": "separate", "gpus_per_engine": 0}
    recipe = tiny_recipe(tmp_path, rollout=placed, trainer={"steps": 1000})
    process = subprocess.Popen(
        [sys.executable, "-m", "jax_agent_rl.cli", "train", recipe],
        env=environment_with(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    read_until(process, " 2/1000 ")
    # Ray's agents take a minute to notice, but hold nothing.
    members = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "Agent" not in " ".join(p.cmdline())
    ]
    lines = [" ".join(p.cmdline()) for p in members]
    for name in ("raylet", "gcs_server", "EngineHost"):
        assert any(name in line for line in lines), lines
    process.kill()
    for member in members:
        wait_for_end(member.pid)
    process.communicate()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Four nodes with one CPU each, on loopback."""
    for name, value in environment_with(1).items():
        monkeypatch.setenv(name, value)
    secure_own_cluster()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": free_port()}
    # A job agent takes the same port in every cluster, unless it is told one.
    cluster = Cluster(
        initialize_head=True, head_node_args=head | {"dashboard_agent_listen_port": free_port()}
    )
    for _ in range(3):
        cluster.add_node(num_cpus=1, dashboard_agent_listen_port=free_port())
    yield cluster
    cluster.shutdown()


def processes(node: Any) -> list[psutil.Process]:
    """Return the processes of a node: its raylet, and what that started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def runs(node: Any, actor: str) -> bool:
    return any(actor in " ".join(p.cmdline()) for p in processes(node))


def test_nodes_that_stall_die_or_come_late_cost_no_trajectory(
    cluster, recipe: Path, tmp_path: Path
):
    own_overrides = [
        "learner.multihost.num_processes=2",
        "learner.mesh.fsdp=2",
        "data.eval=null",
        f"trainer.steps={STEPS}",
    ]
    process = start(recipe, *own_overrides, address=f"http://{cluster.head_node.webui_url}")
    read_until(process, f" 2/{STEPS} ")
    learners = [node for node in cluster.list_all_nodes() if runs(node, "NodeProcess")]
    (engine,) = [node for node in cluster.list_all_nodes() if runs(node, "EngineHost")]
    assert len(learners) == 2
    assert engine not in learners

    stalled = processes(engine)
    for member in stalled:
        member.suspend()
    time.sleep(STALL_SECONDS)
    for member in stalled:
        member.resume()
    read_until(process, f" 5/{STEPS} ")

    cluster.remove_node(
        next(node for node in learners if node != cluster.head_node), allow_graceful=False
    )
    lines = read_until(process, "waiting for room")
    assert any("a process of the learner was lost (1 of 3 times)" in line for line in lines)
    cluster.add_node(num_cpus=1, dashboard_agent_listen_port=free_port())
    output = process.communicate()[0]
    assert process.returncode == 0 and "resumed after step" in output, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["started"] == summary["trained"] == STEPS * 4
    steps = [r["step"] for r in step_records(tmp_path / "run")]
    assert steps == list(range(1, STEPS + 1))
