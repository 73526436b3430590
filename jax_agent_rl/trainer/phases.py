"""When a trainer did what, for the timeline of ``jax-agent-rl report``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Phases:
    """Collects what has ended since it was last asked.

    Args:
        clock: seconds, monotonic.
        wall: seconds since the epoch; read once, so that phases never overlap because the system's clock was set.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._epoch = wall() - clock()
        self._ended: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Around a phase; one that fails or is interrupted counts, too."""
        began = self._clock()
        try:
            yield
        finally:
            self.ended(name, self._clock() - began)

    def ended(self, name: str, seconds: float) -> None:
        """A phase of so many seconds ends now."""
        now = self._epoch + self._clock()
        self._ended.append((name, now - seconds, now))

    def take(self) -> list[list[str | float]]:
        """``[name, begin, end]`` of each, in seconds since the epoch."""
        taken = [[name, round(begin, 3), round(end, 3)] for name, begin, end in self._ended]
        self._ended.clear()
        return taken
