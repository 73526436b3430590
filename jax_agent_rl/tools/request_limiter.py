"""A limit on concurrent requests and on how often they start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from jax_agent_rl.utils.rate_limit import RateLimit

logger = logging.getLogger(__name__)


class RequestLimiter:
    """Bounds concurrent requests, and keeps their starts ``interval`` seconds apart.

    It warns that the interval is the bottleneck once requests have waited longer to start than they
    ran.

    Args:
        max_workers: ``tool_config.max_workers``.
        interval: ``tool_config.request_interval``.
        clock: monotonic seconds.
    """

    _MIN_REQUESTS = 50  # before the interval is judged

    def __init__(
        self,
        *,
        max_workers: int,
        interval: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._workers = asyncio.Semaphore(max_workers)
        self._interval = interval
        self._clock = clock
        self._rate = None
        if interval > 0:
            self._rate = RateLimit(1 / interval, burst=1, clock=clock, sleep=sleep)
        self._requests = 0
        self._wait_seconds = 0.0
        self._run_seconds = 0.0
        self._warned = False

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a turn, and occupy a worker for the duration of the block."""
        async with self._workers:
            arrival_time = self._clock()
            if self._rate is not None:
                await self._rate.wait()

            start_time = self._clock()
            try:
                yield
            finally:
                self._requests += 1
                self._wait_seconds += start_time - arrival_time
                self._run_seconds += self._clock() - start_time
                self._warn_of_bottleneck()

    def _warn_of_bottleneck(self) -> None:
        """Warn once if the interval holds requests up for longer than they run."""
        if self._warned or self._rate is None or self._requests < self._MIN_REQUESTS:
            return
        if self._wait_seconds <= self._run_seconds:
            return
        self._warned = True
        logger.warning(
            "tool_config.request_interval=%g is the bottleneck of tool calls: %d requests waited"
            " %.1f s to start and took %.1f s; no more than %.3g start in a second. Set"
            " tool_config.request_interval=0 if the tool server is yours alone, or lower it",
            self._interval,
            self._requests,
            self._wait_seconds,
            self._run_seconds,
            1 / self._interval,
        )
