"""An engine with continuous batching in virtual time: its timing is realistic, its ids are not.

All slots advance together, one id per step; a step takes ``step_seconds`` plus ``slot_seconds`` for
each slot in use. So a request finishes when the engine has made as many steps as the request has
ids to sample and prompt chunks to compute, and a single timer, for the request that finishes next,
drives the simulation. With a KV cache of limited size, requests also wait for space, and prompts
stall all slots.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jax_agent_rl.errors import BackendClosedError, BackendError
from jax_agent_rl.jetstream.admission import Patience, ReturnTimes
from jax_agent_rl.jetstream.block_manager import BlockManager
from jax_agent_rl.jetstream.shapes import page_size
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    WeightUpdate,
)
from jax_agent_rl.rollout.routing import PrefixIndex
from jax_agent_rl.testing.fakes import FakeBackend
from jax_agent_rl.testing.simulate.workload import ID, EngineSpeed, KVCacheSize
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput, digest_ids


@dataclass(eq=False, kw_only=True, slots=True)
class _Run:
    """A request inside the engine."""

    request: GenerateRequest
    result: asyncio.Future[TokenOutput]
    context: int = 0
    first_step: float = 0.0  # the engine's steps when the prompt was computed
    last_step: float | None = None  # its steps at the last id; None while it waits for a slot
    cached: int = 0
    versions: list[int] = field(default_factory=list)

    def sampled(self, steps: float) -> int:
        """Return the number of ids sampled after so many steps of the engine."""
        count = int(steps - self.first_step + 1e-6)
        return max(0, min(self.request.sampling.max_tokens, count))


class SimulatedEngine(FakeBackend):
    """An engine that samples ``max_tokens`` ids for every request.

    Args:
        max_model_len: longest context, in ids.
        kv_cache: size of the KV cache; None has no limit.
    """

    name = "simulated engine"

    def __init__(
        self,
        speed: EngineSpeed,
        *,
        max_model_len: int,
        kv_cache: KVCacheSize | None = None,
        version: int = 0,
    ) -> None:
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
        super().__init__(capabilities, version=version)
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Run] = {}
        self._by_end: list[tuple[float, int, _Run]] = []  # a heap; finished requests are skipped
        self._waiting: list[_Run] = []  # by priority, then arrival
        self._cache = UnlimitedKVCache()
        if kv_cache is not None:
            self._cache = PagedKVCache(kv_cache, max_model_len=max_model_len, clock=self._loop.time)
        self._steps = 0.0
        self._stall = 0.0  # seconds of prefill and copying still to come, without decoding
        self._time = self._loop.time()  # of the latest event
        self._timer: asyncio.TimerHandle | None = None
        self._number = itertools.count()
        self._paused = False
        self._drains: list[asyncio.Future[None]] = []  # one per pause that waits for requests
        self._sampled = 0
        self._prefilled = 0
        self._reused = 0
        self._finished = 0
        self._busy = 0.0
        self._loading = 0.0

    async def close(self) -> None:
        self.closed = True
        for run in [*self._running.values(), *self._waiting]:
            if not run.result.done():
                run.result.set_exception(BackendClosedError("the simulated engine is closed"))

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        self.require_open()
        run = _Run(request=request, result=self._loop.create_future())
        bisect.insort(self._waiting, run, key=lambda run: run.request.priority)
        if request.session_id is not None:
            self._cache.come_back(request.session_id)
        self._advance()
        self._admit()
        try:
            return await run.result
        finally:
            is_running = self._running.get(request.request_id) is run
            if is_running or run in self._waiting:  # the caller was cancelled
                self._advance()
                if run.last_step is not None:
                    self._cache.release(run.context, request, (), session_ends=False)
                self._remove(run)
                self._admit()

    async def abort(self, request_id: str) -> bool:
        self._advance()
        for run in [*self._running.values(), *self._waiting]:
            if run.request.request_id == request_id:
                self._end(run, StopReason.ABORTED)
                return True
        return False

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
        self._paused = False  # requests that another pause froze finish as well
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
                error = BackendError("resume() came before what this pause waited for had ended")
                drained.set_exception(error)
        self._drains.clear()
        self._admit()

    async def update_weights(self, update: WeightUpdate) -> None:
        await asyncio.sleep(self._speed.load_seconds)
        self._advance()
        for run in self._running.values():
            # The ids sampled so far are of the old weights.
            new_ids = run.sampled(self._steps) - len(run.versions)
            run.versions += [self._version] * new_ids
        self._version = update.version
        await self.reset_prefix_cache()
        self._loading += self._speed.load_seconds

    async def reset_prefix_cache(self) -> None:
        self._cache.reset()

    async def health(self) -> Health:
        return Health(
            ok=not self.closed,
            policy_version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
        )

    async def metrics(self) -> BackendMetrics:
        return self.read()

    def read(self) -> BackendMetrics:
        """Return the current metrics."""
        self._advance()
        in_progress = sum(run.sampled(self._steps) for run in self._running.values())
        return BackendMetrics(
            generated_tokens=self._sampled + in_progress,
            prefill_tokens=self._prefilled,
            cached_tokens=self._reused,
            requests_finished=self._finished,
            busy_seconds=self._busy,
            weight_update_seconds=self._loading,
        )

    # --- time -------------------------------------------------------------------------------------

    @property
    def _step_seconds(self) -> float:
        """Current duration of a step."""
        return self._speed.step_seconds + self._speed.slot_seconds * len(self._running)

    def _advance(self) -> None:
        """Account for the steps since the last event."""
        now = self._loop.time()
        if self._running and not self._paused:
            elapsed = now - self._time
            stalled = min(self._stall, elapsed)
            self._stall -= stalled
            self._steps += (elapsed - stalled) / self._step_seconds
            self._busy += elapsed
        self._time = now

    def _admit(self) -> None:
        """Give free slots to waiting requests; call :meth:`_advance` first."""
        while (
            self._waiting
            and len(self._running) < self._speed.slots
            and not self._paused
            and not self._drains
        ):
            admitted = self._cache.admit([run.request for run in self._waiting], len(self._running))
            if admitted is None:
                break
            request, context, cached, stall = admitted
            run = next(run for run in self._waiting if run.request is request)
            self._waiting.remove(run)

            run.context = context
            run.cached = cached
            computed = len(request.prompt_ids) - cached
            self._stall += stall
            self._prefilled += computed
            self._reused += cached
            run.first_step = self._steps + computed / self._speed.prefill_tokens_per_step
            run.last_step = run.first_step + request.sampling.max_tokens
            self._running[request.request_id] = run
            heapq.heappush(self._by_end, (run.last_step, next(self._number), run))
        self._schedule()

    def _schedule(self) -> None:
        """Set the timer for the request that finishes next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._by_end:
            last_step, _, run = self._by_end[0]
            if run.result.done():
                heapq.heappop(self._by_end)
                continue
            if not self._paused:
                decode_seconds = max(0.0, last_step - self._steps) * self._step_seconds
                self._timer = self._loop.call_later(self._stall + decode_seconds, self._on_timer)
            return

    def _on_timer(self) -> None:
        self._advance()
        while self._by_end:
            last_step, _, run = self._by_end[0]
            if not run.result.done() and last_step > self._steps + 1e-6:
                break
            heapq.heappop(self._by_end)
            self._end(run, StopReason.LENGTH)
        self._admit()

    def _end(self, run: _Run, reason: StopReason) -> None:
        """Finish a request and free its slot."""
        if run.result.done():  # its caller was cancelled
            return

        request = run.request
        is_aborted = reason is StopReason.ABORTED
        if run.last_step is None:
            count = 0
        elif is_aborted:
            count = run.sampled(self._steps)
        else:
            count = request.sampling.max_tokens
        self._sampled += count
        self._finished += 1

        # Each session samples another id, so that sessions share no more than their prompts.
        session = request.session_id or request.request_id
        sampled_id = ID + 1 + zlib.crc32(session.encode()) % 2**30
        sampled = (sampled_id,) * count
        if run.last_step is not None:
            session_ends = request.session_ends and not is_aborted
            self._cache.release(run.context, request, sampled, session_ends=session_ends)
        run.versions += [self._version] * (count - len(run.versions))
        run.result.set_result(
            TokenOutput(
                token_ids=sampled,
                log_probs=(0.0,) * count,
                policy_versions=tuple(run.versions),
                stop_reason=reason,
                context_digest=digest_ids((*request.prompt_ids, *sampled)),
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


# --- KV caches: one without limit, and the JAX engine's own block manager without a device --------

Admission = tuple[GenerateRequest, int, int, float]
"""What a KV cache admits.

A request, the number of its context, the number of its prompt ids found in the cache, and the
seconds in which no slot decodes.
"""


class UnlimitedKVCache:
    """Keeps every context, and recognizes prompts by their blocks."""

    def __init__(self) -> None:
        self._contexts: dict[str, int] = {}  # cached ids by session
        self._prompts = PrefixIndex()

    def admit(self, queue: Sequence[GenerateRequest], running: int) -> Admission | None:
        """Return the request of the queue to run next, and what it finds; None if none can run."""
        request = queue[0]
        block_hashes = PrefixIndex.block_hashes(request.prompt_ids)
        of_session = self._contexts.get(request.session_id or "", 0)
        _, of_other_prompts = self._prompts.find(block_hashes)
        self._prompts.add(block_hashes, "here")
        # The last id is always computed: the first sampled one comes from it.
        cached = min(max(of_session, of_other_prompts), len(request.prompt_ids) - 1)
        return request, 0, cached, 0.0

    def release(
        self, context: int, request: GenerateRequest, sampled: Sequence[int], *, session_ends: bool
    ) -> None:
        """End a request that has sampled these ids."""
        if request.session_id is not None:
            self._contexts[request.session_id] = len(request.prompt_ids) + len(sampled)
            if session_ends:
                del self._contexts[request.session_id]

    def come_back(self, session: str) -> None:
        """Do nothing: no session needs more care than another."""

    def reset(self) -> None:
        self._contexts.clear()
        self._prompts.clear()


class PagedKVCache:
    """The block manager of the JAX engine, as its scheduler uses it.

    Args:
        max_model_len: longest context, in ids.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, size: KVCacheSize, *, max_model_len: int, clock: Callable[[], float]
    ) -> None:
        page = page_size(max_model_len)
        self._size = size
        self._page = page
        self._returns = ReturnTimes(clock)
        self._patience = Patience(clock)
        return_rate: Callable[[str], float] = lambda session: 0.0  # noqa: E731
        if size.policy == "expected_return":
            self._patience.add_prefill(1, size.prefill_seconds)
            return_rate = self._returns.rate
        self._blocks = BlockManager(
            size.tokens // page,
            page,
            math.ceil(max_model_len / page),
            host_pages=size.offloading_tokens // page,
            return_rate=return_rate,
        )

    def admit(self, queue: Sequence[GenerateRequest], running: int) -> Admission | None:
        """Admit the first request, or one that overtakes it because the cache holds its KV.

        It returns the same as :meth:`UnlimitedKVCache.admit`.
        """
        first = queue[0]
        cost = self._patience.cost(first.request_id, len(first.prompt_ids), running)
        admission = self._allocate(first, cost)
        if admission is not None or not cost:
            return admission

        for request in queue[1:]:
            holds_most = self._blocks.holds_most(request.session_id, len(request.prompt_ids))
            if request.priority == first.priority and holds_most:
                admission = self._allocate(request, cost)
                if admission is not None:
                    return admission
        return None

    def _allocate(self, request: GenerateRequest, cost: float) -> Admission | None:
        prompt = request.prompt_ids
        allocation = self._blocks.allocate(prompt, request.session_id, recompute_cost=cost)
        if allocation is None:
            return None
        self._blocks.append(allocation.context, prompt[allocation.reused : -1])
        if not self._blocks.grow(allocation.context, request.sampling.max_tokens):
            self._blocks.free(allocation.context, session_ends=False)
            return None

        self._blocks.saved.clear()  # there is nothing to copy
        prefill_seconds = (len(prompt) - allocation.reused) * self._size.prefill_seconds
        restored_ids = len(allocation.restored) * self._page
        restore_seconds = restored_ids * self._size.restore_seconds
        return request, allocation.context, allocation.reused, prefill_seconds + restore_seconds

    def release(
        self, context: int, request: GenerateRequest, sampled: Sequence[int], *, session_ends: bool
    ) -> None:
        """End a request that has sampled these ids."""
        if sampled:
            self._blocks.append(context, [request.prompt_ids[-1], *sampled[:-1]])
        self._blocks.free(context, session_ends=session_ends)
        if request.session_id is None:
            return
        if session_ends:
            self._returns.forget(request.session_id)
        else:
            self._returns.leave(request.session_id)

    def come_back(self, session: str) -> None:
        """Note that a session's next request is queued."""
        self._returns.come_back(session)

    def reset(self) -> None:
        self._blocks.reset()
