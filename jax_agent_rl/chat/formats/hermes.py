"""The Hermes tool-call format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Used by Hermes 2/3, Qwen2.5 and Qwen3. Parsing never raises and never evaluates anything but JSON. The JSON
itself says where a call ends, so a tag inside a string of it is no tag. Each opening tag costs at most one look through
the rest of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax_agent_rl.chat.formats.types import Reply, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def parse(text: str) -> Reply:
    """Takes an assistant turn apart."""
    reasoning, visible = _split_reasoning(text)
    calls: list[ToolCall] = []
    malformed: list[str] = []
    content: list[str] = []
    for kind, part in _scan(visible):
        if kind == "text":
            content.append(part)
        elif isinstance(call := _to_call(part), ToolCall):
            calls.append(call)
        else:
            malformed.append(call)
    return Reply(
        content="".join(content).strip(), tool_calls=tuple(calls), malformed=tuple(malformed), reasoning=reasoning
    )


def system_section(tools: Sequence[Mapping[str, Any]]) -> str:
    """What to tell a model whose template has no section for tools."""
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    return (
        f"You can call these tools:\n<tools>\n{schemas}\n</tools>\n"
        f'To call one, write {OPEN}\n{{"name": "<tool name>", "arguments": {{…}}}}\n{CLOSE}'
    )


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the model would write it, for a template that cannot show calls."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def tool_result(text: str) -> str:
    """A tool result for a template that has no ``tool`` role: part of a user message."""
    return f"<tool_response>\n{text}\n</tool_response>"


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and the rest. A block that never closes is all reasoning; one opened in the prompt only closes."""
    if THINK not in text and END_THINK not in text:
        return None, text
    tags = _blank_json(text)
    opening, closing = tags.find(THINK), tags.rfind(END_THINK)
    after = text[closing + len(END_THINK) :]
    if 0 <= opening < closing:
        return text[opening + len(THINK) : closing], text[:opening] + after
    if closing >= 0:
        return text[:closing], after
    return (text[opening + len(THINK) :], text[:opening]) if opening >= 0 else (None, text)


def _blank_json(text: str) -> str:
    """The text with the JSON objects of calls blanked out, its length kept: ``<think>`` in a string is no tag."""
    pieces: list[str] = []
    at = 0
    while (begin := text.find(OPEN, at)) >= 0:
        value, end = _json_at(text, begin + len(OPEN))
        blank = end - begin - len(OPEN) if isinstance(value, dict) else 0
        pieces += [text[at : end - blank], " " * blank]
        at = end
    return "".join(pieces) + text[at:]


def _scan(text: str) -> Iterator[tuple[str, Any]]:
    """``("text", str)`` and ``("call", decoded JSON or the reason it is none)`` pieces, in order."""
    at = 0
    while (begin := text.find(OPEN, at)) >= 0:
        yield "text", text[at:begin]
        value, end = _json_at(text, begin + len(OPEN))
        close = text.find(CLOSE, end)
        following = text.find(OPEN, end)
        if close < 0 or 0 <= following < close:
            yield "call", f"{OPEN} without {CLOSE}"
            at = following if following >= 0 else len(text)
            continue
        if not isinstance(value, str) and text[end:close].strip():
            value = f"unexpected text after the JSON: {text[end:close].strip()[:40]!r}"
        yield "call", value
        at = close + len(CLOSE)
    yield "text", text[at:]


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value after white space and where it ends; or why there is none, and where it would begin."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {_reason(error)}", at


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:120]


def _to_call(value: Any) -> ToolCall | str:
    """A decoded value as a call, or what is wrong with it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return 'expected an object with "name" and "arguments"'
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            pass
    if not isinstance(arguments, dict):
        return f'"arguments" must be an object, got {type(arguments).__name__}'
    return ToolCall(name=value["name"], arguments=arguments)
