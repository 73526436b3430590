"""Chat messages of agents' frameworks, normalized and compared by content.

A framework sends the whole conversation with every request, and no two write it alike: ``content`` is None, a string
or a list of parts, arguments are JSON with other spaces, fields come and go. Two messages are the *same* when role,
text and tool calls (name and decoded arguments) are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import TemplateError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

REASONING = ("reasoning", "thinking")
"""Parts that frameworks send back and no model reads: what it thought is not a part of what it said."""

_REASONING_FIELDS = ("reasoning_content", *REASONING)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallWithId:
    """A decoded tool call of a reply, with the id under which its result will be sent back."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traces:
    """Reasoning and call ids of an assistant message, which tell samples of the same text apart.

    Frameworks need not send them back.

    Attributes:
        reasoning: the text of its thinking.
        call_ids: ids of its tool calls.
    """

    reasoning: str | None
    call_ids: tuple[str, ...]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Traces:
        """Return the traces of a message that :func:`plain_messages` accepts."""
        fields = (message.get(name) for name in _REASONING_FIELDS)
        reasoning = next((field for field in fields if isinstance(field, str)), None)
        content = message.get("content")
        for part in content if reasoning is None and isinstance(content, list) else ():
            if isinstance(part, Mapping) and (kind := part.get("type")) in REASONING:
                text = part.get(kind) or part.get("text")
                reasoning = (reasoning or "") + text if isinstance(text, str) else reasoning
        return cls(reasoning=reasoning, call_ids=tuple(str(call.get("id")) for call in message.get("tool_calls") or ()))


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return OpenAI-style messages as a chat template takes them: text content, arguments as objects, named results.

    Raises:
        TemplateError: an unknown role, content that is not text, or a tool call that is no call; says which message.
    """
    names: dict[str, str] = {}
    plain = []
    for index, message in enumerate(messages):
        try:
            one = _plain(message)
        except (TypeError, KeyError, ValueError) as error:
            raise TemplateError(f"messages[{index}]: {error}") from None
        names |= {call["id"]: call["function"]["name"] for call in one.get("tool_calls", ())}
        if one["role"] == "tool" and one.get("tool_call_id") in names:
            one.setdefault("name", names[one["tool_call_id"]])
        plain.append(one)
    return plain


def assistant_message(content: str, calls: Sequence[CallWithId]) -> dict[str, Any]:
    """Return a reply in the shape of :func:`plain_messages`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in calls
        ]
    return message


def fingerprint(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest that is equal iff two plain conversations with the same tools read the same to a model."""
    said = [_said(message) for message in messages]
    return hashlib.blake2b(json.dumps([said, list(tools)], sort_keys=True).encode(), digest_size=16).hexdigest()


def _said(message: Mapping[str, Any]) -> list[Any]:
    """Ids of calls are left out: frameworks rename them, and no model sees them twice."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return [message["role"], message["content"].strip(), calls]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"must be an object, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {sorted(ROLES)}")
    plain: dict[str, Any] = {"role": ROLES[role], "content": _text(message.get("content"))}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            plain[key] = message[key]
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TypeError(f"content must be text or a list of parts, got {type(content).__name__}")
    parts = [part for part in content if not (isinstance(part, Mapping) and part.get("type") in REASONING)]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part of type {kind!r} is not supported; this model reads text only")
    return "".join(part["text"] for part in parts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, Mapping) or not isinstance(function["name"], str):
        raise ValueError(f"a tool call needs a name and an object of arguments, got {dict(function)!r:.120}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }
