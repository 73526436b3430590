"""An engine without a model that batches continuously: one id per running request and tick."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from abc import abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    PromptTooLongError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.testing.fakes import FakeBackend
from jax_agent_rl.types import PauseMode, StopReason, Support, TokenOutput, digest_ids


@dataclass(eq=False)
class Run:
    """A request inside a :class:`BatchingEngine`."""

    request: GenerateRequest
    seed: int
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[Support | None] = field(default_factory=list)
    events: asyncio.Queue[TokenChunk | Exception] = field(default_factory=asyncio.Queue)

    @property
    def context(self) -> list[int]:
        """Ids of the prompt and those sampled so far."""
        return [*self.request.prompt_ids, *self.ids]


class BatchingEngine(FakeBackend):
    """Continuous batching: every tick, each running request samples one id.

    A subclass brings the policy (:meth:`sample`, :meth:`load`).

    Args:
        version: policy version of the first weights.
        tick_seconds: pause before each step; 0 only yields to the event loop.
        eos: the id that ends a generation.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        version: int = 0,
        tick_seconds: float = 0.0,
        eos: int = 2,
    ) -> None:
        super().__init__(capabilities, version=version)
        self.running: dict[str, Run] = {}
        self.waiting: list[tuple[int, int, Run]] = []  # a heap by priority and arrival
        self._tick_seconds = tick_seconds
        self._eos = eos
        self._metrics = BackendMetrics()
        self._arrivals = itertools.count()
        self.frozen = False
        self._drains: list[object] = []  # one per pause that waits for running requests
        self._changed = asyncio.Event()
        self._responsive = asyncio.Event()
        self._responsive.set()
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def sample(self, run: Run) -> tuple[int, float]:
        """Sample the next id of a request and return it with its log-prob."""

    @abstractmethod
    async def load(self, update: WeightUpdate) -> None:
        """Install new weights, or raise WeightUpdateError and keep the old ones."""

    def stop_match(self, run: Run) -> str | None:
        """Return the newest id as text if it is a stop id, else None."""
        if run.ids and run.ids[-1] in run.request.sampling.stop_token_ids:
            return str(run.ids[-1])
        return None

    # --- requests ---------------------------------------------------------------------------------

    async def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name=self.name)

    async def close(self) -> None:
        self.closed = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for run in self._all():
            run.events.put_nowait(BackendClosedError(f"the {self.name} was closed"))

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self.chunks(request)) as chunks:  # type: ignore[type-var]
            *_, last = [chunk async for chunk in chunks]
        assert last.final is not None
        return last.final

    async def chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.check_request(request)
        seed = request.sampling.seed
        if seed is None:
            seed = 10**6 + next(self._arrivals)
        run = Run(request, seed=seed)
        priority = 0
        if self.capabilities.priorities:
            priority = request.priority
        heapq.heappush(self.waiting, (priority, next(self._arrivals), run))
        self._changed.set()
        try:
            while True:
                event = await run.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.final:
                    return
        finally:
            self.forget(run)

    def forget(self, run: Run) -> None:
        """Free the slot of a request."""
        self.running = {
            name: running for name, running in self.running.items() if running is not run
        }
        self.waiting = [item for item in self.waiting if item[2] is not run]
        heapq.heapify(self.waiting)

    async def abort(self, request_id: str) -> bool:
        await self._responsive.wait()
        for run in self._all():
            if run.request.request_id == request_id:
                self.finish(run, StopReason.ABORTED)
                return True
        return False

    def check_request(self, request: GenerateRequest) -> None:
        """Refuse a request that cannot be served; subclasses add their own reasons."""
        self.require_open()
        length = len(request.prompt_ids)
        limit = self.capabilities.max_model_len
        if length >= limit:
            raise PromptTooLongError(
                f"a prompt of {length} ids leaves no room in max_model_len={limit}"
            )
        if any(run.request.request_id == request.request_id for run in self._all()):
            raise BackendError(f"request {request.request_id!r} is already running")

    def _all(self) -> list[Run]:
        waiting = [run for _, _, run in self.waiting]
        return [*self.running.values(), *waiting]

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            await self._responsive.wait()
            can_admit = self.waiting and not self._drains
            if self.frozen or not (self.running or can_admit):
                self._changed.clear()
                await self._changed.wait()
                continue

            while (
                self.waiting
                and len(self.running) < self.capabilities.max_concurrent
                and not self._drains
            ):
                _, _, run = heapq.heappop(self.waiting)
                self.admit(run)
            for run in list(self.running.values()):
                self.step(run)

    def admit(self, run: Run) -> None:
        """Give a slot to a waiting request."""
        self.running[run.request.request_id] = run

    def step(self, run: Run) -> None:
        """Sample one id of a request, and finish the request if the id ends it."""
        token, log_prob = self.sample(run)
        run.ids.append(token)
        run.log_probs.append(log_prob)
        run.versions.append(self._version)
        self._count(generated_tokens=1)

        reason = self.reason(run)
        if reason is not None:
            self.finish(run, reason)
            return
        chunk = TokenChunk(
            token_ids=(token,),
            log_probs=(log_prob,),
            policy_versions=(self._version,),
            supports=tuple(run.supports[-1:]),
        )
        run.events.put_nowait(chunk)

    def reason(self, run: Run) -> StopReason | None:
        """Return why the newest id ends the request; None if it does not."""
        sampling = run.request.sampling
        if run.ids[-1] == self._eos and not sampling.ignore_eos:
            return StopReason.EOS
        if self.stop_match(run):
            return StopReason.STOP
        context_len = len(run.request.prompt_ids) + len(run.ids)
        if context_len >= self.capabilities.max_model_len or len(run.ids) >= sampling.max_tokens:
            return StopReason.LENGTH
        return None

    def output(self, run: Run, reason: StopReason) -> TokenOutput:
        """Build the final output of a request."""
        stop_match = None
        if reason is StopReason.STOP:
            stop_match = self.stop_match(run)
        return TokenOutput(
            token_ids=tuple(run.ids),
            log_probs=tuple(run.log_probs),
            policy_versions=tuple(run.versions),
            stop_reason=reason,
            stop_match=stop_match,
            context_digest=digest_ids(run.context),
            cached_tokens=run.cached,
            supports=tuple(run.supports),
        )

    def finish(self, run: Run, reason: StopReason) -> None:
        """Free the slot of a request and send its last chunk."""
        self.forget(run)
        self._count(requests_finished=1)
        output = self.output(run, reason)
        last = slice(-1, None)
        if reason is StopReason.ABORTED:  # an abort samples no id
            last = slice(len(output.token_ids), None)
        run.events.put_nowait(
            TokenChunk(
                token_ids=output.token_ids[last],
                log_probs=output.log_probs[last],
                policy_versions=output.policy_versions[last],
                supports=output.supports[last],
                final=output,
            )
        )

    def _count(self, **increments: int) -> None:
        """Add to counters of the metrics, by name."""
        counters = {}
        for name, increment in increments.items():
            counters[name] = getattr(self._metrics, name) + increment
        self._metrics = replace(self._metrics, **counters)

    # --- control ----------------------------------------------------------------------------------

    def hang(self, hung: bool) -> None:
        """Stop answering requests and commands, as if the device were stuck, or continue."""
        if hung:
            self._responsive.clear()
        else:
            self._responsive.set()

    async def pause(self, mode: PauseMode) -> None:
        if mode not in self.capabilities.pause_modes:
            raise NotImplementedError(f"the {self.name} does not pause with mode {mode}")
        await self._responsive.wait()
        if mode is PauseMode.ABORT:
            for run in list(self.running.values()):
                self.finish(run, StopReason.ABORTED)
        if mode is PauseMode.WAIT:
            await self._drain()
        self.frozen = True

    async def _drain(self) -> None:
        drain = object()
        self._drains.append(drain)
        self.frozen = False
        self._changed.set()
        try:
            while self.running:
                await asyncio.sleep(0)
                if drain not in self._drains:
                    raise BackendError("resume() came before what this pause waited for had ended")
        finally:
            self._drains = [waiting for waiting in self._drains if waiting is not drain]
            self._changed.set()

    async def resume(self) -> None:
        await self._responsive.wait()
        self.frozen = False
        self._drains.clear()
        self._changed.set()

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._responsive.wait()
        if update.kind not in self.capabilities.weight_payloads:
            raise WeightUpdateError(
                f"the {self.name} does not take weights of kind {update.kind!r}"
            )
        if update.partial and not self.capabilities.partial_update:
            raise WeightUpdateError(f"the {self.name} does not take partial updates")
        update.require_newer(self._version)
        await self.load(update)
        self._version = update.version
        await self.reset_prefix_cache()

    async def health(self) -> Health:
        detail = ""
        if self.closed:
            detail = "closed"
        return Health(
            ok=not self.closed,
            detail=detail,
            policy_version=self._version,
            running=len(self.running),
            waiting=len(self.waiting),
        )

    async def metrics(self) -> BackendMetrics:
        return self._metrics
