"""A gate that requests pass on their way to a server, in the order of their priorities.

A server orders the requests that it has. What a pause holds back has not reached it: the order in
which these requests leave the gate is the order in which they are served.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools


class PriorityGate:
    """A gate, open at first.

    Requests that wait when it opens pass in ascending order of priority and, within one priority,
    of arrival.
    """

    def __init__(self) -> None:
        self._is_open = True
        # A heap of (priority, arrival, passage); some of the passages are cancelled.
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def close(self) -> None:
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        while self._waiting:
            _, _, passage = heapq.heappop(self._waiting)
            if not passage.done():
                passage.set_result(None)

    async def wait(self, priority: int) -> None:
        """Return when the gate has opened; it may be closed again by then."""
        if self._is_open:
            return
        passage: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), passage))
        await passage
