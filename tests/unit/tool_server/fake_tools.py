"""Server tools that misbehave on demand; also loaded by worker processes, through ``tool_path``."""

from __future__ import annotations

import asyncio
import os

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.plugins import ServerTool, ToolObservation


class EchoTool(ServerTool):
    """``echo TEXT``: says it back, and what is in extra_fields."""

    name = "echo"
    usage = "echo TEXT"

    def parse_action(self, action):
        return action[5:] if action.startswith("echo ") else None

    async def act(self, action):
        return ToolObservation(
            text=action.parsed, reward=action.extra.get("reward"), done=action.parsed == "bye"
        )


class CounterTool(ServerTool):
    """``count``: how often this trajectory counted. Keeps state, and a diary of its life."""

    name = "counter"
    usage = "count"
    stateful = True

    def __init__(self, context):
        super().__init__(context)
        self.diary = []
        self.release = asyncio.Event()

    def parse_action(self, action):
        return action if action.startswith("count") else None

    async def open(self, trajectory_id, extra):
        if extra.get("refuse"):
            raise ToolError("not today")
        self.diary.append(("open", trajectory_id))
        return {"id": trajectory_id, "count": 0, "reluctant": extra.get("reluctant")}

    async def act(self, action):
        if action.parsed == "count slowly":
            await self.release.wait()
        action.environment["count"] += 1
        return ToolObservation(text=str(action.environment["count"]))

    async def close(self, environment):
        self.diary.append(("close", environment["id"]))
        if environment.get("count") == 13:
            raise RuntimeError("bad luck")
        if environment.get("reluctant"):
            await self.release.wait()


class FaultyTool(ServerTool):
    """One fault per word."""

    name = "faulty"
    usage = "fault WORD"

    def parse_action(self, action):
        if action == "fault parse":
            raise ValueError("cannot even parse")
        while (
            action == "fault stuck"
        ):  # as a pattern that backtracks for hours: nothing in this process goes on
            pass
        return action.removeprefix("fault ") if action.startswith("fault ") else None

    async def act(self, action):
        match action.parsed:
            case "refuse":
                raise ToolError("unexpected token")
            case "raise":
                raise KeyError("broken inside")
            case "hang":
                await asyncio.Event().wait()
            case "huge":
                return ToolObservation(text="begin" + "x" * 10_000_000 + "end")
            case "surrogate":
                return ToolObservation(text="\ud800 and more")
            case "none":
                return None
            case "print":
                print("x" * 1_000_000, flush=True)
                return ToolObservation(text="printed")
            case "die":
                os._exit(7)
        raise ToolError("no such fault")
