"""Recorded replies, played again in an environment whose verifier has changed."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jax_agent_rl.agents import EnvironmentAgent
from jax_agent_rl.cli import app
from jax_agent_rl.config import build
from jax_agent_rl.environments import (
    Environment,
    EnvironmentPools,
    Observation,
    register_environment,
)
from jax_agent_rl.environments.base import ENVIRONMENTS
from jax_agent_rl.errors import EnvironmentFailedError, ReplayError
from jax_agent_rl.evaluate.replay import EnvironmentReplay
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.types import FinishReason, Trajectory
from tests.agent_testbed import ROW, AgentHarness
from tests.messages import raises

ROW_OF_COUNT = {
    **ROW,
    "data_source": "environment",
    "extra_info": {"environment_kwargs": {"name": "count", "target": 3}},
}


class Count(Environment):
    """Every reply is worth its number; the target ends the episode."""

    factor = 1.0
    hint = "more"
    opening = "Count."

    async def reset(self, *, target: int) -> Observation:
        self._target = target
        return Observation.say(self.opening)

    async def step(self, reply) -> Observation:
        number = int(reply.content)
        done = number == self._target
        return Observation.say(self.hint, score=number * self.factor, done=done)

    async def conclude(self, messages, reason):
        return {"score": 0.5 * self.factor}


@pytest.fixture(autouse=True)
def count() -> Iterator[None]:
    register_environment("count")(Count)
    yield
    del ENVIRONMENTS["count"]


class Recorded:
    """A trajectory with what a replay of it needs."""

    def __init__(self, script: list[str], **limits: int) -> None:
        shared = {"environments": EnvironmentPools()}
        self.harness = AgentHarness(EnvironmentAgent, script, shared=shared, **limits)
        self.replay = EnvironmentReplay(
            EnvironmentPools(), self.harness.codec, self.harness.context.limits
        )

    async def trajectory(self) -> Trajectory:
        return await self.harness.run(ROW_OF_COUNT)


async def test_a_changed_verifier_gives_its_new_scores(monkeypatch: pytest.MonkeyPatch):
    recorded = Recorded(["1", "2", "3"])
    trajectory = await recorded.trajectory()
    assert trajectory.turn_scores == (1.0, 2.0, 3.5)
    assert (await recorded.replay.play(trajectory)).turn_scores == trajectory.turn_scores
    monkeypatch.setattr(Count, "factor", 10.0)
    replayed = await recorded.replay.play(trajectory)
    assert replayed.turn_scores == (10.0, 20.0, 35.0)
    unscored = [replace(turn, score=None) for turn in trajectory.turns]
    assert replace(replayed, turns=tuple(unscored)) == replace(trajectory, turns=tuple(unscored))


async def test_a_trajectory_that_a_limit_ended_is_replayed():
    recorded = Recorded(["1", "2", "3"], max_assistant_turns=2)
    trajectory = await recorded.trajectory()
    assert trajectory.finish_reason is FinishReason.MAX_ASSISTANT_TURNS
    assert (await recorded.replay.play(trajectory)).turn_scores == (1.0, 2.5)


async def test_an_environment_that_answers_otherwise_is_told(monkeypatch: pytest.MonkeyPatch):
    recorded = Recorded(["1", "3"])
    trajectory = await recorded.trajectory()
    longer = {"environment_kwargs": {"name": "count", "target": 4}}
    with raises(ReplayError, value=("went on", "turn 1"), fix="--replay"):
        await recorded.replay.play(replace(trajectory, row={**ROW_OF_COUNT, "extra_info": longer}))
    sooner = {"environment_kwargs": {"name": "count", "target": 1}}
    with raises(ReplayError, value=("ended the episode", "turn 0")):
        await recorded.replay.play(replace(trajectory, row={**ROW_OF_COUNT, "extra_info": sooner}))
    monkeypatch.setattr(Count, "hint", "less")
    with raises(ReplayError, value=("less", "more", "turn 0")):
        await recorded.replay.play(trajectory)
    monkeypatch.setattr(Count, "opening", "Count down.")
    with raises(ReplayError, value=("Count down.", "Count."), fix="--replay"):
        await recorded.replay.play(trajectory)
    monkeypatch.setattr(Count, "replayable", False)
    with raises(ReplayError, key="replayable"):
        await recorded.replay.play(trajectory)


async def test_an_environment_that_fails_now_is_told(monkeypatch: pytest.MonkeyPatch):
    recorded = Recorded(["1", "3"])
    trajectory = await recorded.trajectory()

    async def fails(self, reply):
        raise ValueError("no such item")

    monkeypatch.setattr(Count, "step", fails)
    with raises(EnvironmentFailedError, value="no such item"):
        await recorded.replay.play(trajectory)


async def test_a_trajectory_of_another_agent_stays_as_it_is():
    recorded = Recorded(["1", "3"])
    trajectory = replace(await recorded.trajectory(), agent_name="tool_agent")
    assert await recorded.replay.play(trajectory) is trajectory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that recorded one trajectory, whose verifier has changed since."""
    recorded = Recorded(["1", "3"])
    trajectory = asyncio.run(recorded.trajectory())
    folder = RunDir(tmp_path / "run")
    tree = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t"}}
    folder.write_json(folder.config, build(tree).model_dump(mode="json"))
    folder.add_trajectories(1, "train", [replace(trajectory, reward=4.5)])
    codec = recorded.harness.codec
    monkeypatch.setattr("jax_agent_rl.evaluate.rescore.open_codec", lambda config: codec)
    monkeypatch.setattr(Count, "factor", 10.0)
    return folder.path


def test_the_command_replays_environments_where_asked_to(run: Path, tmp_path: Path):
    words = ["rescore", str(run), "--json"]
    unchanged = json.loads(CliRunner().invoke(app, words).stdout)
    assert (unchanged["old_mean"], unchanged["new_mean"]) == (4.5, 4.5)
    out = tmp_path / "new.jsonl"
    result = CliRunner().invoke(app, [*words, "--replay", "--out", str(out)])
    changed = json.loads(result.stdout)
    assert (changed["old_mean"], changed["new_mean"], changed["failed"]) == (4.5, 45.0, {})
    row = json.loads(out.read_text())
    assert row["turn_scores"] == [10.0, 35.0]

    of_table = CliRunner().invoke(app, ["rescore", str(out), "--json", "--replay"])
    assert json.loads(of_table.stdout)["new_mean"] == 45.0
