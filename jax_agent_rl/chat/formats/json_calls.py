"""Formats that write a call as one JSON object of name and arguments.

Hermes, Llama 3 and ``<tool>`` tags::

    hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>    also Qwen2.5 and Qwen3
    llama3_json  {"name": …, "parameters": {…}}; …                       alone, or after a tag
    text_tag     <tool>{"name": …, "arguments": {…}}</tool> or <tool>text</tool>

Llama 3.2's templates name no tag, only the JSON. Several calls are separated by ``;`` or white
space (Llama 4 writes them so after ``<|python_start|>``). A turn that begins with other JSON is an
answer.

Text between ``<tool>`` tags is the one argument of the sample's one tool, unchanged; with several
tools, or for a tool of several arguments, it is JSON. Text ends at the first closing tag
(generation may stop there), JSON where the value ends.
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

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def _read_hermes(text: str, opening: re.Match[str]) -> Read:
    value, end, problem = json_at(text, opening.end())
    close = skip_space(text, end)
    if problem is None and text.startswith(CLOSE, close):
        return Read([to_call(value)], close + len(CLOSE))

    resume = resume_after(text, end, CLOSE, OPEN)
    if not text.endswith(CLOSE, 0, resume):
        return Read([f"{OPEN} without {CLOSE}"], resume)
    if problem is None:
        unexpected = text[end : resume - len(CLOSE)].strip()
        problem = f"unexpected text after the JSON: {unexpected[:40]!r}"
    return Read([problem], resume)


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
    has_tag = opening.group() in _TAGS
    at = opening.end() if has_tag else opening.end() - 1  # without a tag, the match ends with {
    at = skip_space(text, at)
    items: list[ToolCall | str] = []
    while text.startswith("{", at) and len(items) <= MAX_CALLS:
        value, end, problem = json_at(text, at)
        may_be_answer = not items and not has_tag  # JSON at the beginning of a turn
        if problem is not None:
            if may_be_answer and not _LOOKS_LIKE_CALL.match(text, at):
                return None
            return Read([problem], resume_after(text, at + 1, None, *_TAGS))
        if may_be_answer and not _is_call(value):
            return None

        items.append(to_call(value, keys=_KEYS))
        at = skip_space(text, end)
        if text.startswith(";", at):
            at = skip_space(text, at + 1)
    return Read(items or [f"expected JSON with a name after {opening.group()}"], at)


def _is_call(value: object) -> bool:
    if not isinstance(value, dict) or "name" not in value:
        return False
    return any(key in value for key in _KEYS)


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

_TEXT_OPEN = "<tool>"
_TEXT_CLOSE = "</tool>"


def _text_reader(text_argument: tuple[str, str] | None) -> Reader:
    """Return a reader of calls between ``<tool>`` tags.

    Args:
        text_argument: the tool, and its argument, that text is for; None: a call has to be JSON.
    """

    def read(text: str, opening: re.Match[str]) -> Read:
        value, end, problem = json_at(text, opening.end())
        close = skip_space(text, end)
        is_json_call = problem is None and isinstance(value, dict) and "name" in value
        if is_json_call and text.startswith(_TEXT_CLOSE, close):
            return Read([to_call(value)], close + len(_TEXT_CLOSE))

        end = resume_after(text, opening.end(), _TEXT_CLOSE, _TEXT_OPEN)
        if not text.endswith(_TEXT_CLOSE, 0, end):
            return Read([f"{_TEXT_OPEN} without {_TEXT_CLOSE}"], end)
        if text_argument is None:
            problem = (
                f'expected {{"name": …, "arguments": {{…}}}} between {_TEXT_OPEN} and {_TEXT_CLOSE}'
            )
            return Read([problem], end)
        name, argument = text_argument
        content = text[opening.end() : end - len(_TEXT_CLOSE)].strip("\n")
        return Read([ToolCall(name=name, arguments={argument: content})], end)

    return read


def _only_text_argument(tools: Sequence[Schema]) -> tuple[str, str] | None:
    """Return the names of the only tool and its only required argument.

    None if there are several, or the argument is not a string.
    """
    if len(tools) != 1:
        return None
    function = tools[0].get("function", tools[0])
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or list(properties)
    if len(required) != 1:
        return None
    schema = properties.get(required[0]) or {}
    if schema.get("type") != "string":
        return None
    return function["name"], required[0]


def _parse_text_tag(
    text: str, tools: Sequence[Schema] = (), *, thinking: bool | None = None
) -> Reply:
    scanner = Scanner(re.escape(_TEXT_OPEN), _text_reader(_only_text_argument(tools)))
    return scanner.parse(text, thinking=thinking)


TEXT_TAG = ToolFormat(
    name="text_tag",
    parse=_parse_text_tag,
    scanner=Scanner(re.escape(_TEXT_OPEN), _text_reader(None)),  # only turns without tools stream
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
