"""The engine's thread, and the state machine of requests, pauses and weight updates in it.

::

    asyncio side                                   the thread
    post(command), call(function) ─► commands ─►   each command, then one step of the core, again
        ▲                                             │
        └──── futures, one loop call a step ◄── settle, call_soon

Commands run between steps, so pauses, aborts and weight updates never interrupt one. The thread
sleeps on a condition while it has neither commands nor work. When it ends, every pending future
gets the reason. The core::

    serving ──pause(keep)──► frozen ──pause(wait)──┐
       │  ▲                    │                   ▼
       │  └──────resume────────┴──resume──── draining: started requests go on, no new is admitted
       └──────────pause(wait)──────────────────────┘ │ none runs any more
                                                     ▼
                                                  frozen, and pause(wait) returns
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, TypeVar

import jax

from jax_agent_rl.chat.grammar import GrammarState
from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    EngineDiedError,
    TrajectoryError,
    WeightUpdateError,
)
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.scheduler import Progress, Scheduler
from jax_agent_rl.jetstream.weights import ServedWeights, free_arrays
from jax_agent_rl.models.vision_context import MultimodalContext
from jax_agent_rl.rollout.protocol import (
    TAKING_WEIGHTS,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode, TokenScores

logger = logging.getLogger(__name__)
T = TypeVar("T")
BURST_GAP_SECONDS = 0.001
"""An idle engine starts once no request has come for this long."""
BURST_SECONDS = 0.02
"""An idle engine starts this long after the first request at the latest."""
THREAD_NAME = "jetstream-engine"
"""Name of an engine's thread."""
ChunkSink = asyncio.Queue[TokenChunk | Exception]
"""Output of one submission. Request ids may be reused, so they cannot identify it."""


class EngineThread:
    """The thread of the module docstring.

    Args:
        on_end: called on the asyncio side when the thread ends, with the reason.
    """

    def __init__(self, on_end: Callable[[BackendError], None]) -> None:
        self._on_end = on_end
        self._commands: deque[Callable[[], object]] = deque()
        self._promises: set[asyncio.Future] = set()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self.closing = False
        self._failure: str | None = None

    async def start(self, core: EngineCore) -> None:
        """Start the thread and wait until the core is set up; raise what that raises."""
        if self._thread is not None:
            raise BackendError("the backend was already started")
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(core, started), name=THREAD_NAME, daemon=True
        )
        self._thread.start()
        await started

    async def close(self) -> None:
        with self._wake:
            self.closing = True
            self._wake.notify()
        if self._thread is not None and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def post(self, command: Callable[[], object], promise: asyncio.Future | None = None) -> None:
        """Queue a command.

        Args:
            command: runs in the thread.
            promise: a future the command settles, now or later; fails if the thread ends first.

        Raises:
            EngineDiedError: the engine died.
            BackendClosedError: the backend is closed, or not started.
        """
        with self._wake:  # the thread also ends under this lock, so no command comes after its end
            if self._failure:
                raise EngineDiedError(self._failure)
            if self.closing:
                raise BackendClosedError("the backend is closed")
            if self._thread is None:
                raise BackendClosedError("the backend was not started: call start()")

            if promise is not None:
                self._promises.add(promise)
                promise.add_done_callback(self._promises.discard)
            self._commands.append(command)
            self._wake.notify()

    def call_and_wait(self, function: Callable[[], T]) -> T:
        """Run a function as :meth:`call` does, for a caller in another thread than the loop's."""
        if self._thread is None:
            raise BackendClosedError("the backend was not started: call start()")
        return asyncio.run_coroutine_threadsafe(self.call(function), self._loop).result()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, between steps, and return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:  # raised in the caller
                self.settle(future, error=error)
            else:
                self.settle(future, result)

        self.post(command, future)
        return await future

    # --- the thread -------------------------------------------------------------------------------

    def settle(
        self, future: asyncio.Future, result: Any = None, *, error: Exception | None = None
    ) -> None:
        """Settle a future of the asyncio side."""
        self.call_soon(_settle, future, result, error)

    def call_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function in the asyncio loop, unless the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the asyncio loop closed before the engine thread")

    def _run(self, core: EngineCore, started: asyncio.Future[None]) -> None:
        try:
            core.set_up()
        except Exception as error:
            self.settle(started, error=error)
            self._end(EngineDiedError(f"the engine could not start: {error}"))
            return
        self.settle(started)
        try:
            while self._serve_once(core):
                pass
        except Exception as error:  # the engine is lost, its callers must not hang
            logger.exception("the engine thread died")
            self._end(EngineDiedError(f"the engine died: {type(error).__name__}: {error}"))
        else:
            self._end(BackendClosedError("the backend was closed before this ended"))

    def _serve_once(self, core: EngineCore) -> bool:
        """Run commands, then one step; return False when closing."""
        with self._wake:
            if not (self.closing or self._commands or core.has_work()):
                self._wait_for_commands()
            if self.closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        core.step()
        return True

    def _wait_for_commands(self) -> None:
        """Sleep until a command comes, then until the burst of requests ends.

        Otherwise the first request of a burst would decode alone while the others wait for its
        dispatch.
        """
        while not (self.closing or self._commands):
            self._wake.wait()

        deadline = time.perf_counter() + BURST_SECONDS
        while not self.closing:
            another_came = self._wake.wait(BURST_GAP_SECONDS)
            if not another_came or time.perf_counter() >= deadline:
                return

    def _end(self, error: BackendError) -> None:
        with self._wake:
            if isinstance(error, EngineDiedError):
                self._failure = str(error)
            self._commands.clear()
        self.call_soon(self._fail_all, error)

    def _fail_all(self, error: BackendError) -> None:
        for promise in list(self._promises):
            _settle(promise, None, error)
        self._on_end(error)


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.done():  # the caller went away, or the thread ended first
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class _WeightState(Enum):
    """Whether an engine has weights."""

    SERVED = auto()
    EXPECTED = auto()
    """They were given up for new ones, for which requests wait."""
    LOST = auto()
    """Requests are refused until an update succeeds."""


class EngineCore:
    """The state machine of the module docstring. Everything here runs in the thread.

    Args:
        make_scheduler: makes the engine, compiled and with its first weights.
        weights: checks weight updates.
        version: policy version of the first weights.
    """

    def __init__(
        self,
        thread: EngineThread,
        make_scheduler: Callable[[], Scheduler],
        weights: ServedWeights,
        *,
        version: int,
    ) -> None:
        self._thread = thread
        self._make_scheduler = make_scheduler
        self._weights = weights
        self.version = version
        self._sinks: dict[RunningRequest, ChunkSink] = {}
        self._drains: list[asyncio.Future[None]] = []  # callers of pause(wait)
        self._paused = False
        self._asleep = False
        self._weight_state = _WeightState.SERVED
        self._why_no_weights = ""  # while they are not served

    def set_up(self) -> None:
        self.scheduler = self._make_scheduler()

    @property
    def _has_weights(self) -> bool:
        return self._weight_state is _WeightState.SERVED

    def has_work(self) -> bool:
        """Whether a step would do something without a command."""
        if self._asleep or not self._has_weights:
            return False
        if self._drains:
            return bool(self.scheduler.started)
        if self._paused:
            return False
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> None:
        if self.has_work():
            self._publish(self.scheduler.step(admit=not self._drains))
        self._end_drains()

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        request: GenerateRequest,
        multimodal: MultimodalContext | None,
        grammar: GrammarState | None,
        sink: ChunkSink,
    ) -> None:
        try:
            if self._weight_state is _WeightState.LOST:
                raise EngineDiedError(self._why_no_weights)
            run = self.scheduler.submit(request, multimodal, grammar)
            self._sinks[run] = sink
        except TrajectoryError as error:  # the request is at fault
            self._thread.call_soon(sink.put_nowait, error)
        except Exception as error:  # one request must not end the others
            logger.exception("request %r could not be queued", request.request_id)
            refusal = BackendError(
                f"request {request.request_id!r} cannot be taken: {type(error).__name__}: {error}"
            )
            self._thread.call_soon(sink.put_nowait, refusal)

    def score(self, run: Callable[[Scheduler], TokenScores]) -> TokenScores:
        """Return what ``run`` scores with the served weights.

        Raises:
            EngineDiedError: there are no weights.
        """
        if not self._has_weights:
            raise EngineDiedError(self._why_no_weights)
        return run(self.scheduler)

    def abort(self, request_id: str) -> bool:
        ended = self.scheduler.abort(request_id)
        if ended is not None:
            self._publish([ended])
        return ended is not None

    def _abort_started(self) -> None:
        for request_id in self.scheduler.started:
            self.abort(request_id)

    def _publish(self, progress: Progress) -> None:
        """Send chunks and errors to their sinks, in one call of the asyncio loop."""
        if not progress:
            return
        sinks = []
        events = []
        for run, event in progress:
            continues = isinstance(event, TokenChunk) and event.final is None
            sinks.append(self._sinks[run] if continues else self._sinks.pop(run))
            events.append(event)
        self._thread.call_soon(_deliver, sinks, events)

    # --- pausing ----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Pause with KEEP or ABORT; for WAIT see :meth:`drain`."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._abort_started()
        elif self.scheduler.running:
            self._fail_drains(
                "pause(keep) froze the requests this pause(wait) waited for; resume(), then pause"
                " again"
            )

    def drain(self, drained: asyncio.Future[None]) -> None:
        """Let running and frozen requests finish, then settle ``drained``."""
        self._drains.append(drained)
        self._end_drains()

    def cancel_drain(self, drained: asyncio.Future[None]) -> None:
        """Cancel a drain, as its caller went away."""
        if drained in self._drains:
            self._drains.remove(drained)

    def resume(self) -> None:
        self._paused = False
        if self._weight_state is _WeightState.EXPECTED:  # the pause was for new ones
            self._lose_weights(self._why_no_weights)
        self._fail_drains("resume() came before the requests this pause(wait) waited for had ended")

    def _end_drains(self) -> None:
        if self._drains and not self.scheduler.started:
            self._paused = True
            for drained in self._drains:
                self._thread.settle(drained)
            self._drains.clear()

    def _fail_drains(self, why: str) -> None:
        for drained in self._drains:
            self._thread.settle(drained, error=BackendError(why))
        self._drains.clear()

    # --- memory and weights -----------------------------------------------------------------------

    def sleep(self) -> None:
        if not self._has_weights:
            raise EngineDiedError(self._why_no_weights)
        self._abort_started()
        if not self._asleep:
            self.scheduler.sleep()
        self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.scheduler.wake()
        self._asleep = False

    def give_up_weights(self, version: int) -> EngineParams | None:
        """Stop serving, and return the weights, in whose memory those of ``version`` are made.

        In a pause, requests wait for the update with the new weights; if the pause ends without it,
        they fail. Without a pause, nobody has promised an update: requests are aborted, so that the
        client resumes them elsewhere, and later ones are refused.

        Returns:
            None if there are no weights on devices.
        """
        if self._asleep or not self._has_weights:
            return None
        self._why_no_weights = (
            f"the weights of version {self.version} have made room for those of version {version},"
            " which did not come; send a whole update"
        )
        if self._paused:
            self._weight_state = _WeightState.EXPECTED
        else:
            self._weight_state = _WeightState.LOST
            for run in list(self._sinks):
                self.abort(run.request.request_id)
        return self.scheduler.params

    def update_weights(self, update: WeightUpdate) -> None:
        """Serve new weights from now on.

        Raises:
            WeightUpdateError: they were not loaded; says what is served now.
        """
        self._weights.check(update, self.version)
        begin = time.perf_counter()
        scheduler = self.scheduler
        try:
            old_params = scheduler.params if self._has_weights else None
            if update.partial and old_params is not None:  # of adapters alone
                params = old_params
            else:
                params = scheduler.engine.load_params(update.payload, old_params)
                params = jax.block_until_ready(params)
            if update.adapters:
                scheduler.engine.load_adapters(update.adapters)
        except Exception as error:
            problem = (
                f"weights of version {update.version} could not be loaded ({type(error).__name__}:"
                f" {error})"
            )
            if self._has_weights and not _any_deleted(scheduler.params):
                raise WeightUpdateError(
                    f"{problem}; version {self.version} is still served"
                ) from error
            problem += (
                f" after those of version {self.version} had made room for them; send a whole"
                " update"
            )
            self._lose_weights(problem)
            raise WeightUpdateError(problem) from error

        scheduler.set_weights(params, update.version)
        self.version = update.version
        self._weight_state = _WeightState.SERVED
        scheduler.counters.weight_update_seconds += time.perf_counter() - begin

    def _lose_weights(self, why: str) -> None:
        """Stop serving until an update succeeds, free what is left, and fail all requests."""
        logger.error("the engine stops serving: %s", why)
        self._weight_state = _WeightState.LOST
        self._why_no_weights = why
        free_arrays(self.scheduler.params)
        error = EngineDiedError(why)
        for run, sink in self._sinks.items():
            self.scheduler.abort(run.request.request_id)
            self._thread.call_soon(sink.put_nowait, error)
        self._sinks.clear()

    def health(self) -> Health:
        if self._weight_state is _WeightState.LOST:
            return Health(ok=False, detail=self._why_no_weights, policy_version=self.version)
        health = self.scheduler.health()
        if self._weight_state is _WeightState.EXPECTED:
            return replace(health, detail=TAKING_WEIGHTS)
        return health


def _any_deleted(params: Any) -> bool:
    """Whether any of the arrays has given up its memory; weights on the host never do."""
    for x in jax.tree.leaves(params):
        if isinstance(x, jax.Array) and x.is_deleted():
            return True
    return False


def _deliver(sinks: Sequence[ChunkSink], events: Sequence[TokenChunk | BackendError]) -> None:
    """Deliver chunks and errors, on the asyncio side."""
    for sink, event in zip(sinks, events, strict=True):
        sink.put_nowait(event)
