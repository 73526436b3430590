"""What an engine's thread does: requests in and out, pauses, sleep and weights. Everything here runs in that thread.

::

    serving ──pause(keep)──► frozen ──pause(wait)──┐
       │  ▲                    │                   ▼
       │  └──────resume────────┴──resume──── draining: what runs goes on, nothing is admitted
       └──────────pause(wait)──────────────────────┘ │ nothing runs any more
                                                     ▼
                                                  frozen, and whoever waited for it is told
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
"""Where one submission's output goes. Ids of requests may be used again, so they say nothing about it."""


class EngineLoop:
    """See the module docstring.

    Args:
        thread: that it runs in.
        make_scheduler: makes the engine, compiled and with its first weights.
        weights: what an update must look like.
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
        self._outlets: dict[RunningRequest, ChunkSink] = {}
        self._drains: list[asyncio.Future[None]] = []  # of callers who wait until nothing runs
        self._paused = self._asleep = False
        self._lost: str | None = None  # why there are no weights to serve

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

    def submit(self, request: GenerateRequest, multimodal: MultimodalContext | None, outlet: ChunkSink) -> None:
        try:
            if self._lost:
                raise EngineDiedError(self._lost)
            self._outlets[self.scheduler.submit(request, multimodal)] = outlet
        except TrajectoryError as error:  # this request's own fault
            self._thread.tell(_deliver, [(outlet, error)])
        except Exception as error:  # whatever is wrong with one request must not end the others
            logger.exception("request %r could not be queued", request.request_id)
            refusal = BackendError(f"request {request.request_id!r} cannot be taken: {type(error).__name__}: {error}")
            self._thread.tell(_deliver, [(outlet, refusal)])

    def abort(self, request_id: str) -> bool:
        ended = self.scheduler.abort(request_id)
        if ended is not None:
            self._publish([ended])
        return ended is not None

    def _publish(self, progress: Sequence[tuple[RunningRequest, TokenChunk]]) -> None:
        if progress:
            self._thread.tell(_deliver, [(self._outlet(run, chunk), chunk) for run, chunk in progress])

    def _outlet(self, run: RunningRequest, chunk: TokenChunk) -> ChunkSink:
        return self._outlets[run] if chunk.final is None else self._outlets.pop(run)

    # --- pausing ----------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """KEEP and ABORT; for WAIT see :meth:`drain`."""
        self._paused = True
        if mode is PauseMode.ABORT:
            self._abort_begun()
        elif self.scheduler.running:
            self._call_off("pause(keep) froze what this pause(wait) waited for; resume(), then pause again")

    def drain(self, drained: asyncio.Future[None]) -> None:
        """Lets what runs finish, what is frozen too; ``drained`` is settled when nothing runs."""
        self._drains.append(drained)
        self._end_drains()

    def withdraw(self, drained: asyncio.Future[None]) -> None:
        """Nobody waits for it any more: without others who do, all is as it was before."""
        if drained in self._drains:
            self._drains.remove(drained)

    def resume(self) -> None:
        self._paused = False
        self._call_off("resume() came before what this pause(wait) waited for had ended")

    def _end_drains(self) -> None:
        if self._drains and not self.scheduler.running:
            self._paused = True
            for drained in self._drains:
                self._thread.settle(drained)
            self._drains.clear()

    def _call_off(self, why: str) -> None:
        for drained in self._drains:
            self._thread.settle(drained, error=BackendError(why))
        self._drains.clear()

    def _abort_begun(self) -> None:
        for request_id in self.scheduler.begun:
            self.abort(request_id)

    # --- memory and weights -----------------------------------------------------------------------------------

    def sleep(self) -> None:
        if self._lost:
            raise EngineDiedError(self._lost)
        self._abort_begun()
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
        """Serves new weights from now on.

        Raises:
            WeightUpdateError: they were not taken; says what is served now.
        """
        self._weights.check(update, self.version)
        begin = time.perf_counter()
        scheduler = self.scheduler
        try:
            old = None if self._lost else scheduler.params
            params = jax.block_until_ready(scheduler.engine.load_params(update.payload, old))
        except Exception as error:
            raise self._not_taken(update, error) from error
        scheduler.set_weights(params, update.version)
        self.version, self._lost = update.version, None
        scheduler.counters.weight_update_seconds += time.perf_counter() - begin

    def _not_taken(self, update: WeightUpdate, error: Exception) -> WeightUpdateError:
        """The old weights serve on, unless the new ones had been given their memory: then nothing is served."""
        what = f"weights of version {update.version} could not be loaded ({type(error).__name__}: {error})"
        if not _is_gone(self.scheduler.params):
            return WeightUpdateError(f"{what}; those of version {self.version} serve on")
        self._lost = f"{what} after those of version {self.version} had made room for them; send a whole update"
        logger.error("the engine stops serving: %s", self._lost)
        self._fail_requests(EngineDiedError(self._lost))
        return WeightUpdateError(self._lost)

    def _fail_requests(self, error: EngineDiedError) -> None:
        for run in self._outlets:
            self.scheduler.abort(run.request.request_id)
        self._thread.tell(_deliver, [(outlet, error) for outlet in self._outlets.values()])
        self._outlets.clear()

    # --- state ------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        if self._lost:
            return Health(ok=False, detail=self._lost, policy_version=self.version)
        return self.scheduler.health(self.version)

    def metrics(self) -> BackendMetrics:
        return self.scheduler.metrics()


def _deliver(events: Sequence[tuple[ChunkSink, TokenChunk | Exception]]) -> None:
    """On the asyncio side."""
    for outlet, event in events:
        outlet.put_nowait(event)


def _is_gone(params: Any) -> bool:
    """Whether memory of weights was given up; on the host it never is."""
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(params))
