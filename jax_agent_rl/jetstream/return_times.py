"""When sessions come back from their tools, learned from when earlier ones did. No device, no threads.

Keeping a waiting session's KV is a bet: memory is spent until the session returns, and what is won is that nothing is
computed again. With ``T`` the time of return of a session that has waited ``w`` seconds, the best bet on it pays

    rate(w) = max over h of  P(T <= w + h | T > w) / E[min(T, w + h) - w | T > w]

returns per second of keeping: its Gittins index (Gittins 1979, "Bandit Processes and Dynamic Allocation Indices"). It
rises while a session waits if tools take about the same time in every call, and falls if a few calls take very long.
The distribution is that of recent waits; since the next call of a session often takes about as long as its last one,
waits are told apart by the length of the wait before them. One more wait that never ends stands for sessions that do
not come back. A few samples say nothing of a short time, so ``h`` spans at least an eighth of ``w`` and of the returns.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RECENT_WAITS = 128
MIN_WAITS = 8
"""Fewer waits of a kind say less than those of all kinds."""
MIN_HORIZON = 1 / 8
MAX_SESSIONS = 1 << 14
"""Sessions remembered; those that never come back and never end would otherwise add up."""
STEPS_PER_DOUBLING = 8
"""Resolution of the time a session has waited."""


class RecentWaits:
    """The latest waits of a kind."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=RECENT_WAITS)
        self._sorted = np.zeros(0)
        self._rates: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, seconds: float) -> None:
        self._waits.append(seconds)
        self._sorted = np.sort(np.array(self._waits))
        self._rates.clear()

    def rate(self, waited: float) -> float:
        """Return the index of the module docstring, to the resolution of ``waited``."""
        step = math.floor(STEPS_PER_DOUBLING * math.log2(max(waited, 1e-3)))
        if step not in self._rates:
            self._rates[step] = self._index(2 ** (step / STEPS_PER_DOUBLING))
        return self._rates[step]

    def _index(self, waited: float) -> float:
        """Return the index; past the longest wait, as if one more session took as long again."""
        rest = self._sorted[bisect.bisect_right(self._sorted, waited) :] - waited
        if not len(rest):
            return 1 / ((len(self._waits) + 1) * waited)
        horizons = np.maximum(rest, MIN_HORIZON * waited)[math.ceil(MIN_HORIZON * len(rest)) - 1 :]
        returns = np.searchsorted(rest, horizons, side="right")
        spent = np.cumsum(rest)[returns - 1] + (len(rest) + 1 - returns) * horizons
        return float(np.max(returns / spent))


@dataclass(slots=True)
class _Session:
    left: float | None = None  # when it began to wait; None while it is queued or runs
    previous: float | None = None  # its last wait


class ReturnTimes:
    """Records when sessions leave for their tools and come back, and estimates when waiting ones will.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}  # the latest last
        self._all = RecentWaits()
        self._kinds: dict[int | None, RecentWaits] = {}

    def leave(self, session: str) -> None:
        """Begin to wait: the session's request ended and another one will come."""
        self._latest(session).left = self._clock()

    def come_back(self, session: str) -> None:
        """End the wait of a session, if it had begun: its next request is here."""
        known = self._latest(session)
        if known.left is not None:
            wait = self._clock() - known.left
            self._all.add(wait)
            self._kinds.setdefault(_kind(known.previous), RecentWaits()).add(wait)
            known.left, known.previous = None, wait

    def forget(self, session: str) -> None:
        """Drop a session of which no further request is expected."""
        self._sessions.pop(session, None)

    def rate(self, session: str) -> float:
        """Return the returns per second of keeping this session's KV.

        It is infinite for a session whose next request is queued, and 0 for an unknown one or while there is nothing
        to learn from.
        """
        known = self._sessions.get(session)
        if known is None:
            return 0.0
        if known.left is None:
            return math.inf
        kind = self._kinds.get(_kind(known.previous), self._all)
        waits = kind if len(kind) >= MIN_WAITS else self._all
        return waits.rate(self._clock() - known.left) if len(waits) >= MIN_WAITS else 0.0

    def _latest(self, session: str) -> _Session:
        known = self._sessions[session] = self._sessions.pop(session, None) or _Session()
        if len(self._sessions) > MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        return known


def _kind(previous: float | None) -> int | None:
    """Tell waits apart by the wait before them, to a factor of four."""
    return None if previous is None else round(math.log2(max(previous, 1e-3)) / 2)
