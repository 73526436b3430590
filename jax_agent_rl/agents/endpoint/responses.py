"""OpenAI's Responses API: its requests as chat requests, its answers and stream events.

::

    instructions, input items, previous_response_id ─► ChatRequest ─► generation
    reasoning, message, function_call items; usage  ◄─ ResponsesAnswer

Input items that belong to one assistant turn (reasoning, message, function calls) become one
message, as the model wrote them. A session stores its responses, so that ``previous_response_id``
continues one by its exact ids. The model knows a function of a namespace as ``namespace.name``.
Reference: the API reference of ``POST /v1/responses``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jax_agent_rl.agents.endpoint.answers import (
    ApiAnswer,
    ApiCall,
    only_turn,
    reasoning_tokens,
    tool_calls,
)
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

Message = dict[str, Any]
_INPUT_TEXT = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


class _TextConfig(ApiRequest):
    WITHOUT_EFFECT = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ResponsesRequest(ApiRequest):
    """``POST /v1/responses``.

    Wishes for reasoning are without effect: it is in the answer, and ``max_output_tokens`` bounds
    it.
    """

    WITHOUT_EFFECT = frozenset(
        {
            "access_programs",
            "background_options",
            "client_metadata",
            "context_management",
            "max_tool_calls",
            "moderation",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "reasoning",
            "safety_identifier",
            "service_tier",
            "stream_options",
            "user",
        }
    )
    REFUSED = {
        "conversation": "use previous_response_id, or send the conversation as input items",
        "image": "answers are text; leave it out",
        "prompt": "send instructions and input items",
    }

    model: str
    input: Annotated[str | Objects, Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _TextConfig | None = None
    stream: bool | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    background: Literal[False] | None = None
    include: Texts | None = None
    metadata: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tools")
    @classmethod
    def _functions(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in value or ():
            functions = [tool]
            if tool.get("type") == "namespace" and tool.get("name"):
                functions = tool.get("tools")
                if not isinstance(functions, list):
                    raise ValueError(f"a namespace needs a list of tools, got {tool!r:.120}")
            for function in functions:
                if (
                    not isinstance(function, dict)
                    or function.get("type") != "function"
                    or not function.get("name")
                ):
                    raise ValueError(
                        f'needs {{"type": "function", "name": …}}, got {function!r:.120}'
                    )
        return value

    @field_validator("include")
    @classmethod
    def _available(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError(
                "log-probs are in the answers of /v1/chat/completions alone; leave them out"
            )
        return value

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of each function of one, by the name that the model knows."""
        names = {}
        for tool in self.tools or ():
            if tool["type"] != "namespace":
                continue
            for function in tool["tools"]:
                pair = (tool["name"], function["name"])
                names[_qualified(*pair)] = pair
        return names

    def chat_fields(self, history: Sequence[Message]) -> dict[str, Any]:
        """Return the fields of the equivalent chat request, which continues ``history``."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return {
            "model": self.model,
            "messages": [*system, *history, *_chat_messages(self.input)],
            "tools": _chat_tools(self.tools) if self.tools else None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "chat_template_kwargs": self.chat_template_kwargs,
            "response_format": (
                nested_schema(self.text.format) if self.text and self.text.format else None
            ),
        }


class ResponsesAnswer(ApiAnswer):
    """The answer to one request.

    It is added to the session's responses, unless ``store`` is false.

    Attributes:
        model_request: the equivalent chat request.

    Raises:
        ApiError: ``previous_response_id`` is not among them.
        ValidationError: a field is missing, wrong or not supported.
    """

    def __init__(self, call: ApiCall) -> None:
        request = ResponsesRequest.model_validate(call.body)
        stored = call.stored
        self._request = request
        self._namespaces = request.namespaces
        self._stored = stored

        history: list[Message] = []
        previous = request.previous_response_id
        if previous is not None:
            if stored is None or previous not in stored:
                where = "in this session"
                if stored is None:
                    where = "outside sessions, where none is stored"
                raise ApiError(
                    400,
                    f"there is no response {previous!r} {where};"
                    " send the conversation as input items",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            history = stored[previous]

        self.model_request: ChatRequest | CompletionRequest = read_chat(
            request.chat_fields(history)
        )
        self._history = [*history, *_chat_messages(request.input)]
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sequence = 0
        self._items: list[dict[str, Any]] = []  # that the stream has completed
        self._text: str | None = None  # of the message the stream has opened

    def whole(self, codec: ChatCodec, choices: Sequence[Piece]) -> dict[str, Any]:
        """Return the ``response`` object, and store it for the next request."""
        turn = only_turn(choices)
        items: list[dict[str, Any]] = []
        for part in turn.reply.parts:
            if part.kind == "text":
                items.append(_message_item(part.text))
            elif part.call is not None:
                items.append(self._call_item(part.call))
            elif part.text:
                items.append(_reasoning_item(part.text))
        if _is_empty(turn):
            items.append(_message_item(""))
        self._store(turn)
        return self._response(codec, items, turn)

    def chunks(self, codec: ChatCodec, piece: Piece) -> Iterator[dict[str, Any]]:
        if not self._sequence:
            yield self._event("response.created", response=self._response(codec, [], None))
            yield self._event("response.in_progress", response=self._response(codec, [], None))
        if piece.reasoning:
            yield from self._message_done()
            item = _reasoning_item(piece.reasoning)  # complete, without the events of its parts
            yield self._added(item)
            yield self._done(item)
        if piece.text or (piece.turn is not None and _is_empty(piece.turn)):
            yield from self._message_delta(piece.text)
        if piece.call is not None:
            yield from self._message_done()
            yield from self._call(self._call_item(piece.call))
        if piece.turn is not None:
            yield from self._message_done()

    def closing(self, codec: ChatCodec, choices: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        """Yield the event that ends the stream, and store the response for the next request."""
        turn = only_turn(choices)
        self._store(turn)
        response = self._response(codec, self._items, turn)
        yield self._event(f"response.{response['status']}", response=response)

    @staticmethod
    def encode(event: dict[str, Any]) -> str:
        if "error" in event:  # the body of a failure, which is an event here
            error = event["error"]
            event = {
                "type": "error",
                "code": error["code"],
                "message": error["message"],
                "param": error["param"],
            }
        return ApiAnswer.encode(event)

    def _store(self, turn: RecordedTurn) -> None:
        if self._stored is None or self._request.store is False:
            return
        reply: Message = {"role": "assistant", "content": turn.reply.content}
        if turn.reply.reasoning:
            reply["reasoning"] = turn.reply.reasoning
        if turn.reply.tool_calls:
            reply["tool_calls"] = tool_calls(turn.reply)
        self._stored[self._id] = [*self._history, reply]

    def _response(
        self, codec: ChatCodec, items: list[dict[str, Any]], turn: RecordedTurn | None
    ) -> dict[str, Any]:
        """Return the ``response`` object; ``turn`` is None while it is sampled."""
        request = self._request
        status = "completed"
        incomplete_details = None
        if turn is None:
            status = "in_progress"
        elif turn.reply.finish_reason == "length":
            status = "incomplete"
            incomplete_details = {"reason": "max_output_tokens"}

        text_format = {"type": "text"}
        if request.text is not None and request.text.format:
            text_format = request.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store is not False and self._stored is not None,
            "temperature": request.temperature,
            "text": {"format": text_format},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if turn is None else _usage(codec, turn),
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        return self._event("response.output_item.added", item=item, output_index=len(self._items))

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        event = self._event("response.output_item.done", item=item, output_index=len(self._items))
        self._items.append(item)
        return event

    def _message_delta(self, text: str) -> Iterator[dict[str, Any]]:
        if self._text is None:
            self._text = ""
            self._message_id = f"msg_{uuid.uuid4().hex}"
            item = _message_item("", self._message_id) | {"status": "in_progress", "content": []}
            yield self._added(item)
            yield self._event(
                "response.content_part.added", part=_text_part(""), **self._part_indices()
            )
        if text:
            self._text += text
            yield self._event(
                "response.output_text.delta", delta=text, logprobs=[], **self._part_indices()
            )

    def _message_done(self) -> Iterator[dict[str, Any]]:
        if self._text is None:
            return
        item = _message_item(self._text, self._message_id)
        yield self._event(
            "response.output_text.done", text=self._text, logprobs=[], **self._part_indices()
        )
        yield self._event(
            "response.content_part.done", part=item["content"][0], **self._part_indices()
        )
        yield self._done(item)
        self._text = None

    def _part_indices(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": len(self._items), "content_index": 0}

    def _call_item(self, call: ToolCall) -> dict[str, Any]:
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": "completed",
        }
        if call.name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[call.name]
        return item

    def _call(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        arguments = item["arguments"]
        indices = {"item_id": item["id"], "output_index": len(self._items)}
        yield self._added(item | {"arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", delta=arguments, **indices)
        yield self._event(
            "response.function_call_arguments.done",
            arguments=arguments,
            name=item["name"],
            **indices,
        )
        yield self._done(item)


def _is_empty(turn: RecordedTurn) -> bool:
    """Return whether a turn has neither text nor calls; clients expect a message then."""
    return not turn.reply.content and not turn.reply.tool_calls


def _usage(codec: ChatCodec, turn: RecordedTurn) -> dict[str, Any]:
    return {
        "input_tokens": len(turn.prompt_ids),
        "input_tokens_details": {
            "cached_tokens": turn.output.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": len(turn.output.token_ids),
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens(codec, turn)},
        "total_tokens": len(turn.context_ids),
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(text: str, item_id: str | None = None) -> dict[str, Any]:
    return {
        "id": item_id or f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_text_part(text)],
    }


def _reasoning_item(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": content}


# --- input items as chat messages -----------------------------------------------------------------


def _qualified(namespace: Any, name: Any) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{namespace}.{name}"


def _chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as those of a chat request; a namespace's description is in each of its own."""
    functions = []
    for tool in tools:
        if tool["type"] == "function":
            functions.append(_chat_function(tool))
            continue
        for function in tool["tools"]:
            texts = [tool.get("description"), function.get("description")]
            described = {
                **function,
                "name": _qualified(tool["name"], function["name"]),
                "description": "\n\n".join(text for text in texts if isinstance(text, str)),
            }
            functions.append(_chat_function(described))
    return functions


def _chat_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    # In the client's order, which the prompt shows.
    function = {
        key: value for key, value in tool.items() if key in ("name", "description", "parameters")
    }
    return {"type": "function", "function": function}


def _chat_messages(items: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return input items as messages; neighbours that one assistant turn produced are joined.

    A turn may be several messages with reasoning and calls between them. Two messages of the
    assistant with nothing between them are two turns, as the text of one is in one item.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    previous_kind = ""  # of the item before, if that is part of an assistant turn
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else _parts(output, number)
            messages.append(
                {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content}
            )
            previous_kind = ""
            continue
        if kind == "message" and item.get("role") != "assistant":
            messages.append(
                {"role": item.get("role"), "content": _parts(item.get("content"), number)}
            )
            previous_kind = ""
            continue
        if kind not in ("message", "function_call", "reasoning"):
            raise ApiError(
                400, f"input[{number}]: items of type {kind!r} are not supported", param="input"
            )

        starts_turn = previous_kind == "" or (kind == "message" and previous_kind == "message")
        if starts_turn:
            messages.append({"role": "assistant", "content": ""})
        previous_kind = kind
        turn = messages[-1]
        if kind == "message":
            turn["content"] += _joined_text(item.get("content"), number)
        elif kind == "function_call":
            name = item.get("name")
            if item.get("namespace"):
                name = _qualified(item["namespace"], name)
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        else:
            thought = _joined_text(item.get("content") or item.get("summary") or "", number)
            turn["reasoning"] = turn.get("reasoning", "") + thought
    return messages


def _joined_text(content: Any, number: int) -> str:
    parts = _parts(content, number)
    if isinstance(parts, str):
        return parts
    return "".join(part.get("text", "") for part in parts)


def _parts(content: Any, number: int) -> str | list[dict[str, Any]]:
    """Return an item's content as the parts of a chat message."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise ApiError(
            400, f"input[{number}]: content must be text or a list of parts", param="input"
        )
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _INPUT_TEXT:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind == "input_image":
        return {
            "type": "image_url",
            "image_url": {"url": part.get("image_url"), "detail": part.get("detail")},
        }
    return dict(part)
