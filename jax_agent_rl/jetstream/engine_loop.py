"""The work of an engine's thread: requests, pauses, sleep and weights. Everything here runs in that thread.

::

    serving ──pause(keep)──► frozen ──pause(wait)──┐
       │  ▲                    │                   ▼
       │  └──────resume────────┴──resume──── draining: running requests go on, none is admitted
       └──────────pause(wait)──────────────────────┘ │ none runs any more
                                                     ▼
                                                  frozen, and pause(wait) returns
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_agent_rl.errors import BackendError, EngineDiedError, TrajectoryError, WeightUpdateError
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.jetstream.thread import EngineThread
from jax_agent_rl.jetstream.weights import ServedWeights
from jax_agent_rl.models.vision.context import MultimodalContext
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest, Health, TokenChunk, WeightUpdate
from jax_agent_rl.types import PauseMode

logger = logging.getLogger(__name__)
ChunkSink = asyncio.Queue[TokenChunk | Exception]
"""Output of one submission. Request ids may be reused, so they cannot identify it."""


class EngineLoop:
    """The state machine of the module docstring.

    Args:
        thread: the thread it runs in.
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
        self._paused = self._asleep = False
        self._weights_lost: str | None = None  # why there are no weights to serve

    def set_up(self) -> None:
        self.scheduler = self._make_scheduler()

    def has_work(self) -> bool:
        if self._asleep or (self._paused and not self._drains):
            return False
        return bool(self.scheduler.running) or (self.scheduler.waiting > 0 and not self._drains)

    def turn(self) -> None:
        if self.has_work():
            self._publish(self.scheduler.step(admit=not self._drains))
        self._end_drains()

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, multimodal: MultimodalContext | None, sink: ChunkSink) -> None:
        try:
            if self._weights_lost:
                raise EngineDiedError(self._weights_lost)
            self._sinks[self.scheduler.submit(request, multimodal)] = sink
        except TrajectoryError as error:  # the request is at fault
            self._thread.tell(_deliver, [(sink, error)])
        except Exception as error:  # one request must not end the others
            logger.exception("request %r could not be queued", request.request_id)
            refusal = BackendError(f"request {request.request_id!r} cannot be taken: {type(error).__name__}: {error}")
            self._thread.tell(_deliver, [(sink, refusal)])

    def abort(self, request_id: str) -> bool:
        ended = self.scheduler.abort(request_id)
        if ended is not None:
            self._publish([ended])
        return ended is not None

    def _publish(self, progress: Sequence[tuple[RunningRequest, TokenChunk]]) -> None:
        if progress:
            self._thread.tell(_deliver, [(self._sink(run, chunk), chunk) for run, chunk in progress])

    def _sink(self, run: RunningRequest, chunk: TokenChunk) -> ChunkSink:
        return self._sinks[run] if chunk.final is None else self._sinks.pop(run)

    # --- pausing ----------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Pause with KEEP or ABORT; for WAIT see :meth:`drain`."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._abort_started()
        elif self.scheduler.running:
            self._fail_drains("pause(keep) froze the requests this pause(wait) waited for; resume(), then pause again")

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
        self._fail_drains("resume() came before the requests this pause(wait) waited for had ended")

    def _end_drains(self) -> None:
        if self._drains and not self.scheduler.running:
            self._paused = True
            for drained in self._drains:
                self._thread.settle(drained)
            self._drains.clear()

    def _fail_drains(self, why: str) -> None:
        for drained in self._drains:
            self._thread.settle(drained, error=BackendError(why))
        self._drains.clear()

    def _abort_started(self) -> None:
        for request_id in self.scheduler.started:
            self.abort(request_id)

    # --- memory and weights -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self._weights_lost:
            raise EngineDiedError(self._weights_lost)
        self._abort_started()
        if not self._asleep:
            self.scheduler.sleep()
        self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.scheduler.wake()
        self._asleep = False

    def reset_prefix_cache(self) -> None:
        self.scheduler.table.reset()

    def take_weights(self, update: WeightUpdate) -> None:
        """Serve new weights from now on.

        Raises:
            WeightUpdateError: they were not loaded; says what is served now.
        """
        self._weights.check(update, self.version)
        begin = time.perf_counter()
        scheduler = self.scheduler
        try:
            old = None if self._weights_lost else scheduler.params
            params = jax.block_until_ready(scheduler.engine.load_params(update.payload, old))
        except Exception as error:
            raise self._load_error(update, error) from error
        scheduler.set_weights(params, update.version)
        self.version, self._weights_lost = update.version, None
        scheduler.counters.weight_update_seconds += time.perf_counter() - begin

    def _load_error(self, update: WeightUpdate, error: Exception) -> WeightUpdateError:
        """Make the error of a failed update; stop serving if the old weights were already freed."""
        what = f"weights of version {update.version} could not be loaded ({type(error).__name__}: {error})"
        if not _is_freed(self.scheduler.params):
            return WeightUpdateError(f"{what}; those of version {self.version} serve on")
        self._weights_lost = f"{what} after those of version {self.version} had made room for them; send a whole update"
        logger.error("the engine stops serving: %s", self._weights_lost)
        self._fail_requests(EngineDiedError(self._weights_lost))
        return WeightUpdateError(self._weights_lost)

    def _fail_requests(self, error: EngineDiedError) -> None:
        for run in self._sinks:
            self.scheduler.abort(run.request.request_id)
        self._thread.tell(_deliver, [(sink, error) for sink in self._sinks.values()])
        self._sinks.clear()

    # --- state ------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        if self._weights_lost:
            return Health(ok=False, detail=self._weights_lost, policy_version=self.version)
        return self.scheduler.health(self.version)

    def metrics(self) -> BackendMetrics:
        return self.scheduler.metrics()


def _deliver(events: Sequence[tuple[ChunkSink, TokenChunk | Exception]]) -> None:
    """Deliver events, on the asyncio side."""
    for sink, event in events:
        sink.put_nowait(event)


def _is_freed(params: Any) -> bool:
    """Whether the memory of weights was freed; on the host it never is."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(params))
