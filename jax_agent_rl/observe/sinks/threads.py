"""Sinks, each fed in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)


class Sink(Protocol[ItemIn]):
    """A library that stores metrics or traces.

    Both methods are called in one thread, and may raise.
    """

    def write(self, item: ItemIn, /) -> None:
        """Store one item."""

    def close(self) -> None:
        """Store everything written so far permanently; also called after a failure."""


class SinkThread(Generic[Item]):
    """Feeds a sink in its own thread, which starts at once.

    Args:
        name: the sink's name in the configuration.
        print_line: prints a message for the user; called in any thread.
        start: called first, in the thread; if it fails, every item is lost.
        capacity: number of items that may wait; further ones are lost. 0 means no limit.
        max_failures: consecutive failures after which the sink gets nothing more; None means no
            limit.
        context: context of the thread, by default a new one. Clients keep settings, and their
            current run, in contexts.

    Attributes:
        lost: number of items that the sink did not store.
    """

    def __init__(
        self,
        name: str,
        sink: Sink[Item],
        *,
        print_line: Callable[[str], None],
        start: Callable[[], None] = lambda: None,
        capacity: int = 0,
        max_failures: int | None = None,
        context: Context | None = None,
    ) -> None:
        self.name = name
        self.num_lost = 0
        self._sink = sink
        self._print_line = print_line
        self._start = start
        self._max_failures = max_failures
        self._failure_reported = False
        self._items: queue.Queue[Item | None] = queue.Queue(capacity)  # None wakes the thread
        self._ending = threading.Event()
        if context is None:
            context = Context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=f"sink-{name}", daemon=True
        )
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item and return at once."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.num_lost += 1

    def end(self) -> None:
        """Accept no more items; the thread writes the queued ones and closes the sink."""
        self._ending.set()
        with suppress(queue.Full):  # a thread with a full queue is awake
            self._items.put_nowait(None)

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the thread to end; report it if it does not."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.num_lost += self._items.qsize()
            self._print_line(f"{self.name} did not finish in time")

    def _run(self) -> None:
        """Feed the sink until :meth:`end`: the thread's work."""
        is_enabled = self._try("cannot start", self._start)
        failures = 0
        while not (self._ending.is_set() and self._items.empty()):
            item = self._items.get()
            if item is None:
                continue
            if is_enabled and self._try("failed", lambda item=item: self._sink.write(item)):
                failures = 0
                continue

            self.num_lost += 1
            failures += 1
            if is_enabled and failures == self._max_failures:
                is_enabled = False
                self._print_line(f"{self.name} failed {failures} times in a row and is disabled")
        self._try("cannot be closed", self._sink.close)

    def _try(self, what_failed: str, action: Callable[[], None]) -> bool:
        """Return whether an action succeeded; report only the sink's first failure."""
        try:
            action()
        except Exception as error:  # libraries raise anything
            if not self._failure_reported:
                self._failure_reported = True
                self._print_line(
                    f"{self.name} {what_failed} ({type(error).__name__}: {error}); the run"
                    " continues"
                )
            return False
        return True


class SinkThreads(Generic[Item]):
    """The sinks of a run, each in its thread."""

    def __init__(self, threads: Sequence[SinkThread[Item]]) -> None:
        self._threads = threads

    def put(self, item: Item) -> None:
        """Queue an item for every sink and return at once."""
        for thread in self._threads:
            thread.put(item)

    def lost(self) -> dict[str, int]:
        """Return the number of items lost by each sink that lost any."""
        return {thread.name: thread.num_lost for thread in self._threads if thread.num_lost}

    def close(self, seconds: float) -> None:
        """Let all sinks finish, for up to ``seconds`` together."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
