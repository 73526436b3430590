"""Cancellation of a step: either its updates are finished, or the state before them stays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class StepCancelled(Exception):
    """The step was cancelled; parameters and optimizer are as they were before it."""


class StepCancellation:
    """Guards one step's updates in the learner's thread, and lets another thread cancel the step.

    An update donates the buffers of the state it replaces. Once the step is cancelled, no update
    begins any more: the learner's state stays the one before the step, even while its thread is
    busy with a compilation that cannot be stopped. A step can be cancelled before its first update,
    or until its end if the learner keeps a copy of the state before it.

    Attributes:
        meet: called before the lock is taken for a decision: waits for the learner's other
            processes.
        agree: takes whether the step was cancelled here; returns whether it is cancelled on all
            processes.
    """

    def __init__(self) -> None:
        self.meet: Callable[[], None] = lambda: None
        self.agree: Callable[[bool], bool] = lambda cancelled: cancelled
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._changing_updates = 0  # updates that have begun, without those that changed nothing
        self._can_be_undone = False  # the state before the step is kept

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Guard one update; raise :class:`StepCancelled` if the step was cancelled."""
        self.meet()
        with self._lock:
            self.check()
            self._changing_updates += 1
            yield

    def unchanged(self) -> None:
        """Report, inside :meth:`update`, that the update was not finite and changed nothing."""
        self._changing_updates -= 1

    @contextlib.contextmanager
    def revocable(self) -> Iterator[None]:
        """Guard all updates of a step whose previous state is kept.

        It may be nested: then the inner context guards a part of the updates.

        Raises:
            StepCancelled: the step was cancelled meanwhile. The caller of :meth:`cancel` relies on
                the previous state.
        """
        with self._lock:
            could_be_undone = self._can_be_undone
            self._can_be_undone = not self._is_cancelled
        try:
            yield
        except BaseException:
            with self._lock:
                self._is_cancelled = True
            raise

        self.meet()
        with self._lock:
            self._can_be_undone = could_be_undone
            self.check()

    def check(self) -> None:
        """Raise :class:`StepCancelled` if the step was cancelled."""
        if self.agree(self._is_cancelled):
            self._is_cancelled = True
            raise StepCancelled

    @property
    def has_begun(self) -> bool:
        """Whether an update has begun that changes the state."""
        return self._changing_updates > 0

    @property
    def is_partly_applied(self) -> bool:
        """Whether an update has begun that is not undone."""
        return self.has_begun and not self._is_cancelled

    def cancel(self) -> bool:
        """Let no more update begin.

        Returns:
            False if an update has begun that cannot be undone: then the step must be finished.
        """
        with self._lock:
            if self._can_be_undone or not self.has_begun:
                self._is_cancelled = True
            return self._is_cancelled
