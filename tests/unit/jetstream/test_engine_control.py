"""The JAX engine's thread under control calls: each is answered, whatever ends the thread, the
pause or the weights.
"""

import asyncio
import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    ModelError,
    WeightUpdateError,
)
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.decode_batch import Sampled
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.jetstream.engine_core import THREAD_NAME, EngineCore, EngineThread
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.rollout.protocol import GenerateRequest, WeightUpdate
from jax_agent_rl.types import PauseMode, SamplingParams, StopReason
from tests.messages import raises
from tests.tiny import TINY, tiny_params

SHAPES = EngineShapes(
    max_model_len=64,
    max_concurrent_decodes=3,
    kv_cache_tokens=192,
    decode_steps=4,
    prefill_buckets=(32,),
)


class Gate:
    """Holds a thread up, and says when it is there."""

    def __init__(self) -> None:
        self._arrivals = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._open = False

    def passed(self) -> None:
        """Pass the gate, or wait until it opens; called by the thread."""
        self._arrivals.release()
        if not self._open:
            self._passes.acquire()

    async def reached(self) -> None:
        """Returns when the thread has come once more. A thread that waits without a limit keeps
        Python from ending.
        """
        assert await asyncio.to_thread(self._arrivals.acquire, timeout=30)

    def let_one_pass(self) -> None:
        self._passes.release()

    def open(self) -> None:
        self._open = True
        self._passes.release()


class CountingEngine:
    """Counts on from the last id, four steps a dispatch; each dispatch waits at a gate. Weights are
    one array.
    """

    adapters = ()

    def __init__(self, shapes: EngineShapes) -> None:
        self.config = TINY
        self.shapes = shapes
        self.program_table = SimpleNamespace(recompilations=0, compile_seconds=0.0)
        self.gate = Gate()
        self.broken: Exception | None = None
        self.refusal: Exception | None = None
        self.gives_up_old_weights = True

    def width(self, slots):
        return slots

    def init_cache(self):
        return ()

    def load_params(self, params, old=None):
        if self.gives_up_old_weights and old is not None:
            old.delete()
        if self.refusal:
            raise self.refusal
        return jax.numpy.array(params["final_norm"])

    def offload_params(self, params):
        return jax.device_get(params)

    def copy_page(self, cache, source, target):
        return cache

    def extend(self, params, cache, extensions):
        return cache

    def decode(self, params, cache, slots, steps, exit_after):
        self.gate.passed()
        if self.broken:
            raise self.broken
        assert not params.is_deleted()
        step = np.arange(steps)[:, None]
        ids = np.where(step < slots.remaining, (slots.tokens + step + 1) % TINY.vocab_size, -1)
        return cache, Sampled(ids, np.zeros(ids.shape, np.float32))


@contextlib.asynccontextmanager
async def running(shapes: EngineShapes = SHAPES):
    """A backend over a :class:`CountingEngine`, and the engine."""
    engine = CountingEngine(shapes)
    params = tiny_params()

    class Counting(JetStreamBackend):
        def make_scheduler(self):
            return Scheduler(engine, engine.load_params(params), version=1)

    backend = Counting(TINY, params, shapes, version=1)
    await backend.start()
    try:
        yield backend, engine
    finally:
        engine.gate.open()
        await backend.close()


def request(name: str, *, max_tokens: int = 4, prompt=(5, 6, 7)) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling)


async def started(action) -> asyncio.Task:
    """A task that has run up to its first wait."""
    task = asyncio.create_task(action)
    await asyncio.sleep(0)
    return task


async def soon(task):
    """Its result; what would hang fails."""
    return await asyncio.wait_for(task, 30)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version=version, kind="arrays", payload=tiny_params(version))


# --- the end of the thread ------------------------------------------------------------------------


async def test_all_who_wait_are_told_when_the_engine_dies():
    async with running() as (backend, engine):
        waiting = [await started(backend.generate(request("r", max_tokens=40)))]
        await engine.gate.reached()
        waiting += [
            await started(call)
            for call in (
                backend.pause(PauseMode.WAIT),
                backend.metrics(),
                backend.update_weights(update(2)),
            )
        ]
        health = await started(backend.health())
        engine.broken = RuntimeError("out of memory")
        engine.gate.open()
        for task in waiting:
            with raises(
                EngineDiedError, key="the engine died", value="RuntimeError: out of memory"
            ):
                await soon(task)
        assert not (await soon(health)).ok
        with pytest.raises(EngineDiedError):
            await soon(backend.metrics())


async def test_a_drain_that_the_thread_knows_of_is_told_when_the_engine_dies():
    async with running() as (backend, engine):
        running_one = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        pausing = await started(backend.pause(PauseMode.WAIT))
        engine.gate.let_one_pass()
        await engine.gate.reached()  # commands that came before were taken
        engine.broken = RuntimeError("out of memory")
        engine.gate.open()
        for task in (running_one, pausing):
            with pytest.raises(EngineDiedError):
                await soon(task)


async def test_all_who_wait_are_told_when_the_backend_is_closed():
    async with running() as (backend, engine):
        waiting = [await started(backend.generate(request("r", max_tokens=40)))]
        await engine.gate.reached()
        waiting += [
            await started(call) for call in (backend.pause(PauseMode.WAIT), backend.metrics())
        ]
        closing = await started(backend.close())
        engine.gate.open()
        for task in waiting:
            with pytest.raises(BackendClosedError):
                await soon(task)
        await closing


async def test_calls_made_while_an_engine_starts_are_told_when_it_cannot():
    gate = Gate()

    class Failing:
        def set_up(self):
            gate.passed()
            raise RuntimeError("no device")

        def has_work(self):
            return False

        def step(self):
            pass

    thread = EngineThread(on_end=lambda error: None)
    starting = await started(thread.start(Failing()))
    await gate.reached()
    call = await started(thread.call(lambda: 1))
    gate.open()
    with pytest.raises(RuntimeError, match="no device"):
        await soon(starting)
    with raises(EngineDiedError, value="no device"):
        await soon(call)


async def test_a_cancelled_request_stays_cancelled_when_its_engine_is_dead():
    earlier_threads = set(threading.enumerate())
    async with running() as (backend, engine):
        task = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        engine.broken = RuntimeError("out of memory")
        engine.gate.open()
        started_threads = set(threading.enumerate()) - earlier_threads
        (thread,) = (each for each in started_threads if each.name == THREAD_NAME)
        thread.join(30)  # blocks the loop, so that this side has not heard of its end
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(task)


# --- pauses ---------------------------------------------------------------------------------------


async def test_a_cancelled_wait_leaves_the_engine_running():
    async with running() as (backend, engine):
        task = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        pausing = await started(backend.pause(PauseMode.WAIT))
        engine.gate.let_one_pass()
        await engine.gate.reached()
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        engine.gate.open()
        assert len((await soon(task)).token_ids) == 40
        assert len((await soon(backend.generate(request("after")))).token_ids) == 4


async def test_resume_ends_a_pause_that_still_waits():
    async with running() as (backend, engine):
        task = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        pausing = await started(backend.pause(PauseMode.WAIT))
        resuming = await started(backend.resume())
        engine.gate.open()
        await soon(resuming)
        with raises(BackendError, value="resume()"):
            await soon(pausing)
        assert len((await soon(task)).token_ids) == 40
        assert len((await soon(backend.generate(request("after")))).token_ids) == 4


async def test_two_who_wait_are_both_told_and_one_may_leave():
    async with running() as (backend, engine):
        task = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        first, second, third = [await started(backend.pause(PauseMode.WAIT)) for _ in range(3)]
        third.cancel()
        engine.gate.open()
        await soon(first)
        await soon(second)
        assert task.done() or len((await soon(task)).token_ids) == 40
        held = await started(backend.generate(request("held")))
        assert (await backend.health()).waiting == 1
        assert not held.done()
        await backend.resume()
        assert len((await soon(held)).token_ids) == 4


async def test_waiting_lets_frozen_requests_finish():
    async with running() as (backend, engine):
        task = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        freezing = await started(backend.pause(PauseMode.KEEP))
        engine.gate.open()
        await soon(freezing)
        assert (await backend.health()).running == 1
        await soon(backend.pause(PauseMode.WAIT))
        assert len((await soon(task)).token_ids) == 40
        held = await started(backend.generate(request("held")))
        assert (await backend.health()).waiting == 1
        await backend.resume()
        await soon(held)


async def test_freezing_what_another_pause_waits_for_ends_that_pause():
    async with running() as (backend, engine):
        task = await started(backend.generate(request("r", max_tokens=40)))
        await engine.gate.reached()
        pausing = await started(backend.pause(PauseMode.WAIT))
        freezing = await started(backend.pause(PauseMode.KEEP))
        engine.gate.open()
        await soon(freezing)
        with raises(BackendError, value="pause(keep)"):
            await soon(pausing)
        assert (await backend.health()).running == 1
        await backend.resume()
        assert len((await soon(task)).token_ids) == 40


@pytest.mark.parametrize("way", ["pause", "sleep"])
async def test_who_was_preempted_is_ended_with_those_who_run(way: str):
    small = replace(SHAPES, kv_cache_tokens=160)
    async with running(small) as (backend, engine):
        tasks = [
            await started(
                backend.generate(request(f"r{i}", prompt=range(5 + i, 25 + i), max_tokens=40))
            )
            for i in range(3)
        ]
        scheduler = backend.core.scheduler
        await engine.gate.reached()
        while not any(run.num_preempted for _, run in scheduler.queue):
            engine.gate.let_one_pass()
            await engine.gate.reached()
        late = await started(backend.generate(request("late")))
        ending = await started(
            backend.pause(PauseMode.ABORT) if way == "pause" else backend.sleep()
        )
        engine.gate.open()
        await soon(ending)
        outputs = [await soon(task) for task in tasks]
        assert [output.stop_reason for output in outputs] == [StopReason.ABORTED] * 3
        assert all(0 < len(output.token_ids) < 40 for output in outputs)
        assert outputs[2].num_preempted
        assert (await backend.health()).waiting == 1
        assert not late.done()
        await (backend.resume() if way == "pause" else backend.wake())
        assert len((await soon(late)).token_ids) == 4


async def test_pause_wait_waits_for_who_was_preempted():
    small = replace(SHAPES, kv_cache_tokens=160)
    async with running(small) as (backend, engine):
        tasks = [
            await started(
                backend.generate(request(f"r{i}", prompt=range(5 + i, 25 + i), max_tokens=40))
            )
            for i in range(3)
        ]
        scheduler = backend.core.scheduler
        await engine.gate.reached()
        while not any(run.num_preempted for _, run in scheduler.queue):
            engine.gate.let_one_pass()
            await engine.gate.reached()
        late = await started(backend.generate(request("late")))
        pausing = await started(backend.pause(PauseMode.WAIT))
        engine.gate.open()
        await soon(pausing)
        assert not scheduler.started
        assert (await backend.health()).waiting == 1
        assert not late.done()
        outputs = [await soon(task) for task in tasks]
        assert [len(output.token_ids) for output in outputs] == [40] * 3
        assert outputs[2].num_preempted
        await backend.resume()
        assert len((await soon(late)).token_ids) == 4


# --- requests and weights -------------------------------------------------------------------------


async def test_an_id_used_again_gets_its_own_output():
    async with running() as (backend, engine):
        old = await started(backend.generate(request("same", max_tokens=40)))
        await engine.gate.reached()
        old.cancel()
        with pytest.raises(asyncio.CancelledError):
            await old
        again = await started(backend.generate(request("same", prompt=(9, 9))))
        engine.gate.open()
        assert (await soon(again)).token_ids == (10, 11, 12, 13)


async def test_an_update_that_fails_early_leaves_the_old_weights_serving():
    async with running() as (backend, engine):
        engine.gate.open()
        engine.gives_up_old_weights = False
        engine.refusal = RuntimeError("out of memory")
        with raises(WeightUpdateError, value=("out of memory", "version 1")):
            await backend.update_weights(update(2))
        output = await soon(backend.generate(request("r")))
        assert set(output.policy_versions) == {1}
        assert (await backend.health()).ok


async def test_an_engine_that_lost_its_weights_serves_nothing_until_others_come():
    async with running() as (backend, engine):
        live = await started(backend.generate(request("live", max_tokens=40)))
        await engine.gate.reached()
        freezing = await started(backend.pause(PauseMode.KEEP))
        engine.gate.open()
        await soon(freezing)
        engine.refusal = RuntimeError("out of memory")
        with raises(WeightUpdateError, value=("version 2", "out of memory"), fix="a whole update"):
            await backend.update_weights(update(2))
        with raises(EngineDiedError, fix="a whole update"):
            await soon(live)
        await backend.resume()
        health = await backend.health()
        assert not health.ok
        assert "out of memory" in health.detail
        assert health.policy_version == 1
        for refused in (backend.generate(request("r")), backend.sleep()):
            with raises(EngineDiedError, fix="a whole update"):
                await soon(refused)
        engine.refusal = None
        await backend.update_weights(update(2))
        output = await soon(backend.generate(request("r")))
        health = await backend.health()
        assert set(output.policy_versions) == {2}
        assert (
            health.ok,
            health.running,
            health.waiting,
        ) == (True, 0, 0)


async def test_requests_wait_while_weights_make_room_for_new_ones():
    async with running() as (backend, engine):
        live = await started(backend.generate(request("live", max_tokens=8)))
        await engine.gate.reached()
        freezing = await started(backend.pause(PauseMode.KEEP))
        engine.gate.open()
        await soon(freezing)
        old = await asyncio.to_thread(backend.give_up_weights, 2)
        assert old is backend.core.scheduler.params
        assert await asyncio.to_thread(backend.give_up_weights, 2) is None
        old.delete()
        health = await backend.health()
        assert (health.ok, health.detail, health.running) == (True, "taking weights", 1)
        later = await started(backend.generate(request("later")))
        await backend.update_weights(update(2))
        await backend.resume()
        assert set((await soon(live)).policy_versions) == {1, 2}
        assert set((await soon(later)).policy_versions) == {2}
        assert (await backend.health()).ok


async def test_a_pause_that_ends_without_the_new_weights_fails_all_requests():
    async with running() as (backend, engine):
        engine.gate.open()
        await backend.pause(PauseMode.KEEP)
        waiting = await started(backend.generate(request("r")))
        await asyncio.to_thread(backend.give_up_weights, 2)
        await backend.resume()
        for refused in (waiting, backend.generate(request("later"))):
            with raises(EngineDiedError, value=("version 1", "version 2"), fix="a whole update"):
                await soon(refused)
        assert not (await backend.health()).ok
        assert backend.core.scheduler.params.is_deleted(), "the next version needs the memory"
        await backend.update_weights(update(3))
        assert set((await soon(backend.generate(request("r")))).policy_versions) == {3}


@pytest.mark.parametrize("drains", [False, True])
def test_an_engine_that_is_not_paused_returns_its_requests_with_its_weights(drains):
    engine = CountingEngine(SHAPES)
    engine.gate.open()
    drained = []
    thread = SimpleNamespace(
        call_soon=lambda function, *args: function(*args),
        settle=lambda future, *_: drained.append(future),
    )
    core = EngineCore(
        thread,  # type: ignore[arg-type]
        lambda: Scheduler(engine, engine.load_params(tiny_params()), version=1),  # type: ignore[arg-type]
        SimpleNamespace(check=lambda *_: None),  # type: ignore[arg-type]
        version=1,
    )
    core.set_up()
    sinks = [asyncio.Queue() for _ in range(5)]  # two more than slots
    for number, sink in enumerate(sinks):
        core.submit(request(f"r{number}", max_tokens=40), None, None, sink)
    core.step()
    if drains:
        core.drain("a pause")  # type: ignore[arg-type]

    core.give_up_weights(2).delete()
    core.step()
    reasons = []
    for sink in sinks:
        while not sink.empty():
            chunk = sink.get_nowait()
        reasons.append(chunk.final.stop_reason)
    assert reasons == [StopReason.ABORTED] * 5
    assert drained == (["a pause"] if drains else [])

    core.submit(request("later"), None, None, sinks[0])
    with raises(EngineDiedError, value=("version 1", "version 2"), fix="a whole update"):
        raise sinks[0].get_nowait()
    assert not core.health().ok
    core.update_weights(update(2))
    core.resume()
    core.submit(request("later"), None, None, sinks[0])
    core.step()
    assert set(sinks[0].get_nowait().final.policy_versions) == {2}


def test_a_model_with_too_many_eos_ids_is_refused_before_it_serves():
    engine = CountingEngine(SHAPES)
    engine.config = replace(TINY, eos_token_ids=tuple(range(2, 11)))
    with raises(ModelError, key="eos_token_id", value="9 ids", fix="leave out"):
        Scheduler(engine, engine.load_params(tiny_params()))
