"""Trials of Harbor in the sandbox, on a scripted engine: trajectories, rewards and reasons."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")

from jax_agent_rl.agents import HarborAgent
from jax_agent_rl.errors import (
    AgentTimeoutError,
    ConfigError,
    EnvironmentFailedError,
    TrajectoryError,
)
from jax_agent_rl.rewards import rules
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from tests.agent_testbed import AgentHarness
from tests.capabilities import needs_bwrap
from tests.harbor_harnesses import BESIDE, INSIDE, play, row, stage, write_task
from tests.messages import raises

pytestmark = [pytest.mark.harbor, needs_bwrap]
SOLVES = ["cat data/number.txt", "echo 77 > answer.txt", "done"]


def processes() -> list[str]:
    """Command lines of what runs in sandboxes of this process."""
    found = []
    for pid in process_tree(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "runner.py" in command or "sleep 4321" in command:
            found.append(command)
    return found


@pytest.mark.parametrize("agent", [BESIDE, INSIDE])
async def test_a_trial_is_one_exact_trajectory_with_the_verifiers_reward(
    agent: str, tmp_path: Path
):
    trajectory, output = await play(SOLVES, write_task(tmp_path / "task"), agent=agent)
    assert trajectory.num_turns == 3
    assert trajectory.segments == ()
    assert "output: 7" in trajectory.messages[2]["content"]
    assert output["reward"] == 1.0
    assert rules.command(output) == 1.0
    assert output["verifier"] == "right\n"
    assert processes() == []


async def test_a_wrong_answer_earns_what_the_verifier_gives(tmp_path: Path):
    _, output = await play(["echo 8 > answer.txt", "done"], write_task(tmp_path))
    assert output["reward"] == 0.0
    assert "AssertionError" in output["verifier"]


async def test_a_harness_that_takes_too_long_drops_its_trajectory(tmp_path: Path):
    with raises(AgentTimeoutError, value="timed out"):
        await play(["sleep 4321"], write_task(tmp_path), run_timeout=3.0)
    assert processes() == []


async def test_a_harness_that_fails_drops_its_trajectory(tmp_path: Path):
    with raises(TrajectoryError, value="gave up"):
        await play(SOLVES, write_task(tmp_path), agent_options={"exit_after": 2})


async def test_a_harness_that_asks_nothing_drops_its_trajectory(tmp_path: Path):
    with raises(TrajectoryError, value="asking the model"):
        await play(SOLVES, write_task(tmp_path), agent="tests.harbor_harnesses:Quiet")


async def test_what_was_done_within_a_budget_is_scored(tmp_path: Path):
    script = ["echo 77 > answer.txt", "true"]
    trajectory, output = await play(script, write_task(tmp_path), max_assistant_turns=1)
    assert trajectory.num_turns == 1
    assert output["reward"] == 1.0
    assert output["failure"] == "HTTPStatusError"


@pytest.mark.parametrize(
    ("test_sh", "note"),
    [
        ("sleep 4321", "VerifierTimeoutError"),
        ("true", "RewardFileNotFoundError"),
        ("echo nan > /logs/verifier/reward.txt", "VerifierOutputParseError"),
    ],
)
async def test_a_verifier_that_says_nothing_is_reward_0_with_a_note(
    test_sh: str, note: str, tmp_path: Path
):
    task = write_task(tmp_path, test_sh=test_sh)
    toml = (task / "task.toml").read_text().replace("timeout_sec = 30.0", "timeout_sec = 3.0")
    (task / "task.toml").write_text(toml)
    _, output = await play(SOLVES, task)
    assert output["reward"] == 0.0
    assert note in output["verifier"]
    assert processes() == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dockerfile": "FROM ubuntu:24.04\nRUN apt-get install git\n"}, "line 2"),
        ({"dockerfile": "", "settings": '[environment]\ndocker_image = "gcc"\n'}, "gcc"),
        ({"settings": '[verifier.environment]\ndocker_image = "gcc"\n'}, "the verifier"),
        ({"settings": '[environment]\nnetwork_mode = "allowlist"\n'}, "allowlist"),
    ],
)
async def test_a_task_that_the_sandbox_cannot_run_is_refused(
    change: dict[str, str], named: str, tmp_path: Path
):
    task = write_task(tmp_path, **change)
    if not change.get("dockerfile", "x"):
        (task / "environment" / "Dockerfile").unlink()
    with raises(EnvironmentFailedError, value=named):
        await play(SOLVES, task)


async def test_a_cancelled_trial_leaves_nothing_behind(tmp_path: Path):
    harness = stage(["setsid sleep 4321 & sleep 4321"])
    playing = asyncio.ensure_future(harness.run(row(write_task(tmp_path))))
    async with asyncio.timeout(60):
        while not any("sleep 4321" in line for line in processes()):
            assert not playing.done(), playing.result()
            await asyncio.sleep(0.05)
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled()
    await harness.agent.close()
    assert processes() == []


async def test_harbors_client_fetches_a_task_that_a_row_names(tmp_path: Path):
    repository = tmp_path / "repository"
    write_task(repository / "tasks" / "twice")
    for command in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a task"),
    ):
        subprocess.run(["git", *command], cwd=repository, check=True)
    task = {
        "git_url": f"file://{repository}",
        "path": "tasks/twice",
        "download_dir": str(tmp_path / "fetched"),
    }
    _, output = await play(SOLVES, task)
    assert output["reward"] == 1.0


async def test_an_environment_that_fails_is_tried_again_as_often_as_allowed(tmp_path: Path):
    task = write_task(
        tmp_path, settings='[environment.healthcheck]\ncommand = "false"\nretries = 1\n'
    )
    with raises(EnvironmentFailedError, value="HealthcheckError"):
        await play(SOLVES, task, start_attempts=2)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"agent": None}, "agent.harbor.agent"),
        ({"agent": "terminus-99"}, "agent.harbor.agent"),
        ({"agent": BESIDE, "environment": "docke"}, "agent.harbor.environment"),
        ({"agent": "terminus-2", "agent_options": {"max_turn": 1}}, "agent.harbor.agent"),
    ],
)
async def test_a_setting_that_is_wrong_names_its_key(settings: dict[str, Any], key: str):
    harness = AgentHarness(HarborAgent, [], harbor=settings)
    with raises(ConfigError, key=key):
        await harness.agent.preflight()
