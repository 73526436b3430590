"""Tools that an environment offers in an episode, and runs itself.

::

    reply ──► each call, in order ─► unknown name, arguments that do not fit ─┐
                                  ├► run(arguments) ──► text ─────────────────┼─► ToolCallRecord
                                  └► run raised ToolError, or anything else ──┘   and a message

The model reads what went wrong with a call. A TrajectoryError passes: the environment itself
failed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.chat.reply import Reply, ToolCall
from jax_agent_rl.errors import (
    EnvironmentFailedError,
    ToolArgumentError,
    ToolError,
    ToolNotFoundError,
    TrajectoryError,
)
from jax_agent_rl.tools.schema import check_arguments, check_parameters, function_tool
from jax_agent_rl.types import ToolCallRecord

Run = Callable[[dict[str, Any]], Awaitable[str]]
_ERROR_KINDS = {ToolNotFoundError: "unknown_tool", ToolArgumentError: "bad_arguments"}


@dataclass(frozen=True, kw_only=True)
class EpisodeTool:
    """A tool of an episode.

    Attributes:
        parameters: JSON Schema of the arguments, an object.
        run: runs a call with arguments that fit the schema; returns what the model reads.

    Raises:
        ToolDefinitionError: the parameters are not a valid schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Run

    def __post_init__(self) -> None:
        check_parameters(self.parameters, f"the parameters of the tool {self.name!r:.100}")

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's format."""
        return function_tool(self.name, self.description, self.parameters)


def tools_by_name(tools: Iterable[EpisodeTool]) -> dict[str, EpisodeTool]:
    """Return the tools of an episode by name.

    Raises:
        EnvironmentFailedError: two have the same name, so that a call could mean either.
    """
    by_name: dict[str, EpisodeTool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise EnvironmentFailedError(f"two tools are called {tool.name!r:.100}")
        by_name[tool.name] = tool
    return by_name


async def run_calls(
    tools: Mapping[str, EpisodeTool], reply: Reply, *, turn: int
) -> list[ToolCallRecord]:
    """Run the calls of a reply, one after the other.

    Args:
        tools: the episode's tools, by name.
        turn: number of the reply; decoded calls are numbered by it.

    Returns:
        A record of each call; one that could not be decoded has no id.

    Raises:
        TrajectoryError: the environment failed.
    """
    records: list[ToolCallRecord] = []
    for number, part in enumerate(reply.calls):
        if part.call is None:
            text = f"Error: Failed to decode tool call: {part.problem:.200}"
            record = ToolCallRecord(name="", arguments=None, observation=text, error="malformed")
        else:
            record = await _run_call(tools, part.call, call_id=f"call_{turn}_{number}")
        records.append(record)
    return records


def call_messages(records: Sequence[ToolCallRecord]) -> tuple[Mapping[str, Any], ...]:
    """Return the messages that answer calls.

    If no call could be decoded, there is none to answer: the user says what was wrong.
    """
    if records and all(record.call_id is None for record in records):
        return ({"role": "user", "content": records[0].observation},)

    messages = []
    for record in records:
        message = {"role": "tool", "content": record.observation}
        if record.name:
            message["name"] = record.name
        messages.append(message)
    return tuple(messages)


async def _run_call(
    tools: Mapping[str, EpisodeTool], call: ToolCall, *, call_id: str
) -> ToolCallRecord:
    start_time = time.perf_counter()
    error_kind = None
    try:
        tool = tools.get(call.name)
        if tool is None:
            known = ", ".join(tools) or "none"
            raise ToolNotFoundError(
                f"there is no tool {call.name[:100]!r}; available tools: {known}"
            )
        text = await tool.run(check_arguments(tool.parameters, call.arguments))
    except TrajectoryError:
        raise
    except ToolError as error:
        text = f"Error: {error}"
        error_kind = _ERROR_KINDS.get(type(error), "raised")
    except Exception as error:
        text = f"Error: {call.name} raised {type(error).__name__}: {error}"
        error_kind = "raised"

    return ToolCallRecord(
        name=call.name,
        arguments=call.arguments,
        observation=text,
        error=error_kind,
        seconds=time.perf_counter() - start_time,
        call_id=call_id,
    )
