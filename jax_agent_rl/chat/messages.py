"""Chat messages in one form, whoever wrote them.

Dataset rows, the endpoint's dialects, agents' frameworks, fine-tuning data, simulated users and
judges all write a conversation in their own way: ``content`` is null, a string or a list of parts,
arguments are an object or JSON text, reasoning has three names, fields come and go. Whatever is
encoded goes through :func:`normalize_messages`, so that a history reads the same to the policy in
training and in serving::

    {"role": "assistant",
     "content": "text", or a list of parts with images and videos among them,
     "reasoning_content": "text",
     "tool_calls": [{"id": "…", "type": "function",
                     "function": {"name": "f", "arguments": {"x": 1}}}]}
    {"role": "tool", "content": …, "tool_call_id": "…", "name": "f"}

A field that is null counts as absent. Fields with other names are kept: some templates read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax_agent_rl.chat.formats.base import to_arguments
from jax_agent_rl.errors import TemplateError
from jax_agent_rl.utils.media import KINDS
from jax_agent_rl.utils.surrogates import has_lone_surrogate

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Roles that APIs know, and what chat templates call them."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which frameworks send reasoning back; normal messages have the first."""
REASONING_PARTS = ("reasoning", "thinking", "redacted_thinking")
"""Kinds of content parts that hold reasoning."""
_REWRITTEN_FIELDS = frozenset(
    {"role", "content", "tool_calls", "function_call", "refusal", *REASONING_FIELDS}
)

ReadPart = Callable[[Any, str], Mapping[str, Any]]
"""Returns the normal form of a content part, given the part and its message's role.

Raises ValueError.
"""


def normalize_messages(
    messages: Iterable[Mapping[str, Any]],
    *,
    read_part: ReadPart | None = None,
    roles: Mapping[str, str] | None = None,
) -> list[Message]:
    """Return messages in the form of this module's docstring; normal messages come back unchanged.

    Args:
        messages: the messages in any of the forms.
        read_part: reads content parts that are not text. None: images and videos are taken as they
            are, and other parts refused.
        roles: the roles there may be, and what they become; None: any, as some templates have roles
            of their own.

    Raises:
        TemplateError: a message, a part or a tool call is not valid; the text says which.
    """
    normal_messages: list[Message] = []
    call_names: dict[str, str] = {}
    for index, message in enumerate(messages):
        try:
            normal = _normalize(message, read_part or _read_media_part, roles)
        except (TypeError, KeyError, ValueError) as error:
            problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
            raise TemplateError(f"messages[{index}]: {problem}") from None

        # Some templates show the name of the tool with its result.
        for call in normal.get("tool_calls", ()):
            call_names[call["id"]] = call["function"]["name"]
        if normal["role"] == "tool" and normal.get("tool_call_id") in call_names:
            normal.setdefault("name", call_names[normal["tool_call_id"]])
        normal_messages.append(normal)
    return normal_messages


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an assistant message in any framework's form; None if it has none."""
    for field in REASONING_FIELDS:
        if isinstance(message.get(field), str) and message[field]:
            return message[field]
    content = message.get("content")
    if not isinstance(content, list):
        return None
    thoughts: list[str] = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in REASONING_PARTS:
            text = part.get(part["type"]) or part.get("text")
            if isinstance(text, str):
                thoughts.append(text)
    return "".join(thoughts) if thoughts else None


def openai_message(message: Mapping[str, Any]) -> Message:
    """Return a normal message in the form of OpenAI's API: with arguments of calls as JSON text."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def alternating(messages: Sequence[Mapping[str, Any]], *, opening: str) -> list[Message]:
    """Return a conversation of texts whose roles alternate.

    Strict chat templates demand it (Gemma, Mistral). System messages become one at the beginning,
    adjacent messages of a role become one, and a conversation that the assistant begins gets a
    first message of the user.

    Args:
        messages: of roles system, user and assistant, with text as content.
        opening: what the user says where the assistant would begin.
    """
    system: list[str] = []
    turns: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "system":
            system.append(message["content"])
            continue

        if not turns and role == "assistant":
            turns.append({"role": "user", "content": opening})
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{message['content']}"
        else:
            turns.append({"role": role, "content": message["content"]})

    if system:
        turns.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return turns


def _normalize(message: Any, read_part: ReadPart, roles: Mapping[str, str] | None) -> Message:
    if not isinstance(message, Mapping):
        raise TypeError(f"must be an object, got {type(message).__name__}")
    role = message["role"]
    if roles is not None and role not in roles:
        raise ValueError(f"role {role!r} is not one of {sorted(roles)}")
    if not isinstance(role, str) or not role:
        raise ValueError(f"needs a role, got {role!r:.80}")
    _check_values(message)

    role = ROLES.get(role, role)
    content = message.get("content")
    if not content and role == "assistant":
        content = message.get("refusal")
    normal: Message = {"role": role, "content": _normalize_content(content, role, read_part)}
    for key, value in message.items():
        if key not in _REWRITTEN_FIELDS and value is not None:
            normal[key] = value

    reasoning = reasoning_of(message) if role == "assistant" else None
    if reasoning:
        normal["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):  # OpenAI's older form, of one call
        calls = [message["function_call"]]
    if calls:
        normal["tool_calls"] = [_normalize_call(call) for call in calls]

    for key in ("name", "tool_call_id"):
        if not isinstance(normal.get(key, ""), str):
            raise TypeError(f"{key} must be text, got {normal[key]!r:.80}")
    return normal


def _normalize_content(
    content: Any, role: str, read_part: ReadPart
) -> str | list[Mapping[str, Any]]:
    """Return text, or parts if some are not text; reasoning is left out."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise TypeError(f"content must be text or a list of parts, got {type(content).__name__}")

    normal: list[Mapping[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in REASONING_PARTS:
            continue
        if kind == "refusal":  # OpenAI's name for the text of an assistant that declines
            kind = "text"
            part = {"type": "text", "text": part.get("refusal")}
        if kind == "text" and isinstance(part.get("text"), str):
            text = part["text"]
            if normal and normal[-1]["type"] == "text":
                normal[-1] = {"type": "text", "text": normal[-1]["text"] + text}
            elif text:
                normal.append({"type": "text", "text": text})
        else:
            normal.append(read_part(part, role))

    if all(part["type"] == "text" for part in normal):
        return "".join(part["text"] for part in normal)
    return normal


def _read_media_part(part: Any, role: str) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in KINDS:
        raise ValueError(
            f"content part of type {kind!r} is not supported; there are text, {' and '.join(KINDS)}"
        )
    return part


def _normalize_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise TypeError(f"a tool call must be an object, got {call!r:.80}")
    function = call.get("function") or call  # some data sets have the function alone
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool call needs a name, got {dict(call)!r:.120}")
    arguments = to_arguments(function.get("arguments"))
    if isinstance(arguments, str):
        raise ValueError(f"tool call {name!r}: {arguments}, got {function.get('arguments')!r:.120}")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _check_values(value: Any) -> None:
    """Raise ValueError for values that JSON lacks: lone surrogates, and numbers not finite."""
    if isinstance(value, str):
        if has_lone_surrogate(value):
            raise ValueError(
                f"the text {value[:80]!r} holds a lone surrogate, which nothing can encode;"
                " replace it"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_values(key)
            _check_values(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_values(item)
