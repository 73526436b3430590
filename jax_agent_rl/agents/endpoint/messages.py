"""Anthropic's Messages API: its requests as chat requests, its answers, stream events and errors.

::

    system, messages[content blocks], tools[input_schema]   ─► ChatRequest ─► generation
    text, tool_use, thinking blocks; stop_reason; usage     ◄─ MessagesAnswer

A turn's ``tool_result`` blocks become tool messages before the turn's other content, its
``thinking`` blocks reasoning. A last message of the assistant is continued. Reference: the API
reference of ``POST /v1/messages``, version 2023-06-01.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.agents.endpoint.answers import ApiAnswer, ApiCall, ApiCount, only_turn
from jax_agent_rl.agents.endpoint.requests import (
    ApiError,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    Objects,
    Texts,
    nested_schema,
    read_chat,
)
from jax_agent_rl.agents.endpoint.sessions import Piece
from jax_agent_rl.agents.session_tree import RecordedTurn
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.reply import ToolCall
from jax_agent_rl.tools.schema import function_tool

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_BILLING_HEADER = "x-anthropic-billing-header:"
"""How a block of Claude Code's begins that is not for the model. It differs from conversation to
conversation, so that no prompt would begin as another one does."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class _ToolChoice(ApiRequest):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class AnthropicTool(ApiRequest):
    """A client tool; those that Anthropic's servers run have a ``type`` and are refused."""

    WITHOUT_EFFECT = frozenset(
        {
            "allowed_callers",
            "cache_control",
            "defer_loading",
            "eager_input_streaming",
            "input_examples",
            "strict",
        }
    )

    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any]


class _Thinking(ApiRequest):
    """Whether the answer shows the model's reasoning.

    How long it reasons is not controlled; ``max_tokens`` ends it.
    """

    WITHOUT_EFFECT = frozenset({"block_binding", "budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class _OutputConfig(ApiRequest):
    """The form of the answer; ``effort`` is without effect, as the thinking budget is."""

    WITHOUT_EFFECT = frozenset({"effort", "task_budget"})

    format: dict[str, Any] | None = None


class CountTokensRequest(ApiRequest):
    """``POST /v1/messages/count_tokens``, and the part of a request that makes up its prompt."""

    WITHOUT_EFFECT = frozenset(
        {
            "betas",
            "billing_policy",
            "cache_control",
            "compaction",
            "context_management",
            "diagnostics",
            "fallback_credit_token",
            "fallbacks",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "thread",
            "user_profile_id",
            "workspace_id",
        }
    )
    REFUSED = {
        "container": "give the model tools of your own",
        "mcp_servers": "call them in the client, and pass their tools",
    }

    model: str
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    system: str | Objects | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages")
    @classmethod
    def _roles(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in value:
            if message.get("role") not in ("user", "assistant", "system"):
                raise ValueError(
                    f"role {message.get('role')!r} is none of 'user', 'assistant' and 'system'"
                )
        return value

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            messages += _chat_messages(message)

        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "continue_final_message": self.messages[-1]["role"] == "assistant",
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        choice = self.tool_choice
        if choice is not None:
            if choice.type == "tool":
                fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            else:
                fields["tool_choice"] = _TOOL_CHOICES[choice.type]
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format:
            fields["response_format"] = nested_schema(self.output_config.format)
        return fields


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop_sequences: Texts | None = None
    stream: bool | None = None

    def chat_fields(self) -> dict[str, Any]:
        return super().chat_fields() | {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }


class MessagesCount(ApiCount):
    """``POST /v1/messages/count_tokens`` and its answer."""

    def __init__(self, call: ApiCall) -> None:
        self.model_request = read_chat(CountTokensRequest.model_validate(call.body).chat_fields())

    def answer(self, count: int) -> dict[str, Any]:
        return {"input_tokens": count}


class MessagesAnswer(ApiAnswer):
    """The answer to one request.

    Attributes:
        model_request: the equivalent chat request.

    Raises:
        ValidationError: a field is missing, wrong or not supported.
    """

    def __init__(self, call: ApiCall) -> None:
        self._request = MessagesRequest.model_validate(call.body)
        self.model_request: ChatRequest | CompletionRequest = read_chat(self._request.chat_fields())
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks = 0  # content blocks that were opened in the stream
        self._open: str | None = None
        self._started = False

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        turn = only_turn(choices)
        return self._message(self._content(turn), self._stop(turn), _usage(turn))

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        if not self._started:
            self._started = True
            nothing = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": self._message([], nothing, _NO_USAGE)}

        if piece.reasoning and self._shows_thinking:
            if self._open is not None:
                yield self._end()
            yield from self._block(
                {"type": "thinking", "thinking": piece.reasoning, "signature": ""}
            )

        if piece.text:
            if self._open is None:
                yield self._start({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": piece.text})

        if piece.call is not None:
            if self._open is not None:
                yield self._end()
            yield from self._block(_tool_block(piece.call))
        if piece.turn is not None and self._open is not None:
            yield self._end()

    def closing(self, codec: ChatCodec, choices: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        turn = only_turn(choices)
        yield {"type": "message_delta", "delta": self._stop(turn), "usage": _usage(turn)}
        yield {"type": "message_stop"}

    @staticmethod
    def failure(problem: ApiError) -> dict[str, Any]:
        default = "api_error" if problem.status >= 500 else "invalid_request_error"
        kind = _ERRORS.get(problem.status, default)
        return {"type": "error", "error": {"type": kind, "message": str(problem)}}

    ping = 'event: ping\ndata: {"type": "ping"}\n\n'

    @property
    def _shows_thinking(self) -> bool:
        return self._request.thinking is not None and self._request.thinking.type != "disabled"

    def _message(
        self, content: list[dict[str, Any]], stop: Mapping[str, Any], usage: Any
    ) -> dict[str, Any]:
        head = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
        }
        return {**head, "content": content, **stop, "usage": usage}

    def _content(self, turn: RecordedTurn) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = []
        for part in turn.reply.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
            elif part.call is not None:
                content.append(_tool_block(part.call))
            elif part.text and self._shows_thinking:
                content.append({"type": "thinking", "thinking": part.text, "signature": ""})
        return content

    def _stop(self, turn: RecordedTurn) -> dict[str, Any]:
        if turn.output.stop_match in self.model_request.stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": turn.output.stop_match}
        reason = _STOP_REASONS.get(turn.reply.finish_reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _block(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a block that is complete."""
        if block["type"] == "thinking":
            yield self._start(block | {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": block["thinking"]})
        else:
            arguments = json.dumps(block["input"])
            yield self._start(block | {"input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield self._end()

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._open = block["type"]
        return {"type": "content_block_start", "index": self._blocks, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _end(self) -> dict[str, Any]:
        self._open = None
        self._blocks += 1
        return {"type": "content_block_stop", "index": self._blocks - 1}


_NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "cache_read_input_tokens": 0,
    "cache_creation_input_tokens": 0,
}


def _usage(turn: RecordedTurn) -> dict[str, int]:
    cached = turn.output.cached_tokens
    return _NO_USAGE | {
        "input_tokens": len(turn.prompt_ids) - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": len(turn.output.token_ids),
    }


def _tool_block(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    return function_tool(tool.name, tool.description, tool.input_schema)


def _chat_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of one turn."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        yield {"role": message["role"], "content": content}
        return
    content = _blocks(content)
    if message["role"] == "assistant":
        yield _assistant_message(content)
        return
    if message["role"] == "system":
        yield {"role": "system", "content": _text(content)}
        return

    user_blocks = []
    for block in content:
        if block.get("type") != "tool_result":
            user_blocks.append(block)
            continue
        yield {
            "role": "tool",
            "tool_call_id": str(block.get("tool_use_id", "")),
            "content": _parts(block.get("content") or ""),
        }
    if user_blocks:
        yield {"role": "user", "content": _parts(user_blocks)}


def _assistant_message(content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = []
    other_blocks = []
    for block in content:
        if block.get("type") != "tool_use":
            other_blocks.append(block)
            continue
        function = {"name": block.get("name"), "arguments": block.get("input") or {}}
        calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})

    message: dict[str, Any] = {"role": "assistant", "content": _parts(other_blocks)}
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any) -> list[dict[str, Any]]:
    """Return content that is not text as blocks; raise ApiError if it is neither."""
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, "messages: content must be text or a list of blocks", param="messages")
    return content


def _parts(content: Any) -> str | list[dict[str, Any]]:
    """Return content as a chat message holds it."""
    if isinstance(content, str):
        return content
    return [_part(block) for block in _blocks(content)]


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block as a part of a chat message; other kinds are refused with the message."""
    kind = block.get("type")
    source = block.get("source")
    if kind == "image" and isinstance(source, Mapping):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return {"type": "text", "text": source.get("data")}
    if kind == "search_result" and isinstance(block.get("content"), list):
        return {"type": "text", "text": _text(block["content"])}
    without_effect = ("cache_control", "citations", "signature")
    return {name: value for name, value in block.items() if name not in without_effect}


def _text(system: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    texts = []
    for block in system:
        if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
            raise ApiError(400, f"system: a block of type {kind!r} is not text", param="system")
        if not block["text"].startswith(_BILLING_HEADER):
            texts.append(block["text"])
    return "\n".join(texts)
