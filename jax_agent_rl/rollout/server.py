"""One engine as the rollout sees it: its backend, running requests, weight updates and metrics.

The watchdog notices engines that died while idle, or that accept requests and never answer them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    RolloutBackend,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode, TokenOutput
from jax_agent_rl.utils.prometheus import PREFIX
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

_EVACUATE_TIMEOUT_SECONDS = 2.0
"""Time limit of a lost server for returning what its requests have sampled."""

_CLOSE_TIMEOUT_SECONDS = 30.0

OnIds = Callable[[Sequence[int]], None]
"""Called with newly sampled ids of one request; must be quick and must not raise."""

OnChunk = Callable[[TokenChunk], None]
"""Called with newly sampled ids, their log-probs and versions; must be quick and must not raise."""


class AsyncServer:
    """Serves one backend (one data-parallel replica of the engine).

    Args:
        backend: the engine; started and closed with the server.
        name: unique among the servers of a client.
    """

    def __init__(self, backend: RolloutBackend, *, name: str = "server-0"):
        self.backend = backend
        self.name = name
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._deadlines: set[asyncio.Timeout] = set()  # of calls that wait for the backend
        self._abandoned = ""  # the reason, once it is
        self.updating = False
        """Whether it is taking weights, so that its requests stand still."""
        self.has_answered = False
        """Whether it has ever finished a request."""

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that are inside the backend."""
        return frozenset(self._running)

    async def close_quietly(self, *, timeout: float | None = None) -> None:
        """Close a server that may be in any state, within ``timeout`` seconds; log what fails."""
        try:
            async with asyncio.timeout(timeout):
                await self.backend.close()
        except Exception as error:
            logger.warning("server %s failed to close: %r", self.name, error)

    async def end(self, why: str) -> None:
        """Abort the requests, fail those that the backend cannot return any more, and close."""
        try:
            async with asyncio.timeout(_EVACUATE_TIMEOUT_SECONDS):
                await self.evacuate()
        except Exception as error:
            logger.info("server %s returned nothing: %r", self.name, error)
        self.abandon(why)
        await self.close_quietly(timeout=_CLOSE_TIMEOUT_SECONDS)

    def abandon(self, why: str) -> None:
        """Fail every call that waits for the backend, now and later, with ``EngineDiedError``.

        Of several reasons, the first is given.
        """
        if not self._abandoned:
            self._abandoned = f"server {self.name} is lost: {why}"
        while self._deadlines:
            # Each only once: a deadline that is about to fire cannot be rescheduled.
            self._deadlines.pop().reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _until_abandoned(self) -> AsyncIterator[None]:
        """Raise ``EngineDiedError`` in the context once the server is abandoned."""
        if self._abandoned:
            raise EngineDiedError(self._abandoned)
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineDiedError(self._abandoned) from None

    async def generate(
        self, request: GenerateRequest, *, on_chunk: OnChunk | None = None
    ) -> TokenOutput:
        """Run one request.

        Args:
            on_chunk: called with chunks as they are sampled, if the backend streams.

        Raises:
            BackendError: the request failed, or asks for what the backend cannot do.
        """
        capabilities = self.backend.capabilities
        missing = request.multi_modal.keys() - capabilities.multi_modal
        if missing:
            raise BackendError(
                f"request {request.request_id!r}: {self.name} takes no {sorted(missing)} input"
            )
        if request.lora is not None and not capabilities.lora:
            raise BackendError(
                f"request {request.request_id!r}: {self.name} serves no LoRA adapter, so not"
                f" {request.lora!r} either"
            )

        self._running.add(request.request_id)
        self._idle.clear()
        try:
            async with self._until_abandoned():
                if on_chunk is None or not capabilities.streaming:
                    output = await self.backend.generate(request)
                else:
                    output = await self._stream(request, on_chunk)
            self.has_answered = True
            return output
        finally:
            self._running.discard(request.request_id)
            if not self._running:
                self._idle.set()

    async def _stream(self, request: GenerateRequest, on_chunk: OnChunk) -> TokenOutput:
        stream = cast(AsyncGenerator[TokenChunk, None], self.backend.stream(request))
        async with contextlib.aclosing(stream) as chunks:  # closing it frees the slot
            async for chunk in chunks:
                on_chunk(chunk)
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def evacuate(self) -> None:
        """Abort all requests, so that the client resumes them elsewhere.

        Do nothing if the backend cannot abort.
        """
        if self.backend.capabilities.abort:
            await asyncio.gather(*(self.backend.abort(request_id) for request_id in self.running))

    async def drain(self) -> None:
        """Wait until nothing runs; the caller keeps new requests away."""
        await self._idle.wait()

    def takes(self, update: WeightUpdate) -> bool:
        """Return whether the weights are unrounded, or rounded as the engine would round them."""
        return update.dtype in (AS_THEY_ARE, self.backend.capabilities.weight_dtype)

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Pause, take the weights, and resume (also if the weights were refused).

        Args:
            mode: what happens to running requests; None picks the gentlest mode of the backend:
                keep them if weights may change under them, else abort them (the client resumes
                them), else wait for them.

        Raises:
            WeightUpdateError: refused; the old weights still serve.
            EngineDiedError: the backend died, or the server was abandoned.
        """
        if not self.takes(update):
            raise WeightUpdateError(
                f"server {self.name} takes weights in {self.backend.capabilities.weight_dtype}, but"
                f" those of version {update.version} are rounded to {update.dtype}: it joined after"
                " they were made; it gets the next ones"
            )
        self.updating = True
        try:
            async with self._until_abandoned():
                await self._update_paused(update, mode or self._gentlest_pause())
        finally:
            self.updating = False

    async def _update_paused(self, update: WeightUpdate, mode: PauseMode | None) -> None:
        """Take weights in a pause of this mode; None: without a pause."""
        if mode is None:
            await self.backend.update_weights(update)
            return
        try:
            await self.backend.pause(mode)
            await self.backend.update_weights(update)
        finally:  # a cancelled pause may have taken effect
            if not self._abandoned:  # it might never answer
                await self.backend.resume()

    def _gentlest_pause(self) -> PauseMode | None:
        """Return the mode that disturbs running requests least; None if there is none."""
        capabilities = self.backend.capabilities
        modes = [PauseMode.ABORT, PauseMode.WAIT]
        if capabilities.in_flight_update:
            modes.insert(0, PauseMode.KEEP)
        for mode in modes:
            if mode in capabilities.pause_modes:
                return mode
        return None


def engine_families(
    metrics: BackendMetrics, health: Health, capabilities: Capabilities, *, engine: str
) -> Iterator[Metric]:
    """Yield an engine's counters and state, labelled with its name."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for counter in fields(metrics):
        family = CounterMetricFamily(
            f"{PREFIX}engine_{counter.name}", counter.metadata["help"], labels=["engine"]
        )
        family.add_metric([engine], getattr(metrics, counter.name))
        yield family

    gauges = {
        "up": ("Whether it serves.", health.ok),
        "policy_version": ("Version of the weights it serves.", health.policy_version),
        "requests_running": ("Requests that sample.", health.running),
        "requests_waiting": ("Requests that wait for a slot.", health.waiting),
        "max_concurrent": ("Decode slots.", capabilities.max_concurrent),
        "kv_used_share": (
            "Used share of the KV cache, kept prefixes included.",
            health.kv_used_share,
        ),
    }
    for name, (description, value) in gauges.items():
        if value is not None:
            family = GaugeMetricFamily(f"{PREFIX}engine_{name}", description, labels=["engine"])
            family.add_metric([engine], float(value))
            yield family


_METRICS_TIMEOUT_SECONDS = 10.0
"""Time limit of the slowest engine for reporting its metrics."""


class FleetMetrics:
    """The summed metrics of several engines.

    An engine that is gone or does not answer keeps its last values. One that joins later counts
    from then on: a server that was only out of reach still has its old counters.

    Args:
        backends: returns the current engines.
    """

    def __init__(self, backends: Callable[[], Sequence[RolloutBackend]]) -> None:
        self._backends = backends
        # What each engine had counted before it joined; the first engines count from zero.
        self._baselines: dict[RolloutBackend, BackendMetrics] = {}
        for backend in backends():
            self._baselines[backend] = BackendMetrics()
        self._latest: dict[RolloutBackend, BackendMetrics] = {}
        self._departed = BackendMetrics()

    async def read(self) -> BackendMetrics:
        backends = self._backends()
        await asyncio.gather(*(self._read(backend) for backend in backends))
        for backend in self._baselines.keys() - set(backends):
            del self._baselines[backend]
            self._departed = _sum(self._departed, self._latest.pop(backend, BackendMetrics()))
        return _sum(self._departed, *self._latest.values())

    async def _read(self, backend: RolloutBackend) -> None:
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT_SECONDS):
                metrics = await backend.metrics()
        except (BackendError, TimeoutError):
            return
        baseline = self._baselines.setdefault(backend, metrics)
        self._latest[backend] = _difference(metrics, baseline)


def _sum(*metrics: BackendMetrics) -> BackendMetrics:
    sums: dict[str, Any] = {}
    for name in BackendMetrics.__dataclass_fields__:
        sums[name] = sum(getattr(each, name) for each in metrics)
    return BackendMetrics(**sums)


def _difference(metrics: BackendMetrics, baseline: BackendMetrics) -> BackendMetrics:
    """Return all differences; ``BackendMetrics.since`` leaves out ``recompilations``."""
    differences: dict[str, Any] = {}
    for name in BackendMetrics.__dataclass_fields__:
        differences[name] = getattr(metrics, name) - getattr(baseline, name)
    return BackendMetrics(**differences)


_COMPILING = 3
"""Times the patience for an engine that has not sampled yet: it may be compiling."""

_UPDATING = 10
"""Times the patience for an engine that is taking weights."""

_CHECKS = 4
"""Checks per ``stall_seconds``."""


class StallDetector:
    """Compares an engine's counters from check to check; without clocks or asyncio.

    Args:
        stall_seconds: how long an engine may have requests without any of its counters moving.
    """

    def __init__(self, stall_seconds: float):
        self._stall_seconds = stall_seconds
        # Each server's counters when they last changed, and the time since which it is idle or
        # stands still.
        self._readings: weakref.WeakKeyDictionary[object, tuple[tuple[int, ...] | None, float]]
        self._readings = weakref.WeakKeyDictionary()

    def check(
        self,
        server: object,
        counters: tuple[int, ...] | None,
        *,
        now: float,
        busy: bool,
        updating: bool,
    ) -> bool:
        """Return whether the engine has stalled.

        Args:
            server: the key under which the engine's earlier counters are remembered.
            counters: the engine's counters; None if it did not report them.
            now: the time, in seconds.
            busy: it has requests.
            updating: it is taking weights.
        """
        last_counters, since = self._readings.get(server, (counters, now))
        moved = counters is not None and counters != last_counters
        idle = not busy and not updating
        if moved:
            last_counters = counters
        if moved or idle:
            since = now
        self._readings[server] = (last_counters, since)

        has_sampled = any(last_counters or ())
        patience = self._stall_seconds
        if updating:
            patience *= _UPDATING
        elif not has_sampled:
            patience *= _COMPILING
        return now - since > patience


async def watch_servers(
    servers: Callable[[], Collection[AsyncServer]],
    mark_lost: Callable[[AsyncServer, str], None],
    stall_seconds: float,
) -> None:
    """Check all servers again and again, until cancelled.

    Args:
        servers: returns the servers to check.
        mark_lost: called with a server that died or stalled, and the reason.
        stall_seconds: how long a server may have requests without any of its counters moving.
    """
    detector = StallDetector(stall_seconds)
    interval = stall_seconds / _CHECKS

    async def check(server: AsyncServer) -> None:
        counters: tuple[int, ...] | None = None
        try:
            async with asyncio.timeout(interval):
                metrics = await server.backend.metrics()
            counters = (
                metrics.generated_tokens,
                metrics.prefill_tokens,
                metrics.cached_tokens,
                metrics.requests_finished,
            )
        except (EngineDiedError, BackendClosedError) as error:
            mark_lost(server, str(error))
        except Exception as error:
            logger.warning("server %s does not report its counters: %r", server.name, error)

        now = asyncio.get_running_loop().time()
        num_running = len(server.running)
        is_stalled = detector.check(
            server, counters, now=now, busy=num_running > 0, updating=server.updating
        )
        if is_stalled:
            mark_lost(
                server,
                f"with {num_running} requests inside it has done nothing for {stall_seconds:g} s",
            )

    while True:
        await asyncio.sleep(interval)
        await asyncio.gather(*(check(server) for server in servers()))
