"""An asyncio loop in virtual time: when nothing is ready, time jumps to the next timer."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from typing import Any


class SimulationStuckError(RuntimeError):
    """A deadlock in the simulation: nothing is ready and no timer is set."""


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits, and advances virtual time by the timeout instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise SimulationStuckError("nothing is left to happen in the simulation, but it has not ended")
            # Just past the timer: asyncio fires only timers that lie before the current time.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for coroutines that wait only for timers and for each other.

    Functions that would run in a thread run at once; their results arrive after the time they :meth:`spend`.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self._spent = 0.0
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._jumping.now

    def spend(self, seconds: float) -> None:
        """Add to the duration of the function that is running "in a thread"."""
        self._spent += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Run a function at once and return a future that is done after its virtual duration."""
        future = self.create_future()
        self._spent = 0.0
        try:
            result = func(*args)
        except Exception as error:
            self.call_later(self._spent, _settle, future, None, error)
        else:
            self.call_later(self._spent, _settle, future, result, None)
        return future


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # the waiter was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
