"""Hands traces to sinks, each in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextvars import copy_context
from typing import Protocol

from jax_agent_rl.tracing import Trace

logger = logging.getLogger(__name__)

ROOM = 256
"""Traces that wait for a sink; more are lost."""
PATIENCE = 30.0
"""Seconds that all sinks together get to finish when a run ends."""
MAX_FAILURES = 5
"""In a row, after which a sink gets nothing more."""


class TraceSink(Protocol):
    """Where traces go. Called from one thread, which is not the event loop's; may raise."""

    def write(self, trace: Trace) -> None:
        """Writes one trace."""

    def close(self) -> None:
        """Sends what is still to be sent."""


class TraceWriter:
    """Call it with a trace; it returns at once.

    Args:
        sinks: by name.
        room: traces that may wait for each.

    Attributes:
        lost: by name of the sink, traces that it could not take or that it failed to write.
    """

    def __init__(self, sinks: Mapping[str, TraceSink], *, room: int = ROOM) -> None:
        self.lost = dict.fromkeys(sinks, 0)
        self._queues: dict[str, queue.Queue[Trace | None]] = {name: queue.Queue(room) for name in sinks}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=copy_context().run, args=(self._work, name, sink), name=f"traces-{name}", daemon=True
            )
            for name, sink in sinks.items()  # in the context they were opened in: clients keep settings there
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, trace: Trace) -> None:
        for name, waiting in self._queues.items():
            try:
                waiting.put_nowait(trace)
            except queue.Full:
                self.lost[name] += 1

    def close(self, patience: float = PATIENCE) -> None:
        """Lets the sinks finish, up to ``patience`` seconds, and says what was lost."""
        self._closing.set()
        for waiting in self._queues.values():
            try:
                waiting.put_nowait(None)  # wakes the thread; if there is no room it is awake
            except queue.Full:
                continue
        until = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for thread, (name, lost) in zip(self._threads, self.lost.items(), strict=True):
            unwritten = self._queues[name].qsize() if thread.is_alive() else 0
            if lost or thread.is_alive():
                logger.warning("%d traces did not reach %s", lost + unwritten, name)

    def _work(self, name: str, sink: TraceSink) -> None:
        failures, waiting = 0, self._queues[name]
        while not (self._closing.is_set() and waiting.empty()):
            trace = waiting.get()
            if trace is None:
                continue
            if failures >= MAX_FAILURES:
                self.lost[name] += 1
                continue
            try:
                sink.write(trace)
                failures = 0
            except Exception as error:
                failures += 1
                self.lost[name] += 1
                ends = "; it gets no more" if failures == MAX_FAILURES else ""
                logger.warning("%s did not take a trace: %s: %s%s", name, type(error).__name__, error, ends)
        try:
            sink.close()
        except Exception as error:
            logger.warning("%s could not be closed: %s: %s", name, type(error).__name__, error)
