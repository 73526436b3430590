"""Carries out actions, in one process: the tool that accepts one acts; every failure becomes a reply.

::

    step ──► finish? close ──► which tool? ──► its environment ──► act, in time ──► reply ──► done or last? close
                                 none: invalid     gone: say so      error, crash, timeout: say so
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.environments import CloseReason, Environments, ToolTrajectory
from jax_agent_rl.tool_server.plugin import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.telemetry import Telemetry
from jax_agent_rl.tool_server.wire import Failure, ObservationStep, ToolReply, encode_observation, failed
from jax_agent_rl.utils.text import replace_lone_surrogates

logger = logging.getLogger(__name__)
FINISH = "finish"
_MARKER = "\n...(truncated)...\n"
_ERROR_CHARS = 1000


class ToolService:
    """Executor of actions; see the module.

    Args:
        tools: in the order in which they are asked.
        telemetry: where everything is counted.
        step_seconds: that one action may take.
        max_action_chars: longer actions are invalid; no tool gets to parse them.
        max_observation_chars: longer observations lose their middle.
        done_if_invalid: an action that no tool accepts ends its trajectory.
        max_environments, idle_seconds: see :class:`Environments`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tools: Sequence[ServerTool],
        telemetry: Telemetry,
        *,
        step_seconds: float,
        max_action_chars: int,
        max_observation_chars: int,
        max_environments: int,
        idle_seconds: float,
        done_if_invalid: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._tools = list(tools)
        self._telemetry = telemetry
        self._step_seconds = step_seconds
        self._max_action_chars = max_action_chars
        self._max_chars = max_observation_chars
        self._done_if_invalid = done_if_invalid
        self._idle_seconds = idle_seconds
        by_name = {tool.name: tool for tool in tools}
        if len(by_name) < len(self._tools) or FINISH in by_name:
            raise ConfigError(f"tools must have different names, none of them {FINISH!r}: {[t.name for t in tools]}")
        self.environments = Environments(
            by_name, telemetry, limit=max_environments, idle_seconds=idle_seconds, clock=clock
        )
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

    async def steps(self, steps: Sequence[ObservationStep]) -> list[ToolReply]:
        """Carry actions out, those of different trajectories concurrently; return replies in the same order."""
        tasks = [asyncio.ensure_future(self.step(step)) for step in steps]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # the client went away: none of them goes on behind its back
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def step(self, step: ObservationStep) -> ToolReply:
        """Carry one action out; never raise for what a model or a tool does wrong."""
        began = time.perf_counter()
        tool, outcome = FINISH if step.finish else "none", "cancelled"
        self._telemetry.step_began()
        try:
            async with self.environments.enter(step.trajectory_id) as trajectory:
                reply = await self._in_turn(trajectory, step)
            tool, outcome = reply.tool or "none", reply.error or "ok"
            return reply
        finally:
            self._telemetry.step_ended(tool, outcome, time.perf_counter() - began)

    async def _in_turn(self, trajectory: ToolTrajectory, step: ObservationStep) -> ToolReply:
        gone = self.environments.gone(step.trajectory_id)
        if step.finish:
            await self.environments.close(trajectory, CloseReason.FINISH)
            return ToolReply(observation="", done=True, valid=True, tool=FINISH, error=None, open=False)
        if gone is not None:
            return failed(Failure.GONE, f"Error: the environment was closed: {gone}", done=True)
        reply, ending = await self._act(trajectory, step)
        if ending is not None:
            await self.environments.close(trajectory, ending)
        return ToolReply(
            observation=reply.observation,
            done=reply.done,
            valid=reply.valid,
            tool=reply.tool,
            error=reply.error,
            open=bool(trajectory.open),
        )

    async def _act(self, trajectory: ToolTrajectory, step: ObservationStep) -> tuple[ToolReply, CloseReason | None]:
        """Return the reply, and why to close the trajectory's environments now, if so."""
        last = CloseReason.LAST_STEP if step.is_last_step else None
        try:
            matched = self._match(step.action)
            if matched is None:
                return self._invalid(step.action), CloseReason.DONE if self._done_if_invalid else last
        except _Crash as crash:
            return self._failure(Failure.CRASH, crash.tool, str(crash)), last
        tool, parsed = matched
        try:
            async with asyncio.timeout(self._step_seconds):
                environment = await self.environments.of(trajectory, tool, step.extra)
                observation = await tool.act(
                    ToolAction(parsed=parsed, environment=environment, extra=step.extra, trajectory_id=trajectory.id)
                )
            reply = self._observed(tool, observation)
            return reply, CloseReason.DONE if reply.done else last
        except asyncio.CancelledError:
            await self.environments.close(trajectory, CloseReason.ABORT)
            raise
        except TimeoutError:
            text = f"{tool.name} did not answer within {self._step_seconds:g} seconds"
            # Where state was kept, what is left of it is unknown: the trajectory cannot go on.
            return self._failure(Failure.TIMEOUT, tool, text, done=bool(trajectory.open)), CloseReason.ABORT
        except ToolError as error:
            return self._failure(Failure.TOOL, tool, str(error)), last
        except Exception as error:
            logger.warning("tool %s crashed", tool.name, exc_info=True)
            return self._failure(Failure.CRASH, tool, f"{tool.name} raised {type(error).__name__}: {error}"), last

    def _match(self, action: str) -> tuple[ServerTool, Any] | None:
        """Return the first tool that accepts an action, and what it parsed."""
        if len(action) > self._max_action_chars:
            return None
        for tool in self._tools:
            try:
                parsed = tool.parse_action(action)
            except Exception as error:
                logger.warning("tool %s crashed while parsing", tool.name, exc_info=True)
                raise _Crash(tool, f"{tool.name} raised {type(error).__name__}: {error}") from error
            if parsed is not None:
                return tool, parsed
        return None

    def _observed(self, tool: ServerTool, observation: ToolObservation) -> ToolReply:
        wire = encode_observation(observation, shorten(observation.text, self._max_chars))
        return ToolReply(
            observation=wire, done=observation.done, valid=observation.valid, tool=tool.name, error=None, open=True
        )

    def _invalid(self, action: str) -> ToolReply:
        usages = "\n".join(f"{tool.name}: {tool.usage}" for tool in self._tools)
        text = "No valid tool found for action"
        if len(action) > self._max_action_chars:
            text = f"The action has {len(action)} characters, more than max_action_chars={self._max_action_chars}"
        return failed(Failure.INVALID, text, done=self._done_if_invalid, available_tools=usages)

    def _failure(self, failure: Failure, tool: ServerTool, text: str, *, done: bool = False) -> ToolReply:
        return failed(failure, f"Error: {shorten(text, _ERROR_CHARS)}", done=done, tool=tool.name)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            await self.environments.close_idle()


class _Crash(Exception):
    """A tool's ``parse_action`` raised."""

    def __init__(self, tool: ServerTool, text: str):
        super().__init__(text)
        self.tool = tool


def shorten(text: str, limit: int) -> str:
    """Cut the middle of a text beyond ``limit`` characters, leaving no half of a surrogate pair."""
    if len(text) > limit:
        keep = max(0, limit - len(_MARKER))
        text = text[: keep - keep // 2] + _MARKER + text[len(text) - keep // 2 :]
    return replace_lone_surrogates(text)
