"""Pauses that fail or are cancelled leave vLLM serving; vLLM itself is not needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpu_backend.backend import VllmBackend
from gpu_backend.launch import Log, StartedEngine
from gpu_backend.settings import VllmSettings
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import PauseMode

UPDATE = WeightUpdate(version=1, kind="safetensors", payload=[])


class Engine:
    """Pauses and resumes like ``AsyncLLM``: at once, but the caller waits for the answer.

    Attributes:
        slow: the call whose answer does not come.
        broken: the call that raises, when it has done its work.
    """

    errored = False

    def __init__(self, *, slow: str | None = None, broken: str | None = None) -> None:
        self.paused = False
        self.slow = slow
        self.broken = broken
        self.waiting = asyncio.Event()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await self._answer("pause")

    async def resume_generation(self) -> None:
        self.paused = False
        await self._answer("resume")

    async def _answer(self, call: str) -> None:
        if call == self.broken:
            raise RuntimeError(f"{call} failed")
        if call == self.slow:
            self.waiting.set()
            await asyncio.Event().wait()


class Updater:
    """Takes every update but those it is set to lose."""

    def __init__(self) -> None:
        self.loses = False

    def check(self, update: WeightUpdate, *, served: int) -> None:
        return None

    async def load(self, update: WeightUpdate) -> None:
        if self.loses:
            raise WeightUpdateError("half of it is missing")


def backend_of(engine: Engine) -> VllmBackend:
    backend = VllmBackend(VllmSettings(model="m", max_model_len=60))
    backend._engine = engine
    backend._updater = Updater()
    backend._started = StartedEngine(engine=engine, platform="cpu", log=Log(Path("vllm.log")))
    return backend


async def cancelled(engine: Engine, call) -> None:
    """Cancels a call while it waits for the engine's answer."""
    task = asyncio.create_task(call)
    await engine.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def assert_serves(backend: VllmBackend, engine: Engine) -> None:
    assert not engine.paused
    assert backend._delivery.is_set()
    assert (await backend.health()).ok


@pytest.mark.parametrize("call", ["pause", "update_weights"])
async def test_a_cancelled_pause_is_taken_back(call: str):
    engine = Engine(slow="pause")
    backend = backend_of(engine)
    await cancelled(
        engine, backend.pause(PauseMode.KEEP) if call == "pause" else backend.update_weights(UPDATE)
    )
    await assert_serves(backend, engine)
    assert backend.policy_version == 0
    engine.slow = None
    await backend.update_weights(UPDATE)
    await assert_serves(backend, engine)
    assert backend.policy_version == 1


@pytest.mark.parametrize("call", ["pause", "update_weights"])
async def test_a_pause_that_fails_is_taken_back(call: str):
    engine = Engine(broken="pause")
    backend = backend_of(engine)
    with pytest.raises(RuntimeError, match="pause failed"):
        await (backend.pause(PauseMode.KEEP) if call == "pause" else backend.update_weights(UPDATE))
    await assert_serves(backend, engine)


async def test_a_second_pause_that_fails_leaves_the_first():
    engine = Engine()
    backend = backend_of(engine)
    await backend.pause(PauseMode.KEEP)
    engine.broken = "pause"
    with pytest.raises(RuntimeError):
        await backend.pause(PauseMode.ABORT)
    assert engine.paused
    await backend.resume()
    await assert_serves(backend, engine)


async def test_wrong_weights_stay_paused_when_a_later_pause_is_cancelled():
    engine = Engine()
    backend = backend_of(engine)
    backend._updater.loses = True
    with pytest.raises(WeightUpdateError):
        await backend.update_weights(UPDATE)
    engine.slow = "pause"
    backend._updater.loses = False
    await cancelled(engine, backend.update_weights(UPDATE))
    assert engine.paused and not (await backend.health()).ok
    engine.slow = None
    await backend.update_weights(UPDATE)
    await assert_serves(backend, engine)


async def test_who_is_cancelled_while_it_resumes_leaves_no_output_behind_the_gate():
    engine = Engine(slow="resume")
    backend = backend_of(engine)
    await cancelled(engine, backend.update_weights(UPDATE))
    await assert_serves(backend, engine)
    assert backend.policy_version == 1
