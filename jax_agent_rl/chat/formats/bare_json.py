"""Llama 3's JSON calls: the whole turn is ``{"name": …, "parameters": {…}}``, maybe after ``<|python_tag|>``.

Llama 3.2's templates name no tag, only the JSON.

Several calls are separated by ``;`` or white space (Llama 4 writes them so after ``<|python_start|>``). A turn that
begins with other JSON is an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax_agent_rl.chat.formats.scan import MAX_CALLS, Read, Scanner, call_of, json_at, resume_after, skip_space
from jax_agent_rl.chat.formats.types import Reply, Schema, ToolCall, ToolFormat

_KEYS = ("parameters", "arguments")
_TAGS = ("<|python_tag|>", "<|python_start|>")
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:')


def _read(text: str, opening: re.Match[str]) -> Read | None:
    tagged = opening.group() in _TAGS
    at = opening.end() if tagged else opening.end() - 1
    items: list[ToolCall | str] = []
    while text.startswith("{", at := skip_space(text, at)) and len(items) <= MAX_CALLS:
        value, end, problem = json_at(text, at)
        if problem is None and not _is_call(value) and not items and not tagged:
            return None
        if problem is not None:
            if not items and not tagged and not _LOOKS_LIKE_CALL.match(text, at):
                return None
            return Read([problem], resume_after(text, at + 1, None, *_TAGS))
        items.append(call_of(value, keys=_KEYS))
        at = skip_space(text, end)
        at += text.startswith(";", at)
    return Read(items or [f"expected JSON with a name after {opening.group()}"], at)


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in _KEYS)


_SCANNER = Scanner(r"<\|python_tag\|>|<\|python_start\|>|(?:\A|(?<=</think>))\s*\{", _read, noise=r"<\|python_end\|>")


def _parse(text: str, tools: Sequence[Schema] = ()) -> Reply:
    return _SCANNER.parse(text)


FORMAT = ToolFormat(
    name="llama3_json",
    parse=_parse,
    example='{"name": "NAME", "parameters": {"KEY": VALUE}}',
    markers=tuple(('"parameters"', mark) for mark in (*_TAGS, '{"name": function name')),
)
