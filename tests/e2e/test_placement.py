"""Engines beside the learner, in Ray actors, and both: whole runs of a tiny model, and an actor that is killed."""

import asyncio
import importlib.util
import io
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jax_agent_rl.config import Config, load
from jax_agent_rl.conformance.footprint import Footprint
from jax_agent_rl.observe.metrics import read_records
from jax_agent_rl.rollout.ray_actor.host import EngineHost
from jax_agent_rl.runtime.ray_cluster import open_ray
from jax_agent_rl.trainer.run import train
from tests.tiny_run import tiny_recipe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    """Runs find it and leave it running: starting it takes longer than a run."""
    with asyncio.Runner() as runner:
        context = open_ray(None, bundles=4)
        runner.run(context.__aenter__())
        yield
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("recipe"))


def engines() -> list[int]:
    """Process ids of the actors."""
    return [pid for pid, command in Footprint.now().processes.items() if EngineHost.__name__ in command]


async def train_and(config: Config, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    training = asyncio.create_task(train(config, resume=False, console=Console(file=io.StringIO())))
    if meanwhile is not None:
        await meanwhile()
    await training


def run(recipe: Path, folder: Path, *overrides: str, meanwhile=None) -> tuple[list[dict[str, Any]], list[dict]]:
    """Trains, checks the books of every step, and returns the steps' metrics and the trajectories."""
    config = load(recipe, [f"run_dir={folder / 'run'}", *overrides])
    asyncio.run(train_and(config, meanwhile))
    assert not engines(), "actors outlive their run"
    steps = [r for r in read_records(folder / "run" / "metrics.jsonl") if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, config.trainer.steps + 1))
    for step in steps:
        books = step["accounting"]
        assert books["started"] == books["trained"] + books["dropped"] + books["in_flight"]
    trained = [r for r in read_records(folder / "run" / "trajectories.jsonl") if r["split"] == "train"]
    assert len({r["trajectory_id"] for r in trained}) == len(trained)
    return steps, trained


@pytest.fixture(scope="module")
def colocated(recipe, tmp_path_factory) -> list[dict[str, Any]]:
    return run(recipe, tmp_path_factory.mktemp("colocated"))[1]


@pytest.mark.parametrize(
    "overrides", [["sleep=true"], ["placement=separate"], ["placement=hybrid", "sleep=true"]], ids=str
)
def test_every_placement_samples_the_same_trajectories(recipe, colocated, overrides: list[str], tmp_path: Path):
    steps, trained = run(recipe, tmp_path, *(f"rollout.{override}" for override in overrides))
    keys = ("trajectory_id", "step", "response_ids", "policy_versions", "reward")
    assert [{k: r[k] for k in keys} for r in trained] == [{k: r[k] for k in keys} for r in colocated]
    assert sum(step["accounting"]["dropped"] for step in steps) == 0


@pytest.mark.parametrize(("mode", "count"), [("sync", 1), ("fully_async", 2)])
def test_an_actor_that_is_killed_costs_time_and_no_trajectory(recipe, mode: str, count: int, tmp_path: Path):
    """With one engine the run goes on only once it is rebuilt and has the weights of the moment."""
    metrics = tmp_path / "run" / "metrics.jsonl"

    async def kill_one() -> None:
        while not (metrics.exists() and [r for r in read_records(metrics) if r["kind"] == "step"]):
            await asyncio.sleep(0.01)
        pids = engines()
        assert len(pids) == count
        os.kill(pids[0], signal.SIGKILL)

    overrides = [f"trainer.mode={mode}", "trainer.steps=8", "rollout.placement=separate", f"rollout.engines={count}"]
    steps, trained = run(recipe, tmp_path, *overrides, meanwhile=kill_one)
    last = steps[-1]
    assert (last["servers_lost"], last["stale_served"]) == (1, 0)
    assert last["servers_joined"] == 1 or count > 1, "nobody else could have sampled the rest"
    assert len(trained) == 8 * 8 and last["accounting"]["trained"] == 8 * 8
