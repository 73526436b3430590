"""A tool that counts actions: the tool server loads this file as ``tool_path``."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.tool_server.plugins import ServerTool, ToolAction, ToolObservation

_TOOL_SECONDS = 0.05
_ACTIONS_PER_END = 8


class TallyTool(ServerTool[str, list[str]]):
    """A stateful tool, so that a killed server loses something.

    The reward of an action is its number within the trajectory. One action in eight, by its text,
    ends the trajectory.
    """

    name = "tally"
    usage = "anything"
    stateful = True

    def parse_action(self, action: str) -> str:
        return action

    async def open(self, trajectory_id: str, extra: Mapping[str, Any]) -> list[str]:
        return []

    async def act(self, action: ToolAction[str, list[str]]) -> ToolObservation:
        await asyncio.sleep(_TOOL_SECONDS)
        action.environment.append(action.parsed)
        checksum = zlib.crc32(action.parsed.encode("utf-8", "surrogatepass"))
        return ToolObservation(
            text=f"ok {len(action.parsed)}",
            reward=float(len(action.environment)),
            done=checksum % _ACTIONS_PER_END == 0,
        )

    async def close(self, environment: list[str]) -> None:
        environment.clear()
