"""Cancellation of a step: whether its optimizer updates or the save of the state before them come first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class StepCancelled(Exception):
    """The step was cancelled; parameters and optimizer are as they were before it."""


class StepCancellation:
    """Guards one step's updates in the learner's thread, and lets another thread cancel the step.

    An update donates the buffers of the state it replaces. Once the step is cancelled, the learner's state is, and
    stays, that before it, even while its thread is busy with a compilation that cannot be stopped. A step can be
    cancelled before its first update, and up to the last one if the learner keeps the state before the step.

    Attributes:
        meet: called before the lock is taken for a decision: waits for the learner's other processes.
        agree: takes whether the step was cancelled here; returns whether it is cancelled on all processes.
    """

    def __init__(self) -> None:
        self.meet: Callable[[], None] = lambda: None
        self.agree: Callable[[bool], bool] = lambda cancelled: cancelled
        self._lock = threading.Lock()
        self._cancelled = False
        self._begun = 0  # updates, without those that changed nothing
        self._revocable = False

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Guard one update; raise :class:`StepCancelled` if the step was cancelled."""
        self.meet()
        with self._lock:
            self.check()
            self._begun += 1
            yield

    def unchanged(self) -> None:
        """Report, inside :meth:`update`, that the update was not finite and changed nothing."""
        self._begun -= 1

    @contextlib.contextmanager
    def revocable(self) -> Iterator[None]:
        """Guard all updates of a step whose state before is kept; inside another one, a part of them.

        Raises:
            StepCancelled: the step was cancelled meanwhile; the caller of :meth:`cancel` relies on that state.
        """
        with self._lock:
            outer, self._revocable = self._revocable, not self._cancelled
        try:
            yield
        except BaseException:
            with self._lock:
                self._cancelled = True
            raise
        self.meet()
        with self._lock:
            self._revocable = outer
            self.check()

    def check(self) -> None:
        """Raise :class:`StepCancelled` if the step was cancelled."""
        if self.agree(self._cancelled):
            self._cancelled = True
            raise StepCancelled

    @property
    def has_begun(self) -> bool:
        """Whether an update has begun that changes the state."""
        return self._begun > 0

    @property
    def is_partly_applied(self) -> bool:
        """Whether an update has begun that is not undone."""
        return self.has_begun and not self._cancelled

    def cancel(self) -> bool:
        """Let no more update begin; return False if one has begun for good: then the step must be finished."""
        with self._lock:
            self._cancelled = self._cancelled or self._revocable or not self.has_begun
            return self._cancelled
