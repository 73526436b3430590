"""Hermes: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``; also Qwen2.5 and Qwen3."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax_agent_rl.chat.formats.scan import Read, Scanner, call_of, json_at, resume_after, skip_space
from jax_agent_rl.chat.formats.types import Reply, Schema, ToolFormat, call_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(text: str, opening: re.Match[str]) -> Read:
    value, end, problem = json_at(text, opening.end())
    close = skip_space(text, end)
    if problem is None and text.startswith(CLOSE, close):
        return Read([call_of(value)], close + len(CLOSE))
    resume = resume_after(text, end, CLOSE, OPEN)
    if not text.endswith(CLOSE, 0, resume):
        return Read([f"{OPEN} without {CLOSE}"], resume)
    rest = text[end : resume - len(CLOSE)].strip()
    return Read([problem or f"unexpected text after the JSON: {rest[:40]!r}"], resume)


_SCANNER = Scanner(re.escape(OPEN), _read)


def parse(text: str, tools: Sequence[Schema] = ()) -> Reply:
    """Takes an assistant turn apart."""
    return _SCANNER.parse(text)


FORMAT = ToolFormat(
    name="hermes",
    parse=parse,
    write=lambda name, arguments: f"{OPEN}\n{call_json(name, arguments)}\n{CLOSE}",
    call_end=CLOSE,
    example=f'{OPEN}\n{{"name": "<tool name>", "arguments": {{…}}}}\n{CLOSE}',
    markers=((OPEN, '"name"', '"arguments"'), (OPEN, '\\"name\\"', '\\"arguments\\"')),
)
