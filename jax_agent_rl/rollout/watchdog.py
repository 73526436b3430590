"""Watchdog: notices engines that died while idle, or that accept requests and never answer them."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

from jax_agent_rl.errors import BackendClosedError, EngineDiedError
from jax_agent_rl.rollout.server import AsyncServer

logger = logging.getLogger(__name__)

_COMPILING = 3
"""Times the patience for an engine that has not sampled yet: it may be compiling."""

_UPDATING = 10
"""Times the patience for an engine that is taking weights."""

_CHECKS = 4
"""Checks per ``stall_seconds``."""


@dataclass(kw_only=True, slots=True)
class _Reading:
    """An engine's counters when they last changed, and the time of that."""

    counters: tuple[int, ...] | None
    since: float


class StallDetector:
    """Compares an engine's counters from check to check; without clocks or asyncio.

    Args:
        stall_seconds: how long an engine may have requests without any of its counters moving.
    """

    def __init__(self, stall_seconds: float):
        self._stall_seconds = stall_seconds
        self._readings: weakref.WeakKeyDictionary[object, _Reading] = weakref.WeakKeyDictionary()

    def check(
        self, server: object, counters: tuple[int, ...] | None, *, now: float, busy: bool, updating: bool
    ) -> bool:
        """Return whether the engine has stalled.

        Args:
            server: the server of the engine.
            counters: its counters; None if it did not report them.
            now: seconds.
            busy: it has requests.
            updating: it is taking weights.
        """
        reading = self._readings.setdefault(server, _Reading(counters=counters, since=now))
        moved = counters is not None and counters != reading.counters
        if moved:
            reading.counters = counters
        if moved or not (busy or updating):
            reading.since = now
        has_sampled = any(reading.counters or ())
        patience = self._stall_seconds * (_UPDATING if updating else 1 if has_sampled else _COMPILING)
        return now - reading.since > patience


async def watch_servers(
    servers: Callable[[], Collection[AsyncServer]], mark_lost: Callable[[AsyncServer, str], None], stall_seconds: float
) -> None:
    """Check all servers again and again, until cancelled.

    Args:
        servers: returns those to check.
        mark_lost: called with a server that died or stalled, and the reason.
        stall_seconds: see :class:`StallDetector`.
    """
    detector, interval = StallDetector(stall_seconds), stall_seconds / _CHECKS

    async def check(server: AsyncServer) -> None:
        counters: tuple[int, ...] | None = None
        try:
            async with asyncio.timeout(interval):
                done = await server.backend.metrics()
            counters = (done.generated_tokens, done.prefill_tokens, done.cached_tokens, done.requests_finished)
        except (EngineDiedError, BackendClosedError) as error:
            mark_lost(server, str(error))
        except Exception as error:
            logger.warning("server %s does not report its counters: %r", server.name, error)
        now, requests = asyncio.get_running_loop().time(), len(server.running)
        if detector.check(server, counters, now=now, busy=requests > 0, updating=server.updating):
            mark_lost(server, f"with {requests} requests inside it has done nothing for {stall_seconds:g} s")

    while True:
        await asyncio.sleep(interval)
        await asyncio.gather(*map(check, servers()))
