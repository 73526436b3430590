"""A run that was killed while trajectories acted in sandboxes goes on from their snapshots.

The environment cannot be replayed, and what it answers depends on all that it was told. The policy
does not change in these runs, so each trajectory has to be, id by id, the one of a run that was not
killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_agent_rl.learner.checkpoint import read_notes
from jax_agent_rl.models.hf import save_hf
from jax_agent_rl.observe.run_dir import read_trajectories
from tests.capabilities import needs_bwrap
from tests.tiny_chat import CONFIG, params, tokenizer
from tests.tiny_run import saved_steps, tiny_recipe
from tests.warm import python

pytestmark = needs_bwrap
COMMAND = ["-m", "jax_agent_rl.cli", "train"]
PATIENCE = 240.0
TURNS = 5
GATED_TURN = 3
STEPS = 3

ENVIRONMENT = f"""
import asyncio, json, pathlib

from jax_agent_rl.agents.command.shell import ShellEnvironment
from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.environments import register_environment

FOLDER = pathlib.Path(__file__).parent


@register_environment("ledger")
class Ledger(ShellEnvironment):
    replayable = False

    async def reset(self, *, number, **task):
        self.events = []
        self.number = number
        return await super().reset(**task)

    async def step(self, reply):
        command = f"echo {{reply.content.encode().hex()}} >> ledger; cksum < ledger; wc -l < ledger"
        observation = await super().step(Reply(f"```bash\\n{{command}}\\n```"))
        line = observation.messages[0]["content"]
        turn = int(line.split()[-1])
        self.events.append(turn)
        if turn == {GATED_TURN} and self.number % 2:
            (FOLDER / "reached").touch()
            await exists(FOLDER / "gate")
        return type(observation).say(line, done=turn == {TURNS})

    async def restore(self, snapshot):
        await super().restore(snapshot)
        self.events.append("restored")

    async def conclude(self, messages, reason):
        await exists(FOLDER / "reached")
        with (FOLDER / "events.jsonl").open("a") as file:
            file.write(json.dumps(self.events) + "\\n")
        return await super().conclude(messages, reason)


async def exists(file):
    while not file.exists():
        await asyncio.sleep(0.01)
"""
"""Odd rows wait in a turn for the file ``gate``; nothing ends before one of them does."""


def write_run(folder: Path) -> Path:
    """Write the recipe of a run."""
    recipe = tiny_recipe(
        folder,
        agent={"max_response_length": 200, "max_tool_response_length": 24},
        environments={"path": str(folder / "ledger.py"), "timeout": PATIENCE},
        rollout={
            "group_size": 2,
            "max_in_flight": 8,
            "max_model_len": 240,
            "deterministic": True,
        },
        learner={"pack_length": 240, "learning_rate": 1e-30},
        data={"eval": None},
        trainer={
            "steps": STEPS,
            "mode": "fully_async",
            "max_staleness": 2,
            "checkpoint_every": 1,
            "eval_every": 0,
        },
    )
    (folder / "ledger.py").write_text(ENVIRONMENT)

    # Turns of a random model end where the end is likely.
    weights = dict(params())
    weights["embed"] = weights["embed"].at[CONFIG.eos_token_ids[0]].multiply(3.0)
    save_hf(folder / "model", CONFIG, weights)
    tokenizer().save_pretrained(folder / "model")

    lines = []
    for number, line in enumerate((folder / "train.jsonl").read_text().splitlines()):
        extra_info = {"environment_kwargs": {"name": "ledger", "number": number}}
        agent = {"agent_name": "environment_agent", "extra_info": extra_info}
        lines.append(json.dumps({**json.loads(line), **agent}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    return recipe


def train(recipe: Path, *arguments: str) -> str:
    result = subprocess.run(
        [*python(), *COMMAND, str(recipe), *arguments], capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def train_until_killed(recipe: Path, is_time: Callable[[], bool]) -> None:
    process = subprocess.Popen([*python(), *COMMAND, str(recipe)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while not is_time():
        assert process.poll() is None, "it was over before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def saved_prefixes(run: Path) -> dict[str, dict[str, Any]]:
    """Return what the newest checkpoint holds of running trajectories, by id."""
    progress = read_notes(run / "checkpoints").progress
    prefixes: dict[str, dict[str, Any]] = {}
    for number, group in progress["in_flight"].items():
        step, index = divmod(int(number), 2)
        for member, prefix in group["begun"].items():
            prefixes[f"async-{step}-{index}-{member}"] = prefix
    return prefixes


def trajectories(run: Path) -> dict[str, dict[str, Any]]:
    records = read_trajectories(run / "trajectories.jsonl")
    return {record["trajectory_id"]: record for record in records}


def test_trajectories_in_sandboxes_go_on_from_their_snapshots(tmp_path: Path):
    uninterrupted = write_run(tmp_path / "uninterrupted")
    (tmp_path / "uninterrupted" / "gate").touch()
    train(uninterrupted)

    recipe = write_run(tmp_path / "killed")
    run = tmp_path / "killed" / "run"
    train_until_killed(recipe, lambda: (run / "checkpoints").exists() and bool(saved_steps(run)))
    saved = {}
    for trajectory_id, prefix in saved_prefixes(run).items():
        if prefix["snapshot"] is not None:
            saved[trajectory_id] = prefix
    assert saved
    (tmp_path / "killed" / "events.jsonl").unlink(missing_ok=True)
    (tmp_path / "killed" / "gate").touch()
    train(recipe, "--resume")

    expected = trajectories(tmp_path / "uninterrupted" / "run")
    resumed = trajectories(run)
    assert resumed.keys() == expected.keys()
    for trajectory_id, record in resumed.items():
        for name in ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "messages"):
            assert record[name] == expected[trajectory_id][name], (trajectory_id, name)

    # A sandbox that was restored ran no command of before its snapshot.
    for trajectory_id, prefix in saved.items():
        turns = prefix["snapshot"]["turns"]
        assert resumed[trajectory_id]["metrics"]["restored_turns"] == turns
        assert resumed[trajectory_id]["metrics"].get("replayed_calls", 0) == 0
    lines = (tmp_path / "killed" / "events.jsonl").read_text().splitlines()
    restored = [json.loads(line) for line in lines if "restored" in line]
    assert len(restored) == len(saved)
    for events in restored:
        assert events == ["restored", *range(TURNS + 2 - len(events), TURNS + 1)]
