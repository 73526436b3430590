"""Instances that take long to start, started before somebody needs them.

::

    take(key) ──► a prepared one of this key ──it failed──┐
                     ready, or starting: wait for it      ▼
                  none ─────────────────────────────► start it ──► the caller's
                                                                      │
                  a replacement starts in the background ◄────────────┘

            consumes         produces             waits for
    take    a prepared one   an instance          its start, or one of its own
    start   nothing          a prepared instance  nothing: a task for each; ``close`` ends them

Each take prepares a replacement, and another one if the caller had to wait and there is room: so
there are soon as many as are needed, but at most ``size``. A replacement without room takes the
place of an instance whose key was taken longest ago. An instance is handed out once: the pool takes
none back.

A start in the background that fails costs nobody anything: whoever takes it starts an instance of
its own. The pool does not try again by itself, so what always fails is tried as often as it is
taken.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(Generic[T]):
    """An instance that was taken from a pool.

    Attributes:
        seconds: that the caller waited for it.
        was_ready: whether it had been started before it was asked for.
        failed_preparations: number of prepared ones that had failed before it.
    """

    instance: T
    seconds: float
    was_ready: bool
    failed_preparations: int


@dataclass(eq=False)
class _Prepared(Generic[K, T]):
    """An instance that nobody has taken: its key, and the task that starts it."""

    key: K
    task: asyncio.Task[T]

    @property
    def rank(self) -> int:
        """Order in which instances are taken: those that are ready, starting, failed."""
        if not self.task.done():
            return 1
        if self.task.cancelled() or self.task.exception() is not None:
            return 2
        return 0


class InstancePool(Generic[K, T]):
    """Prepared instances by key. Use it from one event loop.

    Args:
        close: closes an instance that nobody took; must not raise.
        size: maximum number of prepared instances, starting ones included; 0 prepares none.
        report: told of each start in the background that failed.
        clock: seconds; None is the event loop's.
    """

    def __init__(
        self,
        *,
        close: Callable[[T], Awaitable[None]],
        size: int,
        report: Callable[[BaseException], None] = lambda error: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._close = close
        self._size = size
        self._report = report
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        # Those of the key that was taken longest ago come first.
        self._prepared: list[_Prepared[K, T]] = []
        self._disposals: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def take(self, key: K, start: Callable[[], Awaitable[T]]) -> Started[T]:
        """Return an instance, and prepare a replacement.

        Args:
            key: instances of equal keys are interchangeable.
            start: starts one of this key, in bounded time. If it raises or is cancelled, it leaves
                nothing behind.

        Raises:
            Exception: whatever ``start`` raised, called for this caller.
        """
        began = self._clock()
        failed_preparations = 0
        prepared = self._pop(key)
        was_ready = prepared is not None and prepared.task.done()
        if prepared is None:
            instance = await start()
        else:
            try:
                instance = await asyncio.shield(prepared.task)
            except asyncio.CancelledError:
                self._dispose(prepared)
                raise
            except Exception:  # reported when it failed
                failed_preparations = 1
                was_ready = False
                instance = await start()

        self._prepare(key, start)
        has_room = len(self._prepared) < self._size
        if has_room and not was_ready and not failed_preparations:
            self._prepare(key, start)
        return Started(
            instance=instance,
            seconds=self._clock() - began,
            was_ready=was_ready,
            failed_preparations=failed_preparations,
        )

    async def close(self) -> None:
        """Close what nobody took; what is taken from now on has no replacement."""
        self._is_closed = True
        for prepared in self._prepared:
            self._dispose(prepared)
        self._prepared = []
        await asyncio.gather(*self._disposals)

    def _pop(self, key: K) -> _Prepared[K, T] | None:
        """Remove and return the best prepared instance of a key."""
        candidates = [prepared for prepared in self._prepared if prepared.key == key]
        if not candidates:
            return None
        best = min(candidates, key=lambda prepared: prepared.rank)
        self._prepared.remove(best)
        return best

    def _prepare(self, key: K, start: Callable[[], Awaitable[T]]) -> None:
        """Start an instance of a key that was just taken, if there is room."""
        if self._is_closed or self._size == 0:
            return

        same_key = [prepared for prepared in self._prepared if prepared.key == key]
        other_keys = [prepared for prepared in self._prepared if prepared.key != key]
        self._prepared = other_keys + same_key
        if len(self._prepared) >= self._size:
            if not other_keys:
                return
            self._dispose(self._prepared.pop(0))

        async def run() -> T:
            return await start()

        # Without the caller's context: its trace ends with its trajectory.
        task = asyncio.create_task(run(), context=contextvars.Context())
        task.add_done_callback(self._note_end)
        self._prepared.append(_Prepared(key, task))

    def _note_end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._report(error)

    def _dispose(self, prepared: _Prepared[K, T]) -> None:
        """Stop the start of an instance, and close it if it has started."""

        async def dispose() -> None:
            task = prepared.task
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                await self._close(task.result())

        disposal = asyncio.create_task(dispose(), context=contextvars.Context())
        self._disposals.add(disposal)
        disposal.add_done_callback(self._disposals.discard)
