"""Engines that join and leave a running pool over HTTP, by command."""

import asyncio
import contextlib
import json
import stat
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.http.membership import ADDRESS_FILE, MembershipServer, command_run
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import SamplingParams
from tests.messages import raises
from tests.toy_backend import BASE, ToyBackend


class Run:
    """A pool of toy engines that takes commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = LLMServerClient()
        self.engines: dict[str, ToyBackend] = {}
        self.held: set[str] = set()

    def make(self, name: str) -> ToyBackend:
        self.engines[name] = ToyBackend(tick_seconds=0.001)
        return self.engines[name]

    @contextlib.asynccontextmanager
    async def open_engine(self, url: str | None):
        if url is None:
            raise ConfigError("name a URL")
        self.held.add(url)
        yield url, lambda: self.make(url)
        self.held.discard(url)

    @property
    def names(self) -> list[str]:
        return sorted(server.name for server in self.client.pool.servers)

    def ask(self, name: str, tokens: int = 5, **fields):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return asyncio.ensure_future(
            self.client.generate(name, prompt_ids=(5, 6, 7), sampling_params=sampling, **fields)
        )


@contextlib.asynccontextmanager
async def running(folder: Path):
    """One engine, ``first``, that serves version 1."""
    run = Run(folder)
    async with AsyncExitStack() as reservations:
        await run.client.pool.start({"first": lambda: run.make("first")})
        await run.client.pool.update_weights(update(1))
        membership = MembershipServer(
            run.client.pool, folder, open_engine=run.open_engine, reservations=reservations
        )
        await membership.start()
        try:
            yield run
        finally:
            await membership.close()
            await run.client.pool.close()
    assert not run.held, "places are free again"
    assert not (folder / ADDRESS_FILE).exists()


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, kind="toy", payload=BASE, lasting=True)


async def test_added_engines_are_current_and_removed_ones_lose_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with running(tmp_path) as run:
        answer = await command_run(tmp_path, "engines/add", {"url": "second"})
        assert {engine["name"]: engine["policy_version"] for engine in answer["engines"]} == {
            "first": 1,
            "second": 1,
        }
        outputs = await asyncio.gather(*(run.ask(f"a{i}") for i in range(4)))
        assert {version for output in outputs for version in output.policy_versions} == {1}
        assert (await run.engines["second"].metrics()).requests_finished > 0

        asked = [run.ask(f"b{i}", tokens=40) for i in range(4)]
        while not run.engines["first"].running:
            await asyncio.sleep(0)
        answer = await command_run(tmp_path, "engines/remove", {"name": "first", "drain": False})
        assert [engine["name"] for engine in answer["engines"]] == ["second"] == run.names
        assert [len(output.token_ids) for output in await asyncio.gather(*asked)] == [40] * 4
        assert caplog.messages == [
            "server second joined, with weights of version 1",
            "server first left",
        ]

        await command_run(tmp_path, "engines/add", {"url": "third"})
        await command_run(tmp_path, "engines/remove", {"name": "second", "drain": True})
        assert run.held == {"third"}


async def test_what_cannot_join_or_leave_is_refused_by_name_and_changes_nothing(tmp_path: Path):
    async with running(tmp_path) as run:
        run.client.pool.check_server = lambda server: (_ for _ in ()).throw(
            ConfigError(f"{server.name} sees no images")
        )
        for path, body, message in (
            ("add", {"url": "blind"}, "blind sees no images"),
            ("add", {"url": None}, "name a URL"),
            ("add", {"url": "first"}, "'first' already"),
            ("add", {}, "url: "),
            ("add", {"url": 5}, "url: "),
            ("remove", {"name": "other", "drain": False}, "no engine 'other'; there are first"),
            ("remove", {"name": "first", "drain": False}, "no engine would be left"),
        ):
            with pytest.raises(BackendError, match=message):
                await command_run(tmp_path, f"engines/{path}", body)
            assert run.names == ["first"] and not run.held
        assert (await run.ask("still there")).policy_versions == (1,) * 5


async def test_a_command_that_is_interrupted_leaves_no_engine_half_way(tmp_path: Path):
    async with running(tmp_path) as run:
        passing = replace(update(2), lasting=False)  # an engine that joins waits for the next
        await run.client.pool.update_weights(passing)
        joining = asyncio.create_task(command_run(tmp_path, "engines/add", {"url": "second"}))
        while "second" not in run.engines or run.engines["second"] not in run.client.pool.backends:
            await asyncio.sleep(0.001)
        joining.cancel()
        while run.held:
            await asyncio.sleep(0.001)
        assert run.names == ["first"]
        assert len(run.client.pool.backends) == 1


async def test_only_the_holder_of_the_runs_token_changes_engines(tmp_path: Path):
    async with running(tmp_path) as run:
        file = tmp_path / ADDRESS_FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        url = json.loads(file.read_text())["url"]
        assert url.startswith("http://127.0.0.1:")
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.post(
                    f"{url}/v1/engines/add", json={"url": "second"}
                ) as response:
                    assert response.status == 401
        assert run.names == ["first"]


async def test_a_command_to_a_run_that_ended_says_so(tmp_path: Path):
    with raises(ConfigError, key="engines.json", value="missing"):
        await command_run(tmp_path, "engines")
    async with running(tmp_path):
        stale = (tmp_path / ADDRESS_FILE).read_text()
    (tmp_path / ADDRESS_FILE).write_text(stale)
    with raises(ConfigError, value=("killed", "another machine")):
        await command_run(tmp_path, "engines")
