"""A semaphore with urgency: who continues a group that has begun goes before who begins another.

So a branch runs while the engine still holds what its parent computed, and groups are complete sooner.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PrioritySemaphore:
    """Use it from one event loop.

    Args:
        count: how many may hold a slot at the same time.
    """

    def __init__(self, count: int):
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def take(self, *, urgency: int) -> AsyncIterator[None]:
        """Holds a slot; of those who wait, the most urgent are next, among equals the first to come."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-urgency, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the slot was handed over just before
                    self._hand_on()
                raise
        try:
            yield
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        """To the next who still waits, else it is free."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
