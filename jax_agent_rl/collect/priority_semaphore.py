"""A semaphore with priorities: how many trajectories run at once, and which is next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PrioritySemaphore:
    """A semaphore with priorities: continuing a started group goes before starting another.

    A branch thus runs while the engine still holds its parent's KV, and groups complete sooner.

    Args:
        count: maximum concurrent holders.
    """

    def __init__(self, count: int):
        self._free = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def take(self, *, urgency: int) -> AsyncIterator[None]:
        """Hold a slot; the most urgent waiter is next, among equals the first to come."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-urgency, next(self._arrivals), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was passed the slot just before
                    self._pass_on()
                raise

        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the slot to the next waiter, or free it."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
