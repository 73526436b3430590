"""Engines beside the learner, in Ray actors, and both: whole runs of a tiny model, and an actor
that is killed.
"""

import asyncio
import contextlib
import functools
import importlib.util
import io
import json
import operator
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jax_agent_rl.config import Config, load
from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    ConfigError,
    EngineDiedError,
    WeightUpdateError,
)
from jax_agent_rl.observe.run_dir import read_records
from jax_agent_rl.rollout.http.membership import ADDRESS_FILE, command_run
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.ray_backend import EngineHost, RayBackend
from jax_agent_rl.rollout.transport import from_object_store, store
from jax_agent_rl.runtime.ray_cluster import open_ray, reserve
from jax_agent_rl.runtime.train import train
from jax_agent_rl.testing.leaks import Footprint
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.fingerprints import digest
from tests.launching import wait_for_end
from tests.messages import raises
from tests.tiny_run import GATED_REWARD, step_records, tiny_recipe
from tests.toy_backend import ToyBackend

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    """Ray with three GPUs, as far as it knows.

    Runs find it and leave it running: starting it takes longer than a run.
    """
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 3}')
        context = open_ray(None, bundles=4)
        runner.run(context.__aenter__())
        yield
        runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return tiny_recipe(tmp_path_factory.mktemp("recipe"))


def engines() -> list[int]:
    """Process ids of the actors."""
    return [
        pid for pid, command in Footprint.now().processes.items() if EngineHost.__name__ in command
    ]


async def train_and(config: Config, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    training = asyncio.create_task(train(config, resume=False, console=Console(file=io.StringIO())))
    if meanwhile is not None:
        await meanwhile()
    await training


def columns(records: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Return some columns of records."""
    return list(map(operator.itemgetter(*names), records))


def run(
    recipe: Path, folder: Path, *overrides: str, meanwhile=None
) -> tuple[list[dict[str, Any]], list[dict]]:
    """Train, check the books of every step, and return the steps' metrics and the trajectories."""
    config = load(recipe, [f"run_dir={folder / 'run'}", *overrides])
    asyncio.run(train_and(config, meanwhile))
    for pid in engines():  # Ray kills an actor's process a moment after it was told to
        wait_for_end(pid)
    steps = step_records(folder / "run")
    assert [r["step"] for r in steps] == list(range(1, config.trainer.steps + 1))
    for step in steps:
        books = step["accounting"]
        assert books["started"] == books["trained"] + books["dropped"] + books["in_flight"]
    trained = [
        r for r in read_records(folder / "run" / "trajectories.jsonl") if r["split"] == "train"
    ]
    assert len({r["trajectory_id"] for r in trained}) == len(trained)
    return steps, trained


@pytest.fixture(scope="module")
def colocated(recipe, tmp_path_factory) -> list[dict[str, Any]]:
    return run(recipe, tmp_path_factory.mktemp("colocated"))[1]


PLACEMENTS = {
    "asleep": ["rollout.sleep_during_update=true"],
    "separate": ["rollout.placement=separate"],
    "hybrid": ["rollout.placement=hybrid", "rollout.sleep_during_update=true"],
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_samples_the_same_trajectories(
    recipe, colocated, placement: str, tmp_path: Path
):
    steps, trained = run(recipe, tmp_path, *PLACEMENTS[placement])
    keys = ("trajectory_id", "step", "response_ids", "policy_versions", "reward")
    assert columns(trained, *keys) == columns(colocated, *keys)
    assert sum(step["accounting"]["dropped"] for step in steps) == 0


OPENAI_AGENT = """
import openai
from jax_agent_rl.agents import openai_agent

@openai_agent("two_questions")
async def two_questions(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60) as client:
        messages = [dict(message) for message in row["prompt"]]
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="any", messages=messages, max_tokens=5
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "three"})
"""


def test_a_program_trains_alike_with_ray_actors_and_with_a_local_engine(tmp_path: Path):
    (tmp_path / "agent.py").write_text(OPENAI_AGENT)
    agent = {
        "module": str(tmp_path / "agent.py"),
        "default_agent": "two_questions",
        "tool_format": "hermes",
    }
    recipe = tiny_recipe(
        tmp_path / "recipe", agent=agent | {"max_prompt_length": 32, "max_response_length": 30}
    )
    with_local_engine = run(recipe, tmp_path / "beside", "trainer.steps=2")[1]
    trained = run(recipe, tmp_path / "actors", "trainer.steps=2", "rollout.placement=separate")[1]
    keys = ("trajectory_id", "step", "response_ids", "response_mask", "policy_versions", "reward")
    assert columns(trained, *keys) == columns(with_local_engine, *keys)
    assert {len(r["turns"]) for r in trained} == {2}
    assert (
        json.loads((tmp_path / "actors" / "run" / "summary.json").read_text())["token_drift"] == 0
    )


KILLED = {
    "the only one, sync": (1, ["trainer.mode=sync", "rollout.placement=separate"]),
    "one of two, fully_async": (2, ["trainer.mode=fully_async", "rollout.placement=separate"]),
    "hybrid, fully_async": (
        1,
        [
            "trainer.mode=fully_async",
            "rollout.placement=hybrid",
            "rollout.sleep_during_update=true",
        ],
    ),
}


@pytest.mark.parametrize("case", KILLED)
def test_an_actor_that_is_killed_costs_time_and_no_trajectory(recipe, case: str, tmp_path: Path):
    """If it was the only engine, the run goes on once it is rebuilt and has the current weights."""
    metrics = tmp_path / "run" / "metrics.jsonl"
    count, overrides = KILLED[case]

    async def kill_one() -> None:
        while not (metrics.exists() and [r for r in read_records(metrics) if r["kind"] == "step"]):
            await asyncio.sleep(0.01)
        pids = engines()
        assert len(pids) == count
        os.kill(pids[0], signal.SIGKILL)

    overrides = [*overrides, f"rollout.num_engines={count}", "trainer.steps=8"]
    steps, trained = run(recipe, tmp_path, *overrides, meanwhile=kill_one)
    last = steps[-1]
    assert (last["servers_lost"], last["stale_served"]) == (1, 0)
    assert len(trained) == 8 * 8
    assert last["accounting"]["trained"] == 8 * 8


def test_a_run_goes_on_with_an_added_engine_when_the_first_is_removed(
    recipe, colocated, tmp_path: Path
):
    """The one that was added samples everything, with the weights of each step, what the first one
    would have.
    """
    gate = tmp_path / "gate"
    folder = tmp_path / "run"
    reward = tmp_path / "reward.py"
    reward.write_text(GATED_REWARD.format(gate=str(gate)))
    printed: list[str] = []

    async def replace_the_engine() -> None:
        while not (folder / ADDRESS_FILE).exists():
            await asyncio.sleep(0.01)
        with raises(BackendError, fix="rollout.backend=remote"):
            await command_run(folder, "engines/add", {"url": "http://127.0.0.1:8100"})
        for path, body in (("add", {"url": None}), ("remove", {"name": "ray-0", "drain": False})):
            answer = await command_run(folder, f"engines/{path}", body)
            printed.append(" ".join(engine["name"] for engine in answer["engines"]))
        gate.touch()

    overrides = ["rollout.placement=separate", f"reward.path={reward}", "reward.timeout=600"]
    steps, trained = run(recipe, tmp_path, *overrides, meanwhile=replace_the_engine)
    first, second = printed
    assert first == f"ray-0 {second}"
    keys = ("trajectory_id", "step", "response_ids", "policy_versions", "reward")
    assert columns(trained, *keys) == columns(colocated, *keys)
    last = steps[-1]
    assert (last["servers_up"], last["servers_lost"], last["stale_served"]) == (1, 0, 0)
    assert last["accounting"]["dropped"] == 0
    assert not (folder / ADDRESS_FILE).exists()


def toy_actor(*, tick_seconds: float = 0.0, **options: Any) -> RayBackend:
    make = functools.partial(fetching_toy, tick_seconds)
    return RayBackend(make, options=options)


def fetching_toy(tick_seconds: float) -> RolloutBackend:
    engine = ToyBackend(tick_seconds=tick_seconds, weight_payloads=frozenset({"safetensors"}))
    return from_object_store(engine)


def request(name: str, max_tokens: int = 5) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=(3, 4, 5), sampling=sampling)


@contextlib.asynccontextmanager
async def toys(count: int, *, tick_seconds: float = 0.0) -> AsyncIterator[list[RayBackend]]:
    actors = [toy_actor(tick_seconds=tick_seconds) for _ in range(count)]
    try:
        await asyncio.gather(*(actor.start() for actor in actors))
        yield actors
    finally:
        await asyncio.gather(*(actor.close() for actor in actors))


async def test_one_object_updates_all_engines_and_a_damaged_one_none(tmp_path: Path):
    import ray

    (tmp_path / "w.safetensors").write_text("other")
    files = WeightUpdate(
        version=1,
        kind="safetensors",
        payload=[str(tmp_path / "w.safetensors")],
        digests={"w.safetensors": digest(b"other")},
    )
    put: list[Any] = []

    def counting(contents: Any) -> Any:
        put.append(ray.put(contents))
        return put[-1]

    update = store(files, counting)
    damaged = replace(update, digests={"w.safetensors": digest(b"othex")})
    async with toys(2) as actors:
        old_outputs = [await actor.generate(request("before")) for actor in actors]
        for actor, old in zip(actors, old_outputs, strict=True):
            with raises(WeightUpdateError, key="w.safetensors", value="damaged"):
                await actor.update_weights(damaged)
            assert (await actor.generate(request("still"))).token_ids == old.token_ids
            assert actor.policy_version == 0
        await asyncio.gather(*(actor.update_weights(update) for actor in actors))
        new_outputs = [await actor.generate(request("after")) for actor in actors]
    assert len(put) == 1
    assert new_outputs[0] == new_outputs[1]
    assert new_outputs[0].token_ids != old_outputs[0].token_ids
    assert set(new_outputs[0].policy_versions) == {1}


async def test_what_a_dead_actor_was_asked_fails_as_a_dead_engine():
    async with toys(1, tick_seconds=1.0) as (actor,):  # or they might end before their engine does
        running = asyncio.create_task(actor.generate(request("long", max_tokens=190)))
        stream = actor.stream(request("stream", max_tokens=190))
        await anext(stream)
        (pid,) = engines()
        os.kill(pid, signal.SIGKILL)
        for lost in (running, anext_until_end(stream), actor.metrics()):
            with raises(EngineDiedError, value="Ray actor"):
                await lost
        health = await actor.health()
        assert not health.ok
        assert "is gone" in health.detail


async def test_a_start_that_is_given_up_leaves_no_actor():
    starting = RayBackend(NeverStarts)
    task = asyncio.create_task(starting.start())
    while not engines():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(BackendClosedError):
        await starting.generate(request("late"))
    while engines():
        await asyncio.sleep(0.01)


class NeverStarts(ToyBackend):
    async def start(self) -> None:
        await asyncio.get_running_loop().create_future()


async def anext_until_end(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


async def test_learner_and_engines_see_different_gpus(monkeypatch: pytest.MonkeyPatch):
    import ray

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    async with reserve(2, gpus_per_engine=1, learner_gpus=1) as actor_options:
        ids = [
            await ray.remote(ray.get_gpu_ids).options(**options).remote()
            for options in actor_options
        ]
        seen = [os.environ["CUDA_VISIBLE_DEVICES"], *(str(gpu) for (gpu,) in ids)]
    assert sorted(seen) == ["0", "1", "2"]


async def test_a_cluster_that_is_too_small_is_named_with_what_it_has():
    with raises(ConfigError, key="rollout.gpus_per_engine", value=(2, "5 GPUs", "3 GPUs")):
        async with reserve(2, gpus_per_engine=2, learner_gpus=1):
            raise AssertionError("there are three")
