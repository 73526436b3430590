"""Which engines accept requests and never answer them: a plain class without clocks or asyncio."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

_UNPROVEN = 3
"""An engine that has not sampled anything yet may be compiling: it has so many times as long."""

_UPDATING = 10
"""An engine that takes weights stands still for good reason: it has so many times as long."""


@dataclass(kw_only=True, slots=True)
class _Reading:
    """What an engine had done when something last changed, and when that was."""

    done: tuple[int, ...] | None
    since: float


class StallWatch:
    """Compares an engine's counters from look to look.

    Args:
        stall_seconds: how long an engine may have requests inside without any of its counters moving.
    """

    def __init__(self, stall_seconds: float):
        self._stall_seconds = stall_seconds
        self._readings: weakref.WeakKeyDictionary[object, _Reading] = weakref.WeakKeyDictionary()

    def look(self, server: object, done: tuple[int, ...] | None, *, now: float, inside: bool, updating: bool) -> bool:
        """Whether the engine has stalled.

        Args:
            server: whose engine it is.
            done: its counters; None if it did not even say them.
            now: seconds.
            inside: whether there are requests inside.
            updating: whether it takes weights.
        """
        reading = self._readings.setdefault(server, _Reading(done=done, since=now))
        moved = done is not None and done != reading.done
        if moved:
            reading.done = done
        if moved or not (inside or updating):
            reading.since = now
        proven = any(reading.done or ())
        patience = self._stall_seconds * (_UPDATING if updating else 1 if proven else _UNPROVEN)
        return now - reading.since > patience
