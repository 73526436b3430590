"""Who goes first when a run is interrupted: the optimizer update, or the save of the state before it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class UpdateAbandoned(Exception):
    """The step was given up before its first update; parameters and optimizer are as they were."""


class UpdateGate:
    """One step's updates pass through it, in the learner's thread; another thread may close it before the first.

    An update donates the buffers of the state it replaces. Closing the gate guarantees that they stay valid, even
    while the learner's thread is still busy with a compilation that nobody can stop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._passed = False

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Around one update; raises :class:`UpdateAbandoned` if the gate was closed."""
        with self._lock:
            if self._closed:
                raise UpdateAbandoned
            self._passed = True
            yield

    @property
    def passed(self) -> bool:
        """Whether an update has begun."""
        return self._passed

    def close(self) -> bool:
        """Lets no update begin; returns False if one has passed already: then the step must be finished."""
        with self._lock:
            self._closed = not self._passed
            return self._closed
