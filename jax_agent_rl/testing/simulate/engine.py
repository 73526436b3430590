"""An engine with continuous batching in virtual time: its timing is realistic, its ids are not.

All slots advance together, one id per step; a step takes ``step_seconds`` plus ``slot_seconds`` for each slot in use.
So a request finishes when the engine has made as many steps as the request has ids to sample and prompt chunks to
compute, and a single timer, for the request that finishes next, drives the simulation. With a KV cache of limited size,
requests also wait for space, and prompts stall all slots.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import zlib
from dataclasses import dataclass, field

from jax_agent_rl.errors import BackendClosedError, BackendError
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    WeightUpdate,
)
from jax_agent_rl.testing.fakes import FakeBackend
from jax_agent_rl.testing.simulate.kv_cache import KVCacheSize, PagedKVCache, UnlimitedKVCache
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput, digest_ids

ID = 1
"""The id that tools return. Simulated engines sample another one for each session."""


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """Speed of an engine.

    Attributes:
        slots: requests decoded concurrently.
        step_seconds: duration of a decode step of an empty batch: the time to read the weights.
        slot_seconds: time that each slot in use adds to a step.
        prefill_tokens_per_step: prompt ids that a slot computes in the time of a step.
        load_seconds: time to load new weights.
    """

    slots: int
    step_seconds: float
    slot_seconds: float = 0.0
    prefill_tokens_per_step: int = 512
    load_seconds: float = 0.0


@dataclass(eq=False, kw_only=True, slots=True)
class _Run:
    """A request inside the engine."""

    request: GenerateRequest
    done: asyncio.Future[TokenOutput]
    context: int = 0
    began: float = 0.0  # the engine's steps when the prompt was computed
    end: float | None = None  # the engine's steps at the last id; None while it waits for a slot
    cached: int = 0
    versions: list[int] = field(default_factory=list)

    def sampled(self, steps: float) -> int:
        """Return the number of ids sampled after so many steps of the engine."""
        return max(0, min(self.request.sampling.max_tokens, int(steps - self.began + 1e-6)))


class SimulatedEngine(FakeBackend):
    """An engine that samples ``max_tokens`` ids for every request.

    Args:
        speed: speed of the engine.
        max_model_len: longest context, in ids.
        kv_cache: size of the KV cache; None has no limit.
    """

    name = "simulated engine"

    def __init__(self, speed: EngineSpeed, *, max_model_len: int, kv_cache: KVCacheSize | None = None) -> None:
        capabilities = Capabilities(
            max_model_len=max_model_len,
            max_concurrent=speed.slots,
            streaming=False,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            prefix_reuse=True,
            priorities=True,
            weight_payloads=frozenset({"arrays"}),
        )
        super().__init__(capabilities)
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Run] = {}
        self._by_end: list[tuple[float, int, _Run]] = []  # a heap; finished requests are skipped
        self._waiting: list[_Run] = []  # by priority, then arrival
        self._cache = UnlimitedKVCache()
        if kv_cache is not None:
            self._cache = PagedKVCache(kv_cache, max_model_len=max_model_len, clock=self._loop.time)
        self._steps = self._stall = 0.0
        self._at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._number = itertools.count()
        self._paused = False
        self._drains: list[asyncio.Future[None]] = []  # one per pause that waits for running requests
        self._sampled = self._prefilled = self._reused = self._finished = 0
        self._busy = self._loading = 0.0

    async def close(self) -> None:
        self._closed = True
        for run in [*self._running.values(), *self._waiting]:
            if not run.done.done():
                run.done.set_exception(BackendClosedError("the simulated engine is closed"))

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        self.require_open()
        run = _Run(request=request, done=self._loop.create_future())
        bisect.insort(self._waiting, run, key=lambda run: run.request.priority)
        if request.session_id is not None:
            self._cache.come_back(request.session_id)
        self._advance()
        self._admit()
        try:
            return await run.done
        finally:
            if self._running.get(request.request_id) is run or run in self._waiting:  # the caller was cancelled
                self._advance()
                if run.end is not None:
                    self._cache.release(run.context, request, (), session_ends=False)
                self._remove(run)
                self._admit()

    async def abort(self, request_id: str) -> bool:
        self._advance()
        found = self._running.get(request_id)
        found = found or next((run for run in self._waiting if run.request.request_id == request_id), None)
        if found is None:
            return False
        self._end(found, StopReason.ABORTED)
        return True

    async def pause(self, mode: PauseMode) -> None:
        self._advance()
        if mode is PauseMode.ABORT:
            for run in list(self._running.values()):
                self._end(run, StopReason.ABORTED)
        elif mode is PauseMode.WAIT and self._running:
            await self._drain()
            return
        self._paused = True
        self._schedule()

    async def _drain(self) -> None:
        drained = self._loop.create_future()
        self._drains.append(drained)
        self._paused = False  # frozen requests finish, too
        self._schedule()
        try:
            await drained
        except asyncio.CancelledError:
            self._drains = [other for other in self._drains if other is not drained]
            self._advance()
            self._admit()
            raise

    async def resume(self) -> None:
        self._advance()
        self._paused = False
        for drained in self._drains:
            if not drained.done():
                drained.set_exception(BackendError("resume() came before what this pause waited for had ended"))
        self._drains.clear()
        self._admit()

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._speed.load_seconds)
        self._advance()
        for run in self._running.values():  # ids sampled so far are of the old weights
            run.versions += [self._version] * (run.sampled(self._steps) - len(run.versions))
        self._version = update.version
        await self.reset_prefix_cache()
        self._loading += self._speed.load_seconds

    async def reset_prefix_cache(self) -> None:
        self._cache.reset()

    async def health(self) -> Health:
        running, waiting = len(self._running), len(self._waiting)
        return Health(ok=not self._closed, policy_version=self._version, running=running, waiting=waiting)

    async def metrics(self) -> BackendMetrics:
        return self.read()

    def read(self) -> BackendMetrics:
        """Return the current metrics."""
        self._advance()
        return BackendMetrics(
            generated_tokens=self._sampled + sum(run.sampled(self._steps) for run in self._running.values()),
            prefill_tokens=self._prefilled,
            cached_tokens=self._reused,
            requests_finished=self._finished,
            busy_seconds=self._busy,
            weight_update_seconds=self._loading,
        )

    # --- time -----------------------------------------------------------------------------------------------------

    @property
    def _pace(self) -> float:
        """Current duration of a step, in seconds."""
        return self._speed.step_seconds + self._speed.slot_seconds * len(self._running)

    def _advance(self) -> None:
        """Account for the steps since the last event."""
        now = self._loop.time()
        if self._running and not self._paused:
            stalled = min(self._stall, now - self._at)
            self._stall -= stalled
            self._steps += (now - self._at - stalled) / self._pace
            self._busy += now - self._at
        self._at = now

    def _admit(self) -> None:
        """Give free slots to waiting requests; call :meth:`_advance` first."""
        while self._waiting and len(self._running) < self._speed.slots and not self._paused and not self._drains:
            admitted = self._cache.admit([run.request for run in self._waiting], len(self._running))
            if admitted is None:
                break
            run = next(run for run in self._waiting if run.request is admitted[0])
            self._waiting.remove(run)
            run.context, run.cached, stall = admitted[1]
            length = len(run.request.prompt_ids)
            self._stall += stall
            self._prefilled += length - run.cached
            self._reused += run.cached
            run.began = self._steps + (length - run.cached) / self._speed.prefill_tokens_per_step
            run.end = run.began + run.request.sampling.max_tokens
            self._running[run.request.request_id] = run
            heapq.heappush(self._by_end, (run.end, next(self._number), run))
        self._schedule()

    def _schedule(self) -> None:
        """Set the timer for the request that finishes next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._by_end and self._by_end[0][2].done.done():
            heapq.heappop(self._by_end)
        if self._by_end and not self._paused:
            decoding = max(0.0, self._by_end[0][0] - self._steps) * self._pace
            self._timer = self._loop.call_later(self._stall + decoding, self._due)

    def _due(self) -> None:
        self._advance()
        while self._by_end and (self._by_end[0][2].done.done() or self._by_end[0][0] <= self._steps + 1e-6):
            run = heapq.heappop(self._by_end)[2]
            if not run.done.done():
                self._end(run, StopReason.LENGTH)
        self._admit()

    def _end(self, run: _Run, reason: StopReason) -> None:
        """Finish a request and free its slot."""
        if run.done.done():  # its caller was cancelled
            return
        aborted = reason is StopReason.ABORTED
        count = run.sampled(self._steps) if aborted else run.request.sampling.max_tokens
        if run.end is None:
            count = 0
        self._sampled += count
        self._finished += 1
        session = run.request.session_id or run.request.request_id  # sessions share no more than their prompts
        sampled = (ID + 1 + zlib.crc32(session.encode()) % 2**30,) * count
        if run.end is not None:
            self._cache.release(
                run.context, run.request, sampled, session_ends=run.request.session_ends and not aborted
            )
        run.versions += [self._version] * (count - len(run.versions))
        run.done.set_result(
            TokenOutput(
                token_ids=sampled,
                log_probs=(0.0,) * count,
                policy_versions=tuple(run.versions),
                stop_reason=reason,
                context_digest=digest_ids((*run.request.prompt_ids, *sampled)),
                cached_tokens=run.cached,
            )
        )
        self._remove(run)

    def _remove(self, run: _Run) -> None:
        if self._running.get(run.request.request_id) is run:
            del self._running[run.request.request_id]
        elif run in self._waiting:
            self._waiting.remove(run)
        if self._drains and not self._running:
            self._paused = True
            for drained in self._drains:
                if not drained.done():
                    drained.set_result(None)
            self._drains.clear()
