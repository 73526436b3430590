"""Environments of trajectories: opened when needed, closed exactly once.

An environment is taken out of its trajectory *before* it is closed, here and nowhere else; whoever comes second finds
nothing to close. One lock per trajectory keeps its actions in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.plugin import ServerTool
from jax_agent_rl.tool_server.telemetry import Telemetry

logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 15.0
_REMEMBERED = 10_000


class CloseReason(StrEnum):
    """Why an environment was closed."""

    FINISH = "finish"
    """The client said that the trajectory is over."""
    LAST_STEP = "last_step"
    """It was the trajectory's last action."""
    DONE = "done"
    """The tool said that the trajectory is over."""
    ABORT = "abort"
    """The client went away, or the time was up, in the middle of an action: what it left behind is unknown."""
    IDLE = "idle"
    """Nothing happened for ``idle_seconds``."""
    SHUTDOWN = "shutdown"
    """The server stops."""


_SURPRISING = {
    CloseReason.ABORT: "it was interrupted in the middle of an action",
    CloseReason.IDLE: "it was unused for too long",
}


class ToolTrajectory:
    """One trajectory's environments, by tool. Only to be touched inside :meth:`Environments.enter`."""

    def __init__(self, trajectory_id: str, last_used: float):
        self.id = trajectory_id
        self.last_used = last_used
        self.users = 0
        self.lock = asyncio.Lock()
        self.open: dict[str, Any] = {}


class Environments:
    """All trajectories of a worker.

    Args:
        tools: by name.
        telemetry: where openings and closings are counted.
        limit: most environments open at the same time.
        idle_seconds: after which an unused one is closed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tools: Mapping[str, ServerTool],
        telemetry: Telemetry,
        *,
        limit: int,
        idle_seconds: float,
        clock: Callable[[], float],
    ):
        self._tools = tools
        self._telemetry = telemetry
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._trajectories: dict[str, ToolTrajectory] = {}
        self._gone: OrderedDict[str, CloseReason] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._count = 0

    @property
    def count(self) -> int:
        """Environments that are open, being opened or being closed."""
        return self._count

    @asynccontextmanager
    async def enter(self, trajectory_id: str) -> AsyncIterator[ToolTrajectory]:
        """Lock a trajectory for one action."""
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            trajectory = self._trajectories[trajectory_id] = ToolTrajectory(trajectory_id, self._clock())
        trajectory.users += 1
        try:
            async with trajectory.lock:
                yield trajectory
        finally:
            trajectory.users -= 1
            trajectory.last_used = self._clock()
            if not trajectory.users and not trajectory.open:
                del self._trajectories[trajectory_id]

    async def of(self, trajectory: ToolTrajectory, tool: ServerTool, extra: Mapping[str, Any]) -> Any:
        """Return the tool's environment in this trajectory, opening it if need be; None for a stateless tool.

        Raises:
            ToolError: too many are open.
        """
        if not tool.stateful:
            return None
        if tool.name not in trajectory.open:
            if self._count >= self._limit:
                raise ToolError(
                    f"{self._count} environments are open, no more can be (max_environments={self._limit}); "
                    "finish trajectories, or raise it"
                )
            self._count += 1
            try:
                trajectory.open[tool.name] = await tool.open(trajectory.id, extra)
            except BaseException:
                self._count -= 1
                raise
            self._telemetry.opened(tool.name)
        return trajectory.open[tool.name]

    async def close(self, trajectory: ToolTrajectory, reason: CloseReason) -> None:
        """Close the trajectory's environments; failures are counted and logged, and never keep others open.

        Who waits for it may be cancelled; the closing goes on.
        """
        if not trajectory.open:
            return
        if reason in _SURPRISING:
            self._gone[trajectory.id] = reason
            while len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
        taken, trajectory.open = trajectory.open, {}
        closing = [asyncio.ensure_future(self._close(name, taken[name], reason)) for name in taken]
        self._closing.update(closing)
        for task in closing:
            task.add_done_callback(self._closing.discard)
        await asyncio.shield(asyncio.gather(*closing))

    async def _close(self, name: str, environment: Any, reason: CloseReason) -> None:
        self._telemetry.closed(name, reason)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._tools[name].close(environment)
        except Exception:
            self._telemetry.close_failed(name)
            logger.warning("an environment of %s was not closed cleanly", name, exc_info=True)
        finally:
            self._count -= 1

    def gone(self, trajectory_id: str) -> str | None:
        """Return, once, why a trajectory has lost its environments; None if it has not."""
        reason = self._gone.pop(trajectory_id, None)
        return None if reason is None else _SURPRISING[reason]

    async def close_idle(self) -> None:
        """Close environments that were unused for too long."""
        now = self._clock()
        for trajectory in list(self._trajectories.values()):
            if not trajectory.users and now - trajectory.last_used >= self._idle_seconds:
                async with self.enter(trajectory.id):
                    await self.close(trajectory, CloseReason.IDLE)

    async def close_all(self) -> None:
        """Close all environments concurrently, and wait for actions and closings under way."""

        async def close(trajectory_id: str) -> None:
            async with self.enter(trajectory_id) as trajectory:
                await self.close(trajectory, CloseReason.SHUTDOWN)

        await asyncio.gather(*(close(trajectory_id) for trajectory_id in list(self._trajectories)))
        await asyncio.gather(*self._closing)
