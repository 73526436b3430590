"""Text markers: ``<tool>…</tool>``. What stands between is the one argument of the sample's one tool, as it is.

With several tools, or for a tool of several arguments, it is ``{"name": …, "arguments": {…}}``. Code ends at the first
closing marker (generation may stop there); JSON at its own end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jax_agent_rl.chat.formats.scan import Read, Scanner, call_of, json_at, resume_after, skip_space
from jax_agent_rl.chat.formats.types import Reply, Schema, ToolCall, ToolFormat, call_json

OPEN, CLOSE = "<tool>", "</tool>"


def _reader(target: tuple[str, str] | None) -> Any:
    def read(text: str, opening: re.Match[str]) -> Read:
        value, end, problem = json_at(text, opening.end())
        close = skip_space(text, end)
        if problem is None and isinstance(value, dict) and "name" in value and text.startswith(CLOSE, close):
            return Read([call_of(value)], close + len(CLOSE))
        end = resume_after(text, opening.end(), CLOSE, OPEN)
        if not text.endswith(CLOSE, 0, end):
            return Read([f"{OPEN} without {CLOSE}"], end)
        if target is None:
            return Read([f'expected {{"name": …, "arguments": {{…}}}} between {OPEN} and {CLOSE}'], end)
        name, key = target
        return Read([ToolCall(name=name, arguments={key: text[opening.end() : end - len(CLOSE)].strip("\n")})], end)

    return read


def _only_text_argument(tools: Sequence[Schema]) -> tuple[str, str] | None:
    """The name of the only tool and of the only argument it needs, a string; None if that is not so."""
    if len(tools) != 1:
        return None
    function = tools[0].get("function", tools[0])
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    needed = parameters.get("required") or list(properties)
    if len(needed) != 1 or (properties.get(needed[0]) or {}).get("type") != "string":
        return None
    return function["name"], needed[0]


def _parse(text: str, tools: Sequence[Schema] = ()) -> Reply:
    return Scanner(re.escape(OPEN), _reader(_only_text_argument(tools))).parse(text)


FORMAT = ToolFormat(
    name="text_tag",
    parse=_parse,
    call_end=CLOSE,
    example=f'{OPEN}{{"name": "<tool name>", "arguments": {{…}}}}{CLOSE}',
    write=lambda name, arguments: f"{OPEN}{call_json(name, arguments)}{CLOSE}",
    result="<result>\n{}\n</result>",
)
