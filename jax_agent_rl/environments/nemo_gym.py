"""Environments that a resources server of NeMo Gym runs, over HTTP.

A row names the server and holds a row of NeMo Gym's data as it is::

    "extra_info": {
        "environment_kwargs": {
            "name": "nemo_gym", "url": "http://127.0.0.1:8001",
            "row": {"responses_create_params": {"input": […], "tools": […]}, "expected": 6}
        }
    }

Its ``input`` is the prompt, and its ``tools`` are offered. A cookie names the session::

    protocol verify       POST /seed_session ─► POST /<tool> … ─► POST /verify: the reward
    protocol gymnasium    POST /reset ─► POST /step: tool results, observation, reward …

The server reads what the policy wrote as items of OpenAI's Responses API.
"""

from __future__ import annotations

import functools
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from jax_agent_rl.chat.thinking import answer_of
from jax_agent_rl.checks import as_score, brief_repr, is_number
from jax_agent_rl.environments.base import Environment, Observation, register_environment
from jax_agent_rl.environments.calls import EpisodeTool, call_messages, run_calls, tools_by_name
from jax_agent_rl.environments.server_session import ServerSession
from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.types import FinishReason, ToolCallRecord

if TYPE_CHECKING:
    from jax_agent_rl.chat.reply import Reply

Item = dict[str, Any]
"""An item of the Responses API."""
_OWN_ROUTES = frozenset({"verify", "seed_session", "aggregate_metrics", "mcp"})
"""Routes of a server that are not tools."""
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


@register_environment("nemo_gym")
class NemoGymEnvironment(Environment):
    """A session of a resources server."""

    def __init__(self) -> None:
        self._server: ServerSession | None = None
        self._protocol = "verify"
        self._row: dict[str, Any] = {}
        self._tools: dict[str, EpisodeTool] = {}
        self._output: list[Item] = []
        """All that was said after the prompt."""
        self._turn = 0
        self._must_close = False

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def reset(
        self,
        *,
        url: str,
        row: Mapping[str, Any] | str,
        protocol: Literal["verify", "gymnasium"] = "verify",
    ) -> Observation:
        """Begin an episode.

        Args:
            url: the server's address.
            row: a row of NeMo Gym's data (JSON text where a Parquet file cannot hold a mapping).
            protocol: ``verify`` for a ``SimpleResourcesServer``, ``gymnasium`` for a
                ``GymnasiumServer``.
        """
        if protocol not in ("verify", "gymnasium"):
            raise EnvironmentFailedError(
                f"nemo_gym: protocol {protocol!r} must be 'verify' or 'gymnasium'"
            )
        await self.close()
        self._protocol = protocol
        self._row = json.loads(row) if isinstance(row, str) else dict(row)
        self._output = []
        self._turn = 0
        params = self._row.get("responses_create_params")
        if not isinstance(params, Mapping):
            raise EnvironmentFailedError(
                f"nemo_gym: row has no responses_create_params: {brief_repr(self._row)}"
            )
        messages = list(_prompt(params))
        self._tools = self._offered_tools(params.get("tools") or ())

        self._server = ServerSession(url, environment="nemo_gym")
        self._server.open()
        if protocol == "verify":
            await self._server.request_object("POST", "/seed_session", self._row)
            return Observation(messages=tuple(messages))

        opening = await self._server.request_object("POST", "/reset", self._row)
        self._must_close = _info(opening).get("supports_explicit_close") is True
        if opening.get("observation"):
            messages.append({"role": "user", "content": str(opening["observation"])})
        return Observation(messages=tuple(messages))

    async def step(self, reply: Reply) -> Observation:
        """Answer a reply: its calls run on the server, without any it is the answer."""
        self._turn += 1
        if self._protocol == "gymnasium":
            return await self._gymnasium_step(reply)

        records = await run_calls(self._tools, reply, turn=self._turn)
        self._output += self._reply_items(reply)
        messages = call_messages(records)
        for record in records:
            if record.call_id is not None:
                self._output.append(_call_output(record.call_id, record.observation))
        if records and messages[0]["role"] == "user":  # no call could be decoded
            self._output.append({"type": "message", **messages[0]})
        return Observation(messages=messages, tool_calls=tuple(records), done=not records)

    async def conclude(
        self, messages: Sequence[Mapping[str, Any]], reason: FinishReason
    ) -> Mapping[str, float]:
        """Return the verifier's reward, and every other number that it returns, as a metric."""
        if self._protocol == "gymnasium":
            return {}

        is_cut = reason is FinishReason.RESPONSE_LENGTH and messages[-1]["role"] == "assistant"
        if is_cut:
            # A turn that was cut off did not get to `step`, but the verifier has to read it.
            text = answer_of(str(messages[-1]["content"]))
            self._output.append(_message(f"msg_{self._turn + 1}", text, status="incomplete"))
        body = {**self._row, "response": self._response(self._output, is_cut=is_cut)}
        verdict = await self._session().request_object("POST", "/verify", body)

        outcome = {"score": _reward(verdict)}
        parts = verdict.get("reward_components")
        numbers = {**verdict, **(parts if isinstance(parts, Mapping) else {})}
        for name, value in numbers.items():
            if name != "reward" and name not in self._row and _is_metric(value):
                outcome[f"nemo_gym/{name}"] = float(value)
        return outcome

    async def close(self) -> None:
        """End the session."""
        server = self._server
        self._server = None
        if server is None:
            return
        try:
            if self._must_close:
                self._must_close = False
                await server.request("POST", "/close", {})
        finally:
            await server.close()

    def _session(self) -> ServerSession:
        if self._server is None:
            raise EnvironmentFailedError("nemo_gym: there is no session; reset comes first")
        return self._server

    # --- tools of the protocol `verify` -----------------------------------------------------------

    def _offered_tools(self, declared: Sequence[Any]) -> dict[str, EpisodeTool]:
        tools: list[EpisodeTool] = []
        for tool in declared:
            is_function = isinstance(tool, Mapping) and tool.get("type") == "function"
            if not is_function or not isinstance(tool.get("name"), str):
                raise EnvironmentFailedError(
                    f"nemo_gym: only functions are offered as tools, not {brief_repr(tool)}"
                )
            name = tool["name"]
            if name in _OWN_ROUTES:
                raise EnvironmentFailedError(
                    f"nemo_gym: a tool is called {name!r}, which is a route of the protocol"
                )
            tools.append(
                EpisodeTool(
                    name=name,
                    description=tool.get("description") or "",
                    parameters=tool.get("parameters") or {"type": "object", "properties": {}},
                    run=functools.partial(self._call, name),
                )
            )
        return tools_by_name(tools)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        server = self._session()
        path = f"/{quote(name, safe='')}"
        answer = await server.request("POST", path, dict(arguments))
        # As in NeMo Gym's own agent, the model reads what a call was refused for. A server that
        # failed says nothing about the call.
        if answer.status >= 500:
            raise server.refused(path, answer)
        return answer.text

    # --- protocol `gymnasium` ---------------------------------------------------------------------

    async def _gymnasium_step(self, reply: Reply) -> Observation:
        items = self._reply_items(reply)
        body = {**self._row, "response": self._response(items)}
        outcome = await self._session().request_object("POST", "/step", body)

        results: dict[str, str] = {}
        for result in _info(outcome).get("tool_outputs") or ():
            if isinstance(result, Mapping):
                results[str(result.get("call_id"))] = str(result.get("output"))
        records: list[ToolCallRecord] = []
        messages: list[Mapping[str, Any]] = []
        for number, part in enumerate(reply.calls):
            if part.call is None:  # the server has read it as text
                continue
            call_id = self._call_id(number)
            record = ToolCallRecord(
                name=part.call.name,
                arguments=part.call.arguments,
                observation=results.get(call_id, ""),
                call_id=call_id,
            )
            records.append(record)
            messages += call_messages([record])
        if outcome.get("observation"):
            messages.append({"role": "user", "content": str(outcome["observation"])})
        return Observation(
            messages=tuple(messages),
            tool_calls=tuple(records),
            score=_reward(outcome),
            done=bool(outcome.get("terminated") or outcome.get("truncated")),
        )

    # --- what the policy wrote, as items ----------------------------------------------------------

    def _call_id(self, number: int) -> str:
        return f"call_{self._turn}_{number}"

    def _reply_items(self, reply: Reply) -> list[Item]:
        """Return a reply as items, its calls by the ids of their records."""
        items: list[Item] = []
        if reply.reasoning is not None:
            summary = [{"type": "summary_text", "text": reply.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{self._turn}", "summary": summary})

        text = reply.text_of("text", "malformed").strip()
        if text or not reply.tool_calls:
            items.append(_message(f"msg_{self._turn}", text))

        for number, part in enumerate(reply.calls):
            if part.call is not None:
                items.append(
                    {
                        "type": "function_call",
                        "id": f"fc_{self._turn}_{number}",
                        "call_id": self._call_id(number),
                        "name": part.call.name,
                        "arguments": json.dumps(part.call.arguments),
                        "status": "completed",
                    }
                )

        return items

    def _response(self, output: Sequence[Item], *, is_cut: bool = False) -> dict[str, Any]:
        """Return a response of the Responses API."""
        params = self._row["responses_create_params"]
        details = {"reason": "max_output_tokens"} if is_cut else None
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": details,
            "output": list(output),
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools") or [],
        }


def _prompt(params: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the prompt as messages.

    Raises:
        EnvironmentFailedError: it holds what is not a message of text.
    """
    messages: list[Mapping[str, Any]] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": str(params["instructions"])})
    items = params.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items or ():
        role = _ROLES.get(str(item.get("role"))) if isinstance(item, Mapping) else None
        if role is None or item.get("type", "message") != "message":
            raise EnvironmentFailedError(
                f"nemo_gym: the input holds what is not a message: {brief_repr(item)}"
            )
        messages.append({"role": role, "content": _item_text(item.get("content"))})
    return messages


def _item_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or ():
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise EnvironmentFailedError(
                f"nemo_gym: the input holds what cannot be shown here: {brief_repr(part)}"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _message(item_id: str, text: str, *, status: str = "completed") -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _call_output(call_id: str, text: str) -> Item:
    return {
        "type": "function_call_output",
        "id": f"{call_id}_output",
        "call_id": call_id,
        "output": text,
        "status": "completed",
    }


def _info(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    info = answer.get("info")
    return info if isinstance(info, Mapping) else {}


def _reward(answer: Mapping[str, Any]) -> float:
    """Return the reward of an answer.

    Raises:
        EnvironmentFailedError: it has none, or one that float32 does not hold.
    """
    try:
        return as_score(answer.get("reward"), "the reward")
    except ValueError as error:
        raise EnvironmentFailedError(f"nemo_gym: {error}") from None


def _is_metric(value: Any) -> bool:
    return isinstance(value, bool) or is_number(value)
