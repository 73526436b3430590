"""Cancellation of a step: whether its optimizer updates or the save of the state before them come first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class StepCancelled(Exception):
    """The step was cancelled; parameters and optimizer are as they were before it."""


class StepCancellation:
    """A gate that one step's updates pass in the learner's thread, and that another thread may close.

    An update donates the buffers of the state it replaces. Once the gate is closed, the learner's state is, and stays,
    that before the step, even while its thread is busy with a compilation that cannot be stopped. It can be closed
    before the first update, and up to the last one if the learner keeps the state before the step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._passed = 0  # updates that have begun, without those that changed nothing
        self._revocable = False

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Guard one update; raise :class:`StepCancelled` if the gate was closed."""
        with self._lock:
            if self._closed:
                raise StepCancelled
            self._passed += 1
            yield

    def unchanged(self) -> None:
        """Report, inside :meth:`update`, that the update was not finite and changed nothing."""
        self._passed -= 1

    @contextlib.contextmanager
    def revocable(self) -> Iterator[None]:
        """Guard all updates of a step whose state before is kept.

        Raises:
            StepCancelled: the gate was closed meanwhile; the caller of :meth:`close` relies on that state.
        """
        with self._lock:
            self._revocable = not self._closed
        try:
            yield
        except BaseException:
            with self._lock:
                self._closed = True
            raise
        with self._lock:
            self._revocable = False
        self.check()

    def check(self) -> None:
        """Raise :class:`StepCancelled` if the gate was closed."""
        if self._closed:
            raise StepCancelled

    @property
    def passed(self) -> bool:
        """Whether an update has begun that changes the state."""
        return self._passed > 0

    @property
    def half_way(self) -> bool:
        """Whether an update has begun that is not undone."""
        return self.passed and not self._closed

    def close(self) -> bool:
        """Let no more update begin; return False if one has passed for good: then the step must be finished."""
        with self._lock:
            self._closed = self._closed or self._revocable or not self.passed
            return self._closed
