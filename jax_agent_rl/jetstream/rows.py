"""Which context's keys and values stand in which cache row. A plain class: no device, no threads.

A row is *active* while a request runs in it, then *retired*: its KV stays, so the next turn of the trajectory (or
another sample of the same prompt) computes only what is new. Rows are found by longest common prefix, reused in place
where that loses nothing, copied from where another context still needs them, and given up oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a request goes: ``row`` will hold ``reused`` of its ids, after copying row ``copy_from`` if not None."""

    row: int
    reused: int
    copy_from: int | None


class RowTable:
    """The bookkeeping of ``rows`` cache rows of ``length`` positions.

    >>> table = RowTable(rows=2, length=8)
    >>> first = table.place([1, 2, 3], session=None)
    >>> (first.row, first.reused, first.copy_from)
    (0, 0, None)
    >>> table.set_ids(first.row, [1, 2])          # the last id of a prompt is fed by the first decode step
    >>> table.place([1, 2, 9], session=None)      # shares two ids with row 0, which is active: copy them
    Placement(row=1, reused=2, copy_from=0)
    """

    def __init__(self, rows: int, length: int) -> None:
        self._ids = np.full((rows, length), -1, np.int32)
        self._count = np.zeros(rows, np.int64)
        self._active = np.zeros(rows, bool)
        self._shareable = np.ones(rows, bool)
        self._ended = np.ones(rows, bool)
        self._used = np.zeros(rows, np.int64)
        self._session: list[str | None] = [None] * rows
        self._clock = 0

    def place(self, prompt: Sequence[int] | np.ndarray, session: str | None) -> Placement | None:
        """Finds and takes a row for a prompt, or returns None while every row is active.

        At most ``len(prompt) - 1`` ids are reused: the last one is what the first decode step feeds.
        """
        ids = np.asarray(prompt, np.int32)[:-1]
        common = self._common_prefixes(ids)
        source = int(np.argmax(common))
        reused = int(common[source])
        row = self._own_row(session)
        if row is None or common[row] < reused:
            # Not a continuation (or another row knows more of it): take the row that is missed least.
            if row is not None:
                self._ended[row], self._session[row] = True, None
            row = self._row_to_give_up(keep=source if reused else None)
            if row is None:
                return None
        copy_from = source if reused and row != source and common[row] < reused else None
        self._take(row, ids[:reused], session)
        self._used[source] = self._clock
        return Placement(row=row, reused=reused, copy_from=copy_from)

    def set_ids(self, row: int, ids: Sequence[int] | np.ndarray) -> None:
        """The row now holds the KV of exactly these ids."""
        self._ids[row, : len(ids)] = ids
        self._count[row] = len(ids)

    def append(self, row: int, ids: Sequence[int]) -> None:
        """The row's KV grew by these ids."""
        begin = self._count[row]
        self._ids[row, begin : begin + len(ids)] = ids
        self._count[row] += len(ids)

    def ids(self, row: int) -> np.ndarray:
        """int32: the ids whose KV the row holds."""
        return self._ids[row, : self._count[row]]

    def release(self, row: int, *, session_ends: bool) -> None:
        """The request in this row is over; its KV stays for the next turn."""
        self._clock += 1
        self._used[row] = self._clock
        self._active[row] = False
        self._ended[row] = session_ends or self._session[row] is None
        if not self._shareable[row]:
            self._forget(row)

    def reset(self) -> None:
        """Forgets every retired row; active ones keep running but are never shared again (new weights)."""
        for row in range(len(self._count)):
            if self._active[row]:
                self._shareable[row] = False
            else:
                self._forget(row)

    def _common_prefixes(self, ids: np.ndarray) -> np.ndarray:
        """int64 [rows]: how many leading ids each row shares with ``ids``."""
        equal = self._ids[:, : len(ids)] == ids
        first_difference = np.where(equal.all(axis=1), len(ids), np.argmin(equal, axis=1) if len(ids) else 0)
        return np.where(self._shareable, np.minimum(first_difference, self._count), 0)

    def _own_row(self, session: str | None) -> int | None:
        if session is None:
            return None
        return next((r for r, s in enumerate(self._session) if s == session and not self._active[r]), None)

    def _row_to_give_up(self, keep: int | None) -> int | None:
        """The retired row whose loss costs least: empty, then of ended sessions, then least recently used."""
        retired = [r for r in range(len(self._count)) if not self._active[r]]
        if not retired:
            return None
        spare = [r for r in retired if r != keep] or retired
        return min(spare, key=lambda r: (self._count[r] > 0, not self._ended[r], self._used[r]))

    def _take(self, row: int, ids: np.ndarray, session: str | None) -> None:
        self._clock += 1
        self._active[row] = True
        self._shareable[row] = True
        self._ended[row] = False
        self._used[row] = self._clock
        self._session[row] = session
        self.set_ids(row, ids)

    def _forget(self, row: int) -> None:
        self._count[row] = 0
        self._shareable[row] = True
        self._ended[row] = True
        self._session[row] = None
