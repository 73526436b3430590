"""One queue and one thread per sink, so that no library, network or full disk can stop or slow training."""

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
    """A library that stores metrics or traces. Both methods are called in one thread, and may raise."""

    def write(self, item: ItemIn, /) -> None:
        """Store one item."""

    def close(self) -> None:
        """Store everything written so far for good. Also called after a failure."""


class SinkThread(Generic[Item]):
    """Feeds a sink in a thread of its own, which starts at once.

    Args:
        name: as configured.
        sink: what is fed.
        say: takes a message for the user, from any thread.
        start: called first, in the thread; if it fails, every item is lost.
        capacity: items that may wait; further ones are lost. 0: any number.
        max_failures: failures in a row after which the sink gets nothing more; None: it is always tried again.
        context: runs the thread; a new one if None. Clients keep settings, and their current run, in contexts.

    Attributes:
        lost: items that the sink did not store.
    """

    def __init__(
        self,
        name: str,
        sink: Sink[Item],
        *,
        say: Callable[[str], None],
        start: Callable[[], None] = lambda: None,
        capacity: int = 0,
        max_failures: int | None = None,
        context: Context | None = None,
    ) -> None:
        self.name = name
        self.lost = 0
        self._sink, self._say, self._start, self._max_failures = sink, say, start, max_failures
        self._said = False
        self._items: queue.Queue[Item | None] = queue.Queue(capacity)
        self._ending = threading.Event()
        run = (context or Context()).run
        self._thread = threading.Thread(target=run, args=(self._run,), name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item and return at once."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.lost += 1

    def end(self) -> None:
        """Accept no more items; the thread writes the queued ones and closes the sink."""
        self._ending.set()
        with suppress(queue.Full):  # a thread with a full queue needs no waking
            self._items.put_nowait(None)

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the thread to end; otherwise abandon it and say so."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.lost += self._items.qsize()
            self._say(f"{self.name} did not finish in time")

    def _run(self) -> None:
        works, failures = self._try("cannot begin", self._start), 0
        while not (self._ending.is_set() and self._items.empty()):
            if (item := self._items.get()) is None:
                continue
            if works and self._try("failed", lambda item=item: self._sink.write(item)):
                failures = 0
                continue
            self.lost += 1
            failures += 1
            if works and failures == self._max_failures:
                works = False
                self._say(f"{self.name} failed {failures} times in a row and gets no more")
        self._try("cannot end", self._sink.close)

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        """Return whether the action succeeded. Only the first failure is reported; libraries raise anything."""
        try:
            action()
        except Exception as error:
            if not self._said:
                self._said = True
                self._say(f"{self.name} {what} ({type(error).__name__}: {error}); the run goes on")
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
        return {thread.name: thread.lost for thread in self._threads if thread.lost}

    def close(self, seconds: float) -> None:
        """Let all sinks finish, for up to ``seconds`` together."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
