"""Time limits of trajectories and the rule by which a group is complete, on the event loop's clock.

::

    member starts ──► runs ──► ends in time                          counts for min_group_size if it survived
                        ├────► trajectory_timeout is over            dropped: trajectory_timeout
                        └────► group_timeout is over since the last  dropped: straggler
                               member started, and min_group_size
                               members have survived

So every group ends within ``trajectory_timeout`` of the start of its last member, whatever agents, tools and rewards
wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from jax_agent_rl.types import DropReason

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """Time limits in seconds.

    Attributes:
        trajectory_timeout: maximum of one trajectory, its reward included; None: unlimited.
        min_group_size: surviving members with which a group is complete after ``group_timeout``; None: all have to end.
        group_timeout: since the last member started.
    """

    trajectory_timeout: float | None = None
    min_group_size: int | None = None
    group_timeout: float = 0.0


NO_LIMITS = TimeLimits()


class GroupDeadlines:
    """The time limits of the trajectories of one wave of a group.

    Args:
        limits: the limits.
        members: number of trajectories that will start.
    """

    def __init__(self, limits: TimeLimits, members: int) -> None:
        self._limits = limits
        self._not_started = members
        self._survived = 0
        self._running: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = self._cut = False

    async def limit(self, run: Coroutine[Any, Any, T | DropReason]) -> T | DropReason:
        """Run one member, which returns a reason if it is lost, and return its result or why it was stopped."""
        deadline = asyncio.timeout(self._limits.trajectory_timeout)
        try:
            async with deadline:
                self._running.add(deadline)
                self._start()
                result = await run
        except TimeoutError:
            if not deadline.expired():
                raise
            return DropReason.STRAGGLER if self._cut else DropReason.TRAJECTORY_TIMEOUT
        finally:
            self._running.discard(deadline)
        self._survived += not isinstance(result, DropReason)
        self._cut_stragglers()
        return result

    def recall(self, *, survived: bool) -> None:
        """Count a member that had ended before the run was resumed."""
        self._survived += survived
        self._start()

    def close(self) -> None:
        """Stop the clock; all members have ended."""
        if self._timer is not None:
            self._timer.cancel()

    def explain(self, reason: DropReason) -> str:
        """Return the limit that a stopped member ran past."""
        if reason is DropReason.TRAJECTORY_TIMEOUT:
            return f"it ran past rollout.trajectory_timeout={self._limits.trajectory_timeout:g} s"
        return (
            f"rollout.min_group_size={self._limits.min_group_size} others had ended after "
            f"rollout.group_timeout={self._limits.group_timeout:g} s"
        )

    def _start(self) -> None:
        self._not_started -= 1
        if self._not_started == 0 and self._limits.min_group_size is not None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.group_timeout, self._time_out)

    def _time_out(self) -> None:
        self._overdue = True
        self._cut_stragglers()

    def _cut_stragglers(self) -> None:
        least = self._limits.min_group_size
        if self._cut or not self._overdue or least is None or self._survived < least:
            return
        self._cut = True
        for deadline in (d for d in self._running if not d.expired()):
            deadline.reschedule(asyncio.get_running_loop().time())
