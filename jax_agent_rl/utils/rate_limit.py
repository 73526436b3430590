"""A rate limit: how many calls may start in a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


class RateLimit:
    """At most so many starts a second; first come, first served.

    Args:
        per_second: positive.
        burst: number of starts that may come at once after a pause; 1 spaces all starts evenly.
            None: a second's worth.
        clock: seconds, monotonic.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        per_second: float,
        *,
        burst: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ):
        self.per_second = per_second
        self._clock = clock
        self._sleep = sleep
        self._max_permits = max(1.0, per_second) if burst is None else float(burst)
        self._permits = self._max_permits  # negative while starts wait for theirs
        self._refilled = clock()

    async def wait(self) -> None:
        """Wait for a turn."""
        now = self._clock()
        refill = (now - self._refilled) * self.per_second
        self._permits = min(self._max_permits, self._permits + refill)
        self._refilled = now

        self._permits -= 1
        if self._permits < 0:
            await self._sleep(-self._permits / self.per_second)
