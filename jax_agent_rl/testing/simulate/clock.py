"""An asyncio loop in virtual time: when nothing is ready, it is at once the time of the next timer."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from typing import Any


class SimulationStuckError(RuntimeError):
    """Nothing is ready and no timer is set: everything waits for something that will never happen."""


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing; tells the loop how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise SimulationStuckError("nothing is left to happen in the simulation, but it has not ended")
            # Past the timer, however little: asyncio does not fire one whose time it is, only those before.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines that wait for timers and for each other, not for the world outside.

    What would run in a thread runs at once, and counts as done after the seconds it says it :meth:`spend` s.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        self._spent = 0.0
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def spend(self, seconds: float) -> None:
        """Says how long the function takes that runs "in a thread" now."""
        self._spent += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """The future of a function that has run already, done when its virtual time is over."""
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
    if future.done():  # whoever waited gave up
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
