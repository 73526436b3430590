"""Trials of Harbor in the sandbox, on a scripted engine: trajectories, rewards and reasons."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("harbor")

from jax_agent_rl.agents import HarborAgent
from jax_agent_rl.config import load
from jax_agent_rl.errors import (
    AgentTimeoutError,
    ConfigError,
    EnvironmentFailedError,
    RewardError,
    ToolError,
    TrajectoryError,
)
from jax_agent_rl.observe.run_dir import read_trajectories
from jax_agent_rl.rewards import rules
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.runtime import build as runtime_build
from jax_agent_rl.runtime import train as runtime_train
from jax_agent_rl.runtime.rollouts import open_codec
from jax_agent_rl.testing.fakes import NoCheckpoints
from jax_agent_rl.tool_server.sandbox import Sandbox
from jax_agent_rl.tool_server.sandbox.limits import process_tree
from tests.agent_testbed import AgentHarness
from tests.capabilities import needs_bwrap
from tests.fake_training import IdleLearner
from tests.fakes import ScriptedBackend
from tests.harbor_harnesses import BESIDE, INSIDE, play, row, stage, write_task
from tests.killed_trainer import SLEEPS, assert_sleepers_end_with, command_line
from tests.messages import raises
from tests.tiny_run import step_records, tiny_recipe

pytestmark = [pytest.mark.harbor, needs_bwrap]
ALLOWLIST = '[environment]\nnetwork_mode = "allowlist"\n'
SOLVES = ["cat data/number.txt", "echo 77 > answer.txt", "done"]


def processes() -> list[str]:
    """Command lines of what runs in sandboxes of this process."""
    commands = [command_line(pid) for pid in process_tree(os.getpid())]
    return [line for line in commands if "runner.py" in line or "sleep 4321" in line]


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


@pytest.mark.parametrize("own_limit", ["timeout_sec = 300.0", ""])
async def test_a_harness_that_takes_too_long_drops_its_trajectory(own_limit: str, tmp_path: Path):
    task = write_task(tmp_path)
    toml = (task / "task.toml").read_text().replace("timeout_sec = 300.0", own_limit)
    (task / "task.toml").write_text(toml)
    with raises(AgentTimeoutError, value="timed out"):
        await play(["sleep 4321"], task, run_timeout=3.0)
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
    toml = (task / "task.toml").read_text().replace("timeout_sec = 120.0", "timeout_sec = 3.0")
    (task / "task.toml").write_text(toml)
    _, output = await play(SOLVES, task)
    assert output["reward"] == 0.0
    assert note in output["verifier"]
    assert processes() == []


async def test_a_tests_sandbox_that_does_not_start_is_the_environments_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = Sandbox.run

    async def fails_for_tests(self: Sandbox, *args: Any, **kwargs: Any) -> Any:
        files = kwargs.get("files") or {}
        if "/solution" in files and "endpoint.sock" not in files:
            raise ToolError("no memory for another process")
        return await run(self, *args, **kwargs)

    monkeypatch.setattr(Sandbox, "run", fails_for_tests)
    with raises(EnvironmentFailedError, value="no memory for another process"):
        await play(SOLVES, write_task(tmp_path))


async def test_what_the_tests_did_not_see_is_told(tmp_path: Path):
    commands = ["echo 77 > answer.txt; mkfifo pipe; ln -s /etc/passwd link", "done"]
    _, output = await play(commands, write_task(tmp_path))
    assert output["reward"] == 1.0
    assert "right" in output["verifier"]
    assert "not in what the tests saw: 'link', 'pipe'" in output["verifier"]


@pytest.mark.parametrize("reward", ["1e39", "1" + "0" * 400])
async def test_a_reward_that_is_no_score_drops_its_trajectory(reward: str, tmp_path: Path):
    test_sh = f"echo '{{\"reward\": {reward}}}' > /logs/verifier/reward.json"
    with raises(RewardError, value="the verifier's reward"):
        await play(SOLVES, write_task(tmp_path, test_sh=test_sh))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dockerfile": "FROM ubuntu:24.04\nRUN apt-get install git\n"}, "line 2"),
        ({"dockerfile": "", "settings": '[environment]\ndocker_image = "gcc"\n'}, "gcc"),
        ({"settings": '[environment]\nworkdir = "/elsewhere"\n'}, "/elsewhere"),
        ({"settings": '[verifier.environment]\ndocker_image = "gcc"\n'}, "the verifier"),
        ({"settings": f'{ALLOWLIST}allowed_hosts = ["pypi.org"]\n'}, "allowlist"),
        ({"settings": f'{ALLOWLIST}allowed_hosts = ["8.8.8.8"]\n'}, "8.8.8.8"),
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


async def test_mini_swe_agent_runs_unmodified_inside(tmp_path: Path):
    commands = ["cat data/number.txt", "echo 77 > answer.txt"]
    commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    script = [f"I act. <call>bash {json.dumps({'command': line})}</call>" for line in commands]
    folder = tmp_path / "mini"
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "mini-swe-agent"
    program.write_text('#!/bin/sh\nexec python3 -m minisweagent.run.mini "$@"\n')
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    trajectory, output = await play(
        script,
        write_task(tmp_path / "task", settings='[environment]\nnetwork_mode = "no-network"\n'),
        agent="mini-swe-agent",
        agent_options={"skip_install": True},
        agent_env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        mounts={"mini": str(folder)},
        local={"memory_mb": 4096},
        max_response_length=100_000,
    )
    assert trajectory.num_turns == 3
    assert trajectory.segments == ()
    assert '"output": "7"' in trajectory.messages[3]["content"]
    assert output["reward"] == 1.0


async def test_a_harness_elsewhere_is_told_the_address_of_the_settings(tmp_path: Path):
    options = {"environment": "tests.harbor_harnesses:Elsewhere"}
    endpoint = {"host": "0.0.0.0", "url": "http://127.0.0.2:{port}/"}
    trajectory, output = await play(
        ["echo 77 > answer.txt", "done"], write_task(tmp_path), endpoint=endpoint, **options
    )
    assert trajectory.num_turns == 2
    assert output["reward"] == 1.0


async def test_a_killed_trainer_leaves_nothing_running(tmp_path: Path):
    await assert_sleepers_end_with(f"""
import asyncio, pathlib
from tests.harbor_harnesses import row, stage, write_task
task = write_task(pathlib.Path({str(tmp_path)!r}))
asyncio.run(stage([{SLEEPS!r}]).run(row(task)))
""")


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
        ({"agent": BESIDE, "mounts": {"mini": "/missing"}}, "agent.harbor.mounts.mini"),
    ],
)
async def test_a_setting_that_is_wrong_names_its_key(settings: dict[str, Any], key: str):
    harness = AgentHarness(HarborAgent, [], harbor=settings)
    with raises(ConfigError, key=key):
        await harness.agent.preflight()


async def test_a_harness_that_needs_a_terminal_is_refused_in_the_sandbox():
    harness = AgentHarness(HarborAgent, [], harbor={"agent": "terminus-2"})
    with raises(ConfigError, key="agent.harbor.agent", fix="agent.harbor.environment"):
        await harness.agent.preflight()
    elsewhere = {"agent": "terminus-2", "environment": "tests.harbor_harnesses:Elsewhere"}
    await AgentHarness(HarborAgent, [], harbor=elsewhere).agent.preflight()


async def test_a_run_counts_what_it_loses_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    good = write_task(tmp_path / "good")
    needs_image = write_task(tmp_path / "image", dockerfile="FROM gcc\nRUN make\n")
    recipe = tiny_recipe(
        tmp_path,
        agent={
            "default_agent": "harbor",
            "harbor": {"agent": BESIDE},
            "max_prompt_length": 256,
            "max_response_length": 256,
        },
        rollout={"max_model_len": 512, "group_size": 2, "max_in_flight": 4},
        learner={"pack_length": 512},
        data={"eval": None},
    )
    rows = [row(good), row(needs_image)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    overrides = ["trainer.steps=1", "trainer.checkpoint_every=0", "trainer.eval_every=0"]
    config = load(recipe, overrides)
    codec = open_codec(config)

    def script(request: GenerateRequest) -> list[int]:
        has_acted = "output:" in codec.decode(request.prompt_ids)
        text = "done" if has_acted else "echo 77 > answer.txt"
        return [*codec.encode_text(text), *codec.eos_token_ids]

    engines = {"jetstream": lambda: ScriptedBackend(codec, script)}
    monkeypatch.setattr(runtime_build, "backend_factories", lambda *_, **__: engines)
    monkeypatch.setattr(runtime_build, "make_learner", lambda *_, **__: IdleLearner())
    monkeypatch.setattr(runtime_train, "open_checkpointer", lambda *_, **__: NoCheckpoints())
    monkeypatch.setattr(runtime_train, "reward_plot", lambda *_, **__: None)
    await runtime_train.train(config, resume=False, console=Console(file=io.StringIO()))

    (step,) = step_records(tmp_path / "run")
    assert step["accounting"] == {
        "started": 4,
        "trained": 2,
        "in_flight": 0,
        "dropped": 2,
        "dropped/environment_error": 2,
    }
    records = read_trajectories(tmp_path / "run" / "trajectories.jsonl")
    assert [record["reward"] for record in records] == [1.0, 1.0]
