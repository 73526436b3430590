"""Finds engines that died while idle, or that accept requests and never answer them."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Collection

from jax_agent_rl.errors import BackendClosedError, EngineDiedError
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.utils.text import counted

logger = logging.getLogger(__name__)


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
                f"with {counted(num_running, 'request')} inside it has done nothing for"
                f" {stall_seconds:g} s",
            )

    while True:
        await asyncio.sleep(interval)
        await asyncio.gather(*(check(server) for server in servers()))
