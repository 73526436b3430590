"""Groups that grow side by side and flow to the learner as they complete: the buffer with coroutines around it.

::

    draw ──► buffer.admit ──► a task per group ──► buffer.complete ──► take ──► learner
    (rows)        ▲             grow: engine,                                      │
                  │             tools, rewards                                     │
                  └──────────── room: finish_step, discard ◄───────────────────────┘

    grow (a task per group)  consumes: a ticket.         produces: a complete group.  waits for: engine, tools, reward.
    take                     consumes: complete groups.  produces: a batch.           waits for: enough of them.
    idle                     consumes, produces: nothing.                             waits for: the last task.

Whatever makes room starts groups at once; no coroutine polls. An error that is not a trajectory's own ends the stream:
every ``take`` and ``idle`` raises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.collect.buffer import RolloutBuffer, Ticket
from jax_agent_rl.types import DropReason, Group


@dataclass(kw_only=True)
class _Growing:
    """A group's task, and why it would be stopped."""

    task: asyncio.Task[None] | None = None
    reason: DropReason = DropReason.CANCELLED


Draw = Callable[[], tuple[int, Any]]
Grow = Callable[[Ticket, Any, Callable[[], DropReason]], Awaitable[Group]]
Drop = Callable[[Group, DropReason], None]


class GroupStream:
    """Use it from one event loop.

    Args:
        buffer: decides what may start and what may leave.
        draw: the next group's number and row.
        grow: makes the group of a ticket and a row. Cancelled, it books what it had started under the reason that its
            third argument then returns.
        drop: books the members of a group that is given up after it was complete.
    """

    def __init__(self, buffer: RolloutBuffer, *, draw: Draw, grow: Grow, drop: Drop) -> None:
        self.buffer = buffer
        self._draw, self._grow, self._drop = draw, grow, drop
        self._wanted = 0
        self._closed = False
        self._growing: dict[int, _Growing] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def want(self, count: int) -> None:
        """So many more groups will be taken: they start, and the buffer's spare ones, as far as it has room."""
        self._wanted = count
        self._fill()

    async def take(self, count: int) -> dict[int, Group]:
        """The next batch, by number; see :meth:`RolloutBuffer.take`.

        Raises:
            RuntimeError: the stream was closed: there will be no batch.
        """
        while not self._closed:
            self._check()
            groups = self.buffer.take(count)
            if groups is not None:
                self._wanted -= len(groups)
                return groups
            await self._changed.wait()
        raise RuntimeError("the stream of groups is closed")

    async def idle(self) -> None:
        """Returns when no group grows."""
        while self._growing:
            self._check()
            await self._changed.wait()
        self._check()

    def discard(self, numbers: Collection[int], reason: DropReason) -> None:
        """See :meth:`RolloutBuffer.discard`; others start in their place."""
        self.buffer.discard(numbers, reason)
        self.want(self._wanted + len(numbers))

    def finish_step(self, version: int, *, want: int) -> None:
        """See :meth:`RolloutBuffer.finish_step` and :meth:`want`; stops and books what is too old."""
        expired = self.buffer.finish_step(version)
        if self._closed:  # then all are stopped and booked
            return
        for group in expired.ready.values():
            self._drop(group, DropReason.STALE)
        for number in expired.running:
            self._stop(self._growing.pop(number), DropReason.STALE)
        self.want(want)

    async def close(self) -> None:
        """Stops everything for good, books it as cancelled and waits until it has stopped.

        To the buffer these groups stay open, so that its state says what has to be started again.
        """
        if not self._closed:
            self._closed = True
            for growing in self._growing.values():
                self._stop(growing, DropReason.CANCELLED)
            self._growing.clear()
            for group in self.buffer.ready_groups:
                self._drop(group, DropReason.CANCELLED)
            self._notify()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _fill(self) -> None:
        buffer = self.buffer
        limit = self._wanted + buffer.spare if self._wanted and not self._closed else 0
        while buffer.room and buffer.running + buffer.ready < limit:
            number, row = self._draw()
            growing = self._growing[number] = _Growing()
            growing.task = asyncio.create_task(self._run(buffer.admit(number), row, growing), name=f"group-{number}")
        self._notify()

    async def _run(self, ticket: Ticket, row: Any, growing: _Growing) -> None:
        try:
            group = await self._grow(ticket, row, lambda: growing.reason)
        except Exception as error:  # no trajectory's own: whoever waits for groups gets it
            self._error = self._error or error
            self._growing.pop(ticket.number, None)
            self._notify()
            return
        if self._growing.pop(ticket.number, None) is not growing:
            self._drop(group, growing.reason)  # it was complete in the very moment it was stopped
        elif not self.buffer.complete(ticket.number, group):
            self._drop(group, DropReason.STALE)
            self._fill()
        self._notify()

    def _stop(self, growing: _Growing, reason: DropReason) -> None:
        growing.reason = reason
        if growing.task is not None and not growing.task.done():
            growing.task.cancel()
            self._stopping.add(growing.task)
            growing.task.add_done_callback(self._stopping.discard)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
