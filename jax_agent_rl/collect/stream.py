"""Groups run concurrently and flow to the learner as they complete: the buffer with coroutines around it.

::

    draw ──► buffer.admit ──► a task per group ──► buffer.complete ──► take ──► learner
    (rows)        ▲             grow: engine,                                      │
                  │             tools, rewards                                     │
                  └──────────── room: finish_step, discard ◄───────────────────────┘

    grow (a task per group)  consumes: a ticket.         produces: a complete group.  waits for: engine, tools, reward.
    take                     consumes: complete groups.  produces: a batch.           waits for: enough of them.
    idle                     consumes, produces: nothing.                             waits for: the last task.

Whatever makes room starts groups at once; no coroutine polls. An error outside a trajectory ends the stream: every
``take`` and ``idle`` raises it.
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
    """A group's task, and the reason if it is stopped."""

    task: asyncio.Task[None] | None = None
    reason: DropReason = DropReason.CANCELLED


Draw = Callable[[], tuple[int, Any]]
Grow = Callable[[Ticket, Any, Callable[[], DropReason]], Awaitable[Group]]
Drop = Callable[[Group, DropReason], None]


class GroupStream:
    """See the module docstring. Use it from one event loop.

    Args:
        buffer: decides what may start and what may leave.
        draw: returns the next group's number and row.
        grow: runs the group of a ticket and a row. If cancelled, it drops what it had started with the reason that its
            third argument returns.
        drop: drops the members of a complete group.
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
        """Start ``count`` groups, which will be taken, and the buffer's oversampled ones, as far as there is room."""
        self._wanted = count
        self._fill()

    async def take(self, count: int) -> dict[int, Group]:
        """Return the next batch, by number; see :meth:`RolloutBuffer.take`.

        Raises:
            RuntimeError: the stream was closed.
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
        """Wait until no group is running."""
        while self._growing:
            self._check()
            await self._changed.wait()
        self._check()

    def discard(self, numbers: Collection[int], reason: DropReason) -> None:
        """Discard groups (see :meth:`RolloutBuffer.discard`), and start others in their place."""
        self.buffer.discard(numbers, reason)
        self.want(self._wanted + len(numbers))

    def finish_step(self, version: int, *, want: int) -> None:
        """Finish a step (see :meth:`RolloutBuffer.finish_step`), drop what is too old, and start ``want`` groups."""
        expired = self.buffer.finish_step(version)
        if self._closed:  # all are stopped and dropped
            return
        for group in expired.ready.values():
            self._drop(group, DropReason.STALE)
        for number in expired.running:
            self._stop(self._growing.pop(number), DropReason.STALE)
        self.want(want)

    async def close(self) -> None:
        """Stop everything for good, drop it as cancelled, and wait until it has stopped.

        In the buffer these groups stay open, so that its state names what a resumed run has to start again.
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
        limit = self._wanted + buffer.oversample if self._wanted and not self._closed else 0
        while buffer.room and buffer.running + buffer.ready < limit:
            number, row = self._draw()
            growing = self._growing[number] = _Growing()
            growing.task = asyncio.create_task(self._run(buffer.admit(number), row, growing), name=f"group-{number}")
        self._notify()

    async def _run(self, ticket: Ticket, row: Any, growing: _Growing) -> None:
        try:
            group = await self._grow(ticket, row, lambda: growing.reason)
        except Exception as error:  # outside a trajectory: raised to the caller that waits for groups
            self._error = self._error or error
            self._growing.pop(ticket.number, None)
            self._notify()
            return
        if self._growing.pop(ticket.number, None) is not growing:
            self._drop(group, growing.reason)  # it completed at the moment it was stopped
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
