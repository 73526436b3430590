"""Servers in virtual time whose engines can die, hang and refuse weights, and a client of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from jax_agent_rl.errors import EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.testing.simulate.engine import SimulatedEngine
from jax_agent_rl.testing.simulate.workload import EngineSpeed, VirtualLoop
from jax_agent_rl.types import PauseMode, SamplingParams, TokenOutput

SPEED = EngineSpeed(slots=64, step_seconds=1.0, prefill_tokens_per_step=10**9, load_seconds=1.0)


class FaultyEngine(SimulatedEngine):
    """Samples one id per second; a successor of the same name starts at version 0 again."""

    def __init__(self, fleet: Fleet, name: str, *, version: int = 0) -> None:
        super().__init__(fleet.speed, max_model_len=4096)
        self.fleet = fleet
        self.name = name
        self._version = version
        self._dead = self._silent = False
        self.started = self.refuses = False
        self.asked: list[GenerateRequest] = []
        self.updates: list[int] = []

    async def start(self) -> None:
        self.fleet.starts.append((self.name, self._loop.time()))
        await asyncio.sleep(self.fleet.start_seconds)
        if self.name in self.fleet.unreachable:
            raise EngineDiedError(f"{self.name} is not to be reached")
        self.started = True

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        self._check()
        served = self.fleet.client.pool.policy_version
        assert served is not None and self._version >= served, "a fenced server was asked"
        self.asked.append(request)
        assert request.request_id not in self.fleet.inside, "a request ran twice at the same time"
        self.fleet.inside.add(request.request_id)
        try:
            return await super().generate(request)
        finally:
            self.fleet.inside.remove(request.request_id)

    async def update_weights(self, update: WeightUpdate) -> None:
        self._check()
        if self._silent:
            await asyncio.get_running_loop().create_future()
        if update.version <= self._version or self.refuses:
            raise WeightUpdateError(f"{self.name} refuses version {update.version}")
        await super().update_weights(update)
        self._check()
        self.updates.append(update.version)

    async def abort(self, request_id: str) -> bool:
        self._check()
        if self._silent:
            await asyncio.get_running_loop().create_future()
        return await super().abort(request_id)

    async def pause(self, mode: PauseMode) -> None:
        self._check()
        await super().pause(mode)

    async def metrics(self) -> Any:
        self._check()
        return await super().metrics()

    def _check(self) -> None:
        if self._dead:
            raise EngineDiedError(f"{self.name} died")

    def die(self) -> None:
        """Fail all running and future requests."""
        self._dead = True
        for run in [*self._running.values(), *self._waiting]:
            if not run.result.done():
                run.result.set_exception(EngineDiedError(f"{self.name} died"))

    def fall_silent(self) -> None:
        """Stop sampling and answering."""
        self._advance()
        self._silent = self._paused = True
        self._schedule()

    async def resume(self) -> None:
        if not self._silent:
            await super().resume()


class Fleet:
    """A client and all engines created for them.

    Attributes:
        engines: all engines by name, the newest last.
        starts: name and time of every start.
        unreachable: names of engines that fail to start.
        inside: ids of requests that are in some engine.
    """

    def __init__(
        self,
        *,
        speed: EngineSpeed = SPEED,
        wait_for_server_seconds: float = 50.0,
        recovery_seconds: float = 100.0,
        **client: Any,
    ) -> None:
        self.speed = speed
        self.engines: dict[str, list[FaultyEngine]] = {}
        self.starts: list[tuple[str, float]] = []
        self.unreachable: set[str] = set()
        self.inside: set[str] = set()
        self.start_seconds = 0.0
        self.client = LLMServerClient(
            wait_for_server_seconds=wait_for_server_seconds,
            recovery_seconds=recovery_seconds,
            **client,
        )
        self._number = 0

    def make(self, name: str, **engine: Any) -> Callable[[], FaultyEngine]:
        def factory() -> FaultyEngine:
            faulty_engine = FaultyEngine(self, name, **engine)
            self.engines.setdefault(name, []).append(faulty_engine)
            return faulty_engine

        return factory

    async def start(self, *names: str) -> None:
        await self.client.pool.start({name: self.make(name) for name in names})

    def __getitem__(self, name: str) -> FaultyEngine:
        """Return the newest engine of this name."""
        return self.engines[name][-1]

    @property
    def up(self) -> list[str]:
        return sorted(server.name for server in self.client.pool.servers)

    def ask(self, tokens: int, **request: Any) -> asyncio.Task[TokenOutput]:
        self._number += 1
        fields = {
            "prompt_ids": (1,) * 8,
            "sampling_params": SamplingParams(max_tokens=tokens),
        } | request
        return asyncio.ensure_future(self.client.generate(f"r{self._number}", **fields))

    async def publish(self, version: int, *, lasting: bool = True, **options: Any) -> None:
        update = WeightUpdate(version=version, kind="arrays", payload=None, lasting=lasting)
        await self.client.pool.update_weights(update, **options)

    async def publish_in_place(
        self, version: int, make: Callable[[], Awaitable[None]], *, lasting: bool = False
    ) -> None:
        """Publish as :meth:`publish`, but call ``make`` first, while the servers are paused."""

        async def make_update() -> WeightUpdate:
            await make()
            return WeightUpdate(version=version, kind="arrays", payload=None, lasting=lasting)

        await self.client.pool.update_weights_in_place(make_update)


def in_virtual_time(main: Callable[..., Awaitable[Any]], **fleet: Any) -> Any:
    """Run ``main(fleet)`` in virtual time, close the client, and require that no task is left."""

    async def whole() -> Any:
        new_fleet = Fleet(**fleet)
        try:
            return await main(new_fleet)
        finally:
            await new_fleet.client.pool.close()
            await asyncio.sleep(0)
            leftover_tasks = asyncio.all_tasks() - {asyncio.current_task()}
            assert not leftover_tasks, leftover_tasks

    with closing(VirtualLoop()) as loop:
        return loop.run_until_complete(whole())


def now() -> float:
    return asyncio.get_running_loop().time()
