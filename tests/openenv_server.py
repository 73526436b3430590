"""A server of OpenEnv with one of three environments: ``python tests/openenv_server.py NAME PORT``.

It runs in an environment that has the package ``openenv``, which need not be this project's.

========  ==========================================================
write     actions are one text; the episode ends with the right word
place     actions are two numbers
shop      MCP tools, of which one ends the episode
========  ==========================================================
"""

# The package is in another environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class WriteAction(Action):
    """Says a word."""

    word: str = Field(max_length=20)


class TextObservation(Observation):
    """What is seen."""

    text: str = ""


class Write(Environment):
    """The word is chosen by the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any):
        self._word = ("apple", "pear")[(seed or 0) % 2]
        self._state = State(episode_id=episode_id, step_count=0)
        return TextObservation(text=f"A fruit of {len(self._word)} letters?")

    def step(self, action: WriteAction, timeout_s: float | None = None, **kwargs: Any):
        self._state.step_count += 1
        if action.word == "crash":
            raise RuntimeError("the environment broke")
        if action.word == self._word:
            return TextObservation(text="Right.", reward=1.0, done=True)
        return TextObservation(text="No.", reward=-0.25, metadata={"tries": 1})

    @property
    def state(self) -> State:
        return self._state


class PlaceAction(Action):
    """Puts a stone on the board."""

    row: int = Field(ge=0, lt=3)
    column: int = 0


class BoardObservation(Observation):
    """The board."""

    board: list[int] = []
    legal: bool = True


class Place(Environment):
    """Three stones end the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any):
        self._state = State(step_count=0)
        self._board: list[int] = []
        return BoardObservation(board=[])

    def step(self, action: PlaceAction, timeout_s: float | None = None, **kwargs: Any):
        self._state.step_count += 1
        self._board.append(action.row * 3 + action.column)
        return BoardObservation(board=self._board, reward=0.5, done=len(self._board) == 3)

    @property
    def state(self) -> State:
        return self._state


class Shop(MCPEnvironment):
    """Sells things."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")
        self._state = State(step_count=0)

        @server.tool
        def price(item: str, count: int = 1) -> str:
            """The price of some items."""
            if item != "lamp":
                raise ValueError("not sold here")
            return f"{count * 20} coins"

        @server.tool
        def buy(item: str) -> str:
            """Buys an item, and leaves the shop."""
            return f"bought a {item}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any):
        self._state = State(step_count=0)
        return Observation(metadata={"status": "ready"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        observation = super().step(action, timeout_s=timeout_s, **kwargs)
        return self._scored(action, observation)

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **kwargs: Any
    ) -> Observation:
        self._state.step_count += 1
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        return self._scored(action, observation)

    def _step_impl(self, action: Action, **kwargs: Any) -> Observation:
        return Observation()

    def _scored(self, action: Action, observation: Observation) -> Observation:
        if isinstance(action, CallToolAction) and action.tool_name == "buy":
            observation.reward = 2.0
            observation.done = True
        return observation

    @property
    def state(self) -> State:
        return self._state


ENVIRONMENTS = {
    "write": (Write, WriteAction, TextObservation),
    "place": (Place, PlaceAction, BoardObservation),
    "shop": (Shop, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    name, port = sys.argv[1:]
    app = create_app(*ENVIRONMENTS[name], env_name=name, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
