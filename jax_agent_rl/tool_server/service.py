"""Executes the actions of a worker's trajectories; every failure becomes a reply.

::

    step ──► finish? ──► first tool that ──► its environment ──► act, with a timeout ──► reply
             close       accepts it          closed: gone        error, crash, timeout     │
                         none: invalid                   done or last step? close ◄────────┘

An environment is opened by the first action that needs it and closed exactly once: it is removed
from its trajectory *before* it is closed, in one place only. One lock per trajectory keeps its
actions in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.plugins import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.base import Failure, ToolReply, failed
from jax_agent_rl.tool_server.plugins.registry import FINISH
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.utils.failures import FailureLog, describe_error, error_place
from jax_agent_rl.utils.loop_watch import OwnTime, at_work
from jax_agent_rl.utils.surrogates import replace_lone_surrogates
from jax_agent_rl.utils.tasks import gather_or_cancel

logger = logging.getLogger(__name__)
OPENED = "toolserver_environments_opened"
CLOSED = "toolserver_environments_closed"
_MARKER = "\n...(truncated)...\n"
_MAX_ERROR_CHARS = 1000
_CLOSE_SECONDS = 15.0
_MAX_REMEMBERED = 10_000  # trajectories whose lost environments are still to be reported
_STEP_BUCKETS = (
    0.001,
    0.005,
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)  # seconds


class Telemetry:
    """Prometheus metrics of a worker process.

    The metrics of environments carry the worker's name as a label. In a worker, the library keeps
    metrics in files that outlive the process (its multiprocess mode), so that the server process
    serves exact sums over all workers, killed ones included.
    """

    def __init__(self, registry: CollectorRegistry, *, worker: str):
        self.steps = Counter("toolserver_steps", "Actions.", ["tool", "outcome"], registry=registry)
        self.seconds = Histogram(
            "toolserver_step_seconds",
            "Time of an action.",
            ["tool"],
            registry=registry,
            buckets=_STEP_BUCKETS,
        )
        running = Gauge(
            "toolserver_steps_running",
            "Running actions.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.running = running.labels(worker)

        opened = Counter(OPENED, "Opened.", ["worker", "tool"], registry=registry)
        closed = Counter(CLOSED, "Closed.", ["worker", "tool", "reason"], registry=registry)
        self.opened = partial(opened.labels, worker)
        self.closed = partial(closed.labels, worker)
        self.close_failures = Counter(
            "toolserver_close_failures",
            "Environments whose close() raised or hung.",
            ["tool"],
            registry=registry,
        )


class ToolService:
    """Executor of actions.

    Args:
        tools: in the order in which actions are offered to them; names are unique.
        settings: limits of actions and environments.
        clock: returns monotonic seconds.

    Attributes:
        environments: the environments of all trajectories.
        failures: log of tools that crashed and environments that did not close.
    """

    def __init__(
        self,
        tools: Sequence[ServerTool],
        settings: ToolServerSettings,
        telemetry: Telemetry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tools = tools
        self._settings = settings
        self._telemetry = telemetry
        self.failures = FailureLog()
        self.environments = Environments(tools, settings, telemetry, clock, self.failures)
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the tools and the sweep of idle environments."""
        for tool in self._tools:
            await tool.start()
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Close every environment and stop the tools."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.environments.close_all()
        for tool in self._tools:
            try:
                await tool.stop()
            except Exception:
                logger.warning("tool %s did not stop cleanly", tool.name, exc_info=True)
        self.failures.flush()

    async def steps(self, steps: Sequence[ServerAction]) -> list[ToolReply]:
        """Execute actions; return their replies in the same order.

        Actions of different trajectories run concurrently. None continues for a client that
        disconnected.
        """
        return await gather_or_cancel(self.step(step) for step in steps)

    async def step(self, step: ServerAction) -> ToolReply:
        """Execute one action; never raise for a mistake of the model or the tool."""
        start_time = time.perf_counter()
        tool = FINISH if step.finish else "none"
        outcome = "cancelled"
        self._telemetry.running.inc()
        try:
            async with self.environments.enter(step.trajectory_id) as trajectory:
                reply = await self._execute(trajectory, step)
            tool = reply.tool or "none"
            outcome = reply.error or "ok"
            return reply
        finally:
            self._telemetry.running.dec()
            self._telemetry.steps.labels(tool, outcome).inc()
            self._telemetry.seconds.labels(tool).observe(time.perf_counter() - start_time)

    async def _execute(self, trajectory: ToolTrajectory, step: ServerAction) -> ToolReply:
        """Execute an action of a locked trajectory; close its environments if they end with it."""
        lost_reason = self.environments.pop_lost(step.trajectory_id)
        if step.finish:
            await self.environments.close(trajectory, CloseReason.FINISH)
            return ToolReply(
                observation="", done=True, valid=True, tool=FINISH, error=None, open=False
            )
        if lost_reason is not None:
            text = f"Error: the environment was closed: {lost_reason}"
            return failed(Failure.GONE, text, done=True)

        reply, reason = await self._act(trajectory, step)
        if reason is not None:
            await self.environments.close(trajectory, reason)
        return replace(reply, open=bool(trajectory.open))

    async def _act(
        self, trajectory: ToolTrajectory, step: ServerAction
    ) -> tuple[ToolReply, CloseReason | None]:
        """Return the reply, and the reason to close the trajectory's environments now, if any."""
        settings = self._settings
        close_if_last = CloseReason.LAST_STEP if step.is_last_step else None
        close_if_invalid = CloseReason.DONE if settings.done_if_invalid else close_if_last

        if len(step.text) > settings.max_action_chars:
            limit = f"max_action_chars={settings.max_action_chars}"
            text = f"The action has {len(step.text)} characters, more than {limit}"
            return self._invalid(text), close_if_invalid

        name = ""
        done = False
        reason = close_if_last
        try:
            for tool in self._tools:
                name = tool.name  # set first: a parser may crash
                parsed = tool.parse_action(step.text)
                if parsed is not None:
                    break
            else:
                return self._invalid("No valid tool found for action"), close_if_invalid

            observation = await self._act_in_time(trajectory, tool, parsed, step.extra_fields)
            text = shorten(observation.text, settings.max_observation_chars)
            reply = ToolReply(
                observation=encode_observation(observation, text),
                done=observation.done,
                valid=observation.valid,
                tool=name,
                error=None,
                open=True,
            )
            return reply, CloseReason.DONE if observation.done else close_if_last
        except asyncio.CancelledError:
            await self.environments.close(trajectory, CloseReason.ABORT)
            raise
        except TimeoutError:
            # The state of an interrupted environment is unknown: the trajectory cannot continue.
            failure = Failure.TIMEOUT
            done = bool(trajectory.open)
            reason = CloseReason.ABORT
            text = f"{name} did not answer within {settings.step_seconds:g} seconds"
        except ToolError as error:
            failure = Failure.TOOL
            text = str(error)
        except Exception as error:
            failure = Failure.CRASH
            text = f"{name} raised {type(error).__name__}: {error}"
            self.failures.report(
                f"tool {name!r} raised {type(error).__name__} at {error_place(error)}",
                f"{trajectory.id}: tool {name!r} raised {describe_error(error)}",
                error=error,
            )

        text = f"Error: {shorten(text, _MAX_ERROR_CHARS)}"
        return failed(failure, text, done=done, tool=name), reason

    async def _act_in_time(
        self, trajectory: ToolTrajectory, tool: ServerTool, parsed: Any, extra: Mapping[str, Any]
    ) -> ToolObservation:
        """Run an action.

        Raises:
            TimeoutError: it took too long, whether it waited or held the event loop.
        """
        limit_seconds = self._settings.step_seconds
        own_time = OwnTime()

        async def act() -> ToolObservation:
            environment = await self.environments.open(trajectory, tool, extra)
            action = ToolAction(
                parsed=parsed, environment=environment, extra=extra, trajectory_id=trajectory.id
            )
            return await tool.act(action)

        async with asyncio.timeout(limit_seconds):
            with at_work(f"tool {tool.name!r}"):
                observation = await own_time.measure(act(), time.monotonic)

        # A tool that never awaits cannot be interrupted: its time is judged afterwards.
        if own_time.seconds > limit_seconds:
            raise TimeoutError
        return observation

    def _invalid(self, text: str) -> ToolReply:
        usages = "\n".join(f"{tool.name}: {tool.usage}" for tool in self._tools)
        return failed(
            Failure.INVALID, text, done=self._settings.done_if_invalid, available_tools=usages
        )

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.idle_seconds / 4)
            await self.environments.close_idle()


def encode_observation(observation: ToolObservation, text: str) -> str | dict[str, Any]:
    """Encode an observation for the client: a string if there is only text.

    Args:
        text: the observation's text, shortened.
    """
    fields: dict[str, Any] = {}
    if observation.image:
        fields["image"] = list(observation.image)
    if observation.audio:
        fields["audio"] = list(observation.audio)
    if observation.metrics:
        fields["metrics"] = dict(observation.metrics)
    if observation.reward is not None:
        fields["reward"] = observation.reward

    if not fields:
        return text
    return {"obs": text, **fields}


def shorten(text: str, limit: int) -> str:
    """Cut the middle of a text beyond ``limit`` characters, and replace lone surrogates."""
    if len(text) > limit:
        kept_chars = max(0, limit - len(_MARKER))
        end_chars = kept_chars // 2
        start_chars = kept_chars - end_chars
        text = text[:start_chars] + _MARKER + text[len(text) - end_chars :]
    return replace_lone_surrogates(text)


# --- environments ---------------------------------------------------------------------------------


class CloseReason(StrEnum):
    """Reason for closing an environment."""

    FINISH = "finish"
    """The client ended the trajectory."""
    LAST_STEP = "last_step"
    """It was the trajectory's last action."""
    DONE = "done"
    """The tool ended the trajectory."""
    ABORT = "abort"
    """An action timed out or its client disconnected: the environment's state is unknown."""
    IDLE = "idle"
    """It was unused for ``idle_seconds``."""
    SHUTDOWN = "shutdown"
    """The server stops."""


_UNEXPECTED = {
    CloseReason.ABORT: "it was interrupted in the middle of an action",
    CloseReason.IDLE: "it was unused for too long",
}


class ToolTrajectory:
    """One trajectory's environments, by tool; accessed only inside :meth:`Environments.enter`.

    Attributes:
        last_used: when an action last left it, by the clock of its :class:`Environments`.
        users: actions that hold the lock or wait for it.
        open: the open environments, by the tool's name.
    """

    def __init__(self, trajectory_id: str, last_used: float):
        self.id = trajectory_id
        self.last_used = last_used
        self.users = 0
        self.lock = asyncio.Lock()
        self.open: dict[str, Any] = {}


class Environments:
    """Environments of all trajectories of a worker.

    Args:
        tools: tools with unique names.
        settings: limits of the number of environments and of their idle time.
        telemetry: counts openings and closings.
        clock: returns monotonic seconds.
        failures: log for environments that were not closed cleanly.
    """

    def __init__(
        self,
        tools: Sequence[ServerTool],
        settings: ToolServerSettings,
        telemetry: Telemetry,
        clock: Callable[[], float],
        failures: FailureLog,
    ):
        self._failures = failures
        self.count = 0
        """Environments that are open, being opened or being closed."""
        self._tools = {tool.name: tool for tool in tools}
        self._settings = settings
        self._telemetry = telemetry
        self._clock = clock
        self._trajectories: dict[str, ToolTrajectory] = {}
        self._lost: OrderedDict[str, str] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def enter(self, trajectory_id: str) -> AsyncIterator[ToolTrajectory]:
        """Lock a trajectory for one action."""
        trajectory = self._trajectories.get(trajectory_id)
        if trajectory is None:
            trajectory = ToolTrajectory(trajectory_id, self._clock())
            self._trajectories[trajectory_id] = trajectory

        trajectory.users += 1
        try:
            async with trajectory.lock:
                yield trajectory
        finally:
            trajectory.users -= 1
            trajectory.last_used = self._clock()
            if not trajectory.users and not trajectory.open:
                del self._trajectories[trajectory_id]

    async def open(
        self, trajectory: ToolTrajectory, tool: ServerTool, extra: Mapping[str, Any]
    ) -> Any:
        """Return a tool's environment in a trajectory, opening it if needed.

        Args:
            trajectory: a trajectory whose lock the caller holds, by :meth:`enter`.
            extra: the request's ``extra_fields`` of the trajectory.

        Returns:
            The environment; None for a stateless tool.

        Raises:
            ToolError: too many environments are open.
        """
        if not tool.stateful:
            return None
        if tool.name in trajectory.open:
            return trajectory.open[tool.name]

        limit = self._settings.max_environments
        if self.count >= limit:
            raise ToolError(
                f"{self.count} environments are open, the limit (max_environments={limit}); "
                "finish trajectories, or raise it"
            )
        self.count += 1
        try:
            environment = await tool.open(trajectory.id, extra)
        except BaseException:
            self.count -= 1
            raise
        trajectory.open[tool.name] = environment
        self._telemetry.opened(tool.name).inc()
        return environment

    async def close(self, trajectory: ToolTrajectory, reason: CloseReason) -> None:
        """Close a trajectory's environments, even if the caller is cancelled.

        Failures are counted and logged.
        """
        if not trajectory.open:
            return

        # The trajectory's next action is told why its environments are gone.
        if reason in _UNEXPECTED:
            self._lost[trajectory.id] = _UNEXPECTED[reason]
            if len(self._lost) > _MAX_REMEMBERED:
                self._lost.popitem(last=False)

        # Removed before they are closed: nothing can use them again, or close them twice.
        environments = trajectory.open
        trajectory.open = {}

        tasks = []
        for name, environment in environments.items():
            task = asyncio.ensure_future(self._close(name, environment, reason))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            tasks.append(task)
        await asyncio.shield(asyncio.gather(*tasks))

    async def _close(self, name: str, environment: Any, reason: CloseReason) -> None:
        self._telemetry.closed(name, reason).inc()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._tools[name].close(environment)
        except Exception as error:
            self._telemetry.close_failures.labels(name).inc()
            kind = f"an environment of {name!r} was not closed cleanly"
            self._failures.report(kind, f"{kind}: {describe_error(error)}", error=error)
        finally:
            self.count -= 1

    def pop_lost(self, trajectory_id: str) -> str | None:
        """Return, once, why a trajectory lost its environments; None if it did not."""
        return self._lost.pop(trajectory_id, None)

    async def close_idle(self) -> None:
        """Close environments that were unused for too long."""
        now = self._clock()
        for trajectory in list(self._trajectories.values()):
            idle_seconds = now - trajectory.last_used
            if not trajectory.users and idle_seconds >= self._settings.idle_seconds:
                async with self.enter(trajectory.id):
                    await self.close(trajectory, CloseReason.IDLE)

    async def close_all(self) -> None:
        """Close all environments concurrently, and wait for running actions and closings."""

        async def close(trajectory_id: str) -> None:
            async with self.enter(trajectory_id) as trajectory:
                await self.close(trajectory, CloseReason.SHUTDOWN)

        closings = [close(trajectory_id) for trajectory_id in self._trajectories]
        await asyncio.gather(*closings)
        await asyncio.gather(*self._closing)
