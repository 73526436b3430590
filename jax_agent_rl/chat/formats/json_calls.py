"""Formats that write a call as one JSON object of name and arguments: Hermes, Llama 3 and ``<tool>`` tags.

::

    hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>          also Qwen2.5 and Qwen3
    llama3_json  {"name": …, "parameters": {…}}; …                             the whole turn, maybe after a tag
    text_tag     <tool>{"name": …, "arguments": {…}}</tool> or <tool>text</tool>

Llama 3.2's templates name no tag, only the JSON. Several calls are separated by ``;`` or white
space (Llama 4 writes them so after ``<|python_start|>``). A turn that begins with other JSON is an
answer.

Text between ``<tool>`` tags is the one argument of the sample's one tool, unchanged; with several
tools, or for a tool of several arguments, it is JSON. Text ends at the first closing tag
(generation may stop there); JSON at its own end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax_agent_rl.chat.formats.base import (
    MAX_CALLS,
    Read,
    Reader,
    Scanner,
    Schema,
    ToolFormat,
    call_json,
    json_at,
    resume_after,
    skip_space,
    to_call,
)
from jax_agent_rl.chat.grammar import CallSyntax
from jax_agent_rl.chat.reply import Reply, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(text: str, opening: re.Match[str]) -> Read:
    value, end, problem = json_at(text, opening.end())
    close = skip_space(text, end)
    if problem is None and text.startswith(CLOSE, close):
        return Read([to_call(value)], close + len(CLOSE))
    resume = resume_after(text, end, CLOSE, OPEN)
    if not text.endswith(CLOSE, 0, resume):
        return Read([f"{OPEN} without {CLOSE}"], resume)
    rest = text[end : resume - len(CLOSE)].strip()
    return Read([problem or f"unexpected text after the JSON: {rest[:40]!r}"], resume)


_HERMES_SCANNER = Scanner(re.escape(OPEN), _read_hermes)
HERMES = ToolFormat(
    name="hermes",
    parse=_HERMES_SCANNER.parse,
    scanner=_HERMES_SCANNER,
    write=lambda name, arguments: f"{OPEN}\n{call_json(name, arguments)}\n{CLOSE}",
    call_end=CLOSE,
    example=f'{OPEN}\n{{"name": "<tool name>", "arguments": {{…}}}}\n{CLOSE}',
    markers=((OPEN, '"name"', '"arguments"'), (OPEN, '\\"name\\"', '\\"arguments\\"')),
    syntaxes=(
        CallSyntax(
            before=f'{OPEN}\n{{"name": "NAME", "arguments": ', after=f"}}\n{CLOSE}", between="\n"
        ),
    ),
)

_KEYS = ("parameters", "arguments")
_TAGS = ("<|python_tag|>", "<|python_start|>")
_LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:')


def _read_llama(text: str, opening: re.Match[str]) -> Read | None:
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
        items.append(to_call(value, keys=_KEYS))
        at = skip_space(text, end)
        at += text.startswith(";", at)
    return Read(items or [f"expected JSON with a name after {opening.group()}"], at)


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and any(key in value for key in _KEYS)


_LLAMA3_SCANNER = Scanner(
    r"<\|python_tag\|>|<\|python_start\|>|(?:\A|(?<=</think>))\s*\{",
    _read_llama,
    noise=r"<\|python_end\|>",
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    parse=_LLAMA3_SCANNER.parse,
    scanner=_LLAMA3_SCANNER,
    example='{"name": "NAME", "parameters": {"KEY": VALUE}}',
    markers=tuple(('"parameters"', mark) for mark in (*_TAGS, '{"name": function name')),
    syntaxes=(CallSyntax(before='{"name": "NAME", "parameters": ', after="}"),),
)

_TEXT_OPEN, _TEXT_CLOSE = "<tool>", "</tool>"


def _text_reader(target: tuple[str, str] | None) -> Reader:
    def read(text: str, opening: re.Match[str]) -> Read:
        value, end, problem = json_at(text, opening.end())
        close = skip_space(text, end)
        if (
            problem is None
            and isinstance(value, dict)
            and "name" in value
            and text.startswith(_TEXT_CLOSE, close)
        ):
            return Read([to_call(value)], close + len(_TEXT_CLOSE))
        end = resume_after(text, opening.end(), _TEXT_CLOSE, _TEXT_OPEN)
        if not text.endswith(_TEXT_CLOSE, 0, end):
            return Read([f"{_TEXT_OPEN} without {_TEXT_CLOSE}"], end)
        if target is None:
            return Read(
                [
                    f'expected {{"name": …, "arguments": {{…}}}} between {_TEXT_OPEN} and'
                    f" {_TEXT_CLOSE}"
                ],
                end,
            )
        name, key = target
        value = text[opening.end() : end - len(_TEXT_CLOSE)].strip("\n")
        return Read([ToolCall(name=name, arguments={key: value})], end)

    return read


def _only_text_argument(tools: Sequence[Schema]) -> tuple[str, str] | None:
    """Return the names of the only tool and its only required argument if that is a string, else None."""
    if len(tools) != 1:
        return None
    function = tools[0].get("function", tools[0])
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    needed = parameters.get("required") or list(properties)
    if len(needed) != 1 or (properties.get(needed[0]) or {}).get("type") != "string":
        return None
    return function["name"], needed[0]


def _parse_text_tag(
    text: str, tools: Sequence[Schema] = (), *, thinking: bool | None = None
) -> Reply:
    scanner = Scanner(re.escape(_TEXT_OPEN), _text_reader(_only_text_argument(tools)))
    return scanner.parse(text, thinking=thinking)


TEXT_TAG = ToolFormat(
    name="text_tag",
    parse=_parse_text_tag,
    scanner=Scanner(
        re.escape(_TEXT_OPEN), _text_reader(None)
    ),  # streams are of turns without tools
    call_end=_TEXT_CLOSE,
    example=f'{_TEXT_OPEN}{{"name": "<tool name>", "arguments": {{…}}}}{_TEXT_CLOSE}',
    write=lambda name, arguments: f"{_TEXT_OPEN}{call_json(name, arguments)}{_TEXT_CLOSE}",
    result="<result>\n{}\n</result>",
    syntaxes=(
        CallSyntax(
            before=f'{_TEXT_OPEN}{{"name": "NAME", "arguments": ',
            after=f"}}{_TEXT_CLOSE}",
            between="\n",
        ),
    ),
)
