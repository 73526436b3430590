"""Environments that an OpenEnv server runs, over its WebSocket protocol.

A row names the server, and gives the arguments of its ``reset``::

    "extra_info": {
        "environment_kwargs": {
            "name": "openenv", "url": "http://127.0.0.1:8000", "reset": {"seed": 7}
        }
    }

What the policy can do follows from what the server declares:

=====================================  ============================================================
the server                             the policy
=====================================  ============================================================
has MCP tools                          calls them
has actions with one required text     writes it: an answer without calls is the action
has any other actions                  calls the tool ``act``, whose arguments are the action
has MCP tools alone                    ends the episode by an answer without calls
=====================================  ============================================================

An environment instance is a connection, and the server keeps a session for each::

    connect ─► reset ─► step … ─► state ─► close
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_agent_rl.checks import as_score, brief_repr, is_number
from jax_agent_rl.environments.base import Environment, Observation, register_environment
from jax_agent_rl.environments.calls import EpisodeTool, call_messages, run_calls, tools_by_name
from jax_agent_rl.environments.server_session import ServerSession
from jax_agent_rl.errors import EnvironmentFailedError, ToolError
from jax_agent_rl.types import FinishReason

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply

ACT = "act"
"""Name of the tool for actions that are more than one text."""
_MCP_ACTION = frozenset({"tool_name", "arguments"})
"""Fields of the action that calls an MCP tool."""


@register_environment("openenv")
class OpenEnvEnvironment(Environment):
    """A session of an OpenEnv server."""

    def __init__(self) -> None:
        self._server: OpenEnvSession | None = None
        self._tools: dict[str, EpisodeTool] = {}
        self._text_field: str | None = None
        self._shown_field: str | None = None
        self._turn = 0
        # Of the present turn.
        self._score = 0.0
        self._done = False

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def reset(
        self,
        *,
        url: str,
        reset: Mapping[str, Any] | str | None = None,
        show: str | None = None,
    ) -> Observation:
        """Begin an episode.

        Args:
            url: the server's address.
            reset: arguments of the environment's ``reset``, such as its seed (JSON text where a
                Parquet file cannot hold a mapping).
            show: the field of observations that the policy reads; None: all that are not null, as
                JSON, unless there is but one.
        """
        arguments = reset
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        server = await self._connected(url)
        self._shown_field = show
        self._turn = 0

        outcome = await server.ask({"type": "reset", "data": dict(arguments or {})}, "observation")
        action = await server.action_schema()
        self._tools = await self._offered_tools(server, action)
        text = self._text(outcome)
        if not text:
            return Observation()
        return Observation.say(text)

    async def step(self, reply: Reply) -> Observation:
        """Run the reply's calls, or take its text for the action."""
        self._score = 0.0
        self._done = False
        self._turn += 1

        if reply.calls:
            records = await run_calls(self._tools, reply, turn=self._turn)
            return Observation(
                messages=call_messages(records),
                tool_calls=tuple(records),
                score=self._score,
                done=self._done,
            )

        if self._text_field is not None:
            try:
                text = await self._act({self._text_field: reply.content})
            except ToolError as error:
                text = f"Error: {error}"
            return Observation.say(text, score=self._score, done=self._done)

        if ACT in self._tools:
            return Observation.say(f"Nothing was done: call the tool {ACT}.")
        return Observation(done=True)

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Return the number of steps that the server counted."""
        state = await self._connection().ask({"type": "state"}, "state")
        steps = state.get("step_count")
        if not is_number(steps):
            return {}
        return {"openenv/steps": float(steps)}

    async def close(self) -> None:
        """End the session."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _connected(self, url: str) -> OpenEnvSession:
        """Return the connection to a server: the one that is open, or a new one."""
        if self._server is not None and self._server.url != url.rstrip("/"):
            await self.close()
        if self._server is None:
            self._server = OpenEnvSession(url)
            self._server.open()
            await self._server.connect("/ws")
        return self._server

    def _connection(self) -> OpenEnvSession:
        if self._server is None:
            raise EnvironmentFailedError("openenv: there is no session; reset comes first")
        return self._server

    # --- actions ----------------------------------------------------------------------------------

    async def _offered_tools(
        self, server: OpenEnvSession, action: Mapping[str, Any]
    ) -> dict[str, EpisodeTool]:
        """Return the server's MCP tools, and ``act`` if its actions need it."""
        tools: list[EpisodeTool] = []
        properties = dict(action.get("properties") or {})
        properties.pop("metadata", None)
        calls_by_action = not properties or properties.keys() >= _MCP_ACTION
        for tool in await server.mcp_tools():
            run = self._call_by_action if calls_by_action else self._call_by_message
            name = str(tool["name"])
            tools.append(
                EpisodeTool(
                    name=name,
                    description=str(tool.get("description") or ""),
                    parameters=tool.get("inputSchema") or tool.get("input_schema") or {},
                    run=functools.partial(run, name),
                )
            )

        self._text_field = None
        if calls_by_action:
            if not tools:
                raise server.error(
                    f"{server.url} has no tools, and its actions have no fields: there is nothing"
                    " that a policy could do"
                )
            return tools_by_name(tools)
        self._text_field = _only_text(action, properties)
        if self._text_field is None:
            parameters = {key: action[key] for key in ("required", "$defs") if key in action}
            tools.append(
                EpisodeTool(
                    name=ACT,
                    description=str(action.get("description") or "Acts in the environment."),
                    parameters={"type": "object", "properties": properties, **parameters},
                    run=self._act,
                )
            )
        return tools_by_name(tools)

    async def _act(self, action: Mapping[str, Any]) -> str:
        """Take an action; add its reward to the turn's score, and return what is observed."""
        return self._text(await self._take(action))

    async def _call_by_action(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call an MCP tool by a step, which may have a reward and end the episode."""
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        outcome = await self._take(action)
        observation = outcome["observation"]
        problem = observation.get("error")
        if problem:
            raise ToolError(_error_text(problem))
        return _result_text(observation.get("result"))

    async def _call_by_message(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call an MCP tool beside the steps of an environment with actions of its own."""
        result = await self._connection().mcp(
            "tools/call", {"name": name, "arguments": dict(arguments)}
        )
        return _result_text(result)

    async def _take(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._done:
            raise ToolError("the episode is over")
        try:
            outcome = await self._connection().ask(
                {"type": "step", "data": dict(action)}, "observation"
            )
        except _InvalidActionError as error:
            raise ToolError(str(error)) from None
        reward = outcome.get("reward")
        if reward is not None:
            try:
                self._score += as_score(reward, "the reward of a step")
            except ValueError as error:
                raise EnvironmentFailedError(f"openenv: {error}") from None
        self._done = bool(outcome.get("done"))
        return outcome

    def _text(self, outcome: Mapping[str, Any]) -> str:
        """Return what the policy reads of an observation."""
        observation = outcome["observation"]
        if self._shown_field is not None:
            if self._shown_field not in observation:
                raise EnvironmentFailedError(
                    f"openenv: the observation has no field {self._shown_field!r} to show:"
                    f" {brief_repr(observation)}"
                )
            return _plain_text(observation[self._shown_field])

        fields = {}
        for name, value in observation.items():
            if value is not None and name != "metadata":
                fields[name] = value
        if not fields:
            return ""
        if len(fields) == 1:
            (value,) = fields.values()
            return _plain_text(value)
        return json.dumps(fields, ensure_ascii=False)


def _only_text(action: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """Return the one required field of actions if it is text; None for other actions."""
    required = [name for name in action.get("required") or () if name in properties]
    if len(required) != 1:
        return None
    (name,) = required
    field = properties[name]
    is_text = isinstance(field, Mapping) and field.get("type") == "string" and "enum" not in field
    return name if is_text else None


def _error_text(problem: Any) -> str:
    if isinstance(problem, Mapping) and isinstance(problem.get("message"), str):
        return problem["message"]
    return _plain_text(problem)


def _result_text(result: Any) -> str:
    """Return the text of a tool's result: MCP's, or any JSON.

    Raises:
        ToolError: the result says that the tool failed.
    """
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return _plain_text(result)
    texts = []
    for part in result["content"]:
        if isinstance(part, Mapping) and part.get("type") == "text":
            texts.append(str(part.get("text")))
        else:
            texts.append(f"({brief_repr(part)} cannot be shown)")
    text = "\n".join(texts)
    if result.get("is_error") or result.get("isError"):
        raise ToolError(text)
    return text


def _plain_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


# --- the protocol ---------------------------------------------------------------------------------


class _InvalidActionError(Exception):
    """The server refused an action that the policy wrote; the model reads why."""


class OpenEnvSession(ServerSession):
    """A session of a server, which belongs to one connection.

    Args:
        url: ``http://host:port``.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, environment="openenv")
        self._requests = 0

    async def ask(self, message: Mapping[str, Any], expected: str) -> dict[str, Any]:
        """Send a message and return the data of the answer.

        Args:
            expected: type of the answer.

        Raises:
            _InvalidActionError: the server refuses the action of a step.
            EnvironmentFailedError: it reports an error, is gone, or answers what it must not.
        """
        answer = await self.exchange(message)
        data = answer.get("data")
        if answer.get("type") == "error" and isinstance(data, dict):
            raise self._reported(message, data)
        if answer.get("type") != expected or not isinstance(data, dict):
            raise self.error(f"{self.url} answered {message['type']} with {brief_repr(answer)}")
        if expected == "observation" and not isinstance(data.get("observation"), dict):
            raise self.error(
                f"{self.url} answered {message['type']} without an observation: {brief_repr(data)}"
            )
        return data

    async def mcp(self, method: str, params: Mapping[str, Any]) -> Any:
        """Return the result of an MCP request of the session.

        Raises:
            ToolError: the server answers with an error.
            EnvironmentFailedError: see :meth:`ask`.
        """
        self._requests += 1
        request = {"jsonrpc": "2.0", "method": method, "params": params, "id": self._requests}
        answer = await self.ask({"type": "mcp", "data": request}, "mcp")
        if answer.get("error"):
            raise ToolError(_error_text(answer["error"]))
        return answer.get("result")

    async def mcp_tools(self) -> list[Mapping[str, Any]]:
        """Return the session's MCP tools, as the server lists them; none without MCP."""
        try:
            result = await self.mcp("tools/list", {})
        except ToolError:  # "Environment does not support MCP"
            return []
        tools = result.get("tools") if isinstance(result, Mapping) else None
        if not isinstance(tools, list):
            raise self.error(f"{self.url} lists no tools: {brief_repr(result)}")
        for tool in tools:
            if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
                raise self.error(f"{self.url} lists a tool without a name: {brief_repr(tool)}")
        return tools

    async def action_schema(self) -> Mapping[str, Any]:
        """Return the JSON Schema of the server's actions."""
        schemas = await self.request_object("GET", "/schema")
        schema = schemas.get("action")
        if not isinstance(schema, dict):
            raise self.error(f"{self.url}/schema has no schema of actions: {brief_repr(schemas)}")
        return schema

    def _reported(self, message: Mapping[str, Any], data: Mapping[str, Any]) -> Exception:
        """Return the exception for an error that the server reports."""
        text = _error_text(data)
        code = data.get("code")
        if code == "VALIDATION_ERROR" and message["type"] == "step":
            return _InvalidActionError(_validation_text(data.get("errors")) or text)
        hint = ""
        if code == "CAPACITY_REACHED":
            hint = "; set environments.max_instances to what the server holds"
        return self.error(f"{self.url} answered {message['type']} with {code}: {text[:500]}{hint}")


def _validation_text(errors: Any) -> str:
    """Return pydantic's errors about an action as the policy reads them."""
    problems = []
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, Mapping):
            field = ".".join(str(part) for part in error.get("loc") or ())
            problems.append(f"{field}: {error.get('msg')}")
    return "; ".join(problems)[:1000]
