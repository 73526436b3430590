"""What happens to running requests when an engine pauses."""

from __future__ import annotations

from enum import StrEnum


class PauseMode(StrEnum):
    """What :meth:`RolloutBackend.pause` does with requests that are running."""

    KEEP = "keep"
    """Freeze them; they continue after ``resume`` (possibly under new weights)."""
    WAIT = "wait"
    """Let them finish, admit no new ones, return when the engine is idle."""
    ABORT = "abort"
    """End them now with ``StopReason.ABORTED``; the caller resumes them."""
