"""Pauses that fail or are cancelled leave vLLM serving; vLLM itself is not needed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gpu_backend.backend import VllmBackend
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.types import PauseMode
from tests.messages import raises
from tests.unit.gpu_backend.fake_vllm import FakeEngine, FakeUpdater, start_backend

UPDATE = WeightUpdate(version=1, kind="safetensors", payload=[])


@pytest.fixture
def backend_of(tmp_path: Path, monkeypatch) -> Callable[..., Awaitable[VllmBackend]]:
    return functools.partial(start_backend, folder=tmp_path, monkeypatch=monkeypatch)


async def cancelled(engine: FakeEngine, call) -> None:
    """Cancels a call while it waits for the engine's answer."""
    task = asyncio.create_task(call)
    await engine.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def assert_serves(backend: VllmBackend, engine: FakeEngine) -> None:
    assert not engine.paused
    assert backend.delivers_outputs
    assert (await backend.health()).ok


@pytest.mark.parametrize("call", ["pause", "update_weights"])
async def test_a_cancelled_pause_is_taken_back(call: str, backend_of):
    engine = FakeEngine(slow="pause")
    backend = await backend_of(engine)
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
async def test_a_pause_that_fails_is_taken_back(call: str, backend_of):
    engine = FakeEngine(broken="pause")
    backend = await backend_of(engine)
    with raises(RuntimeError, key="pause failed"):
        await (backend.pause(PauseMode.KEEP) if call == "pause" else backend.update_weights(UPDATE))
    await assert_serves(backend, engine)


async def test_a_second_pause_that_fails_leaves_the_first(backend_of):
    engine = FakeEngine()
    backend = await backend_of(engine)
    await backend.pause(PauseMode.KEEP)
    engine.broken = "pause"
    with pytest.raises(RuntimeError):
        await backend.pause(PauseMode.ABORT)
    assert engine.paused
    await backend.resume()
    await assert_serves(backend, engine)


async def test_wrong_weights_stay_paused_when_a_later_pause_is_cancelled(backend_of):
    engine = FakeEngine()
    updater = FakeUpdater()
    backend = await backend_of(engine, updater=updater)
    updater.loses = True
    with pytest.raises(WeightUpdateError):
        await backend.update_weights(UPDATE)
    engine.slow = "pause"
    updater.loses = False
    await cancelled(engine, backend.update_weights(UPDATE))
    assert engine.paused and not (await backend.health()).ok
    engine.slow = None
    await backend.update_weights(UPDATE)
    await assert_serves(backend, engine)


async def test_who_is_cancelled_while_it_resumes_leaves_no_output_behind_the_gate(backend_of):
    engine = FakeEngine(slow="resume")
    backend = await backend_of(engine)
    await cancelled(engine, backend.update_weights(UPDATE))
    await assert_serves(backend, engine)
    assert backend.policy_version == 1
