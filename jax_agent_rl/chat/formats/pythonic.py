"""Calls written as Python: ``[f(a=1, b="x"), g()]``, alone in the turn or in tokens of their own (Llama 4, LFM2).

Read as literals, never evaluated: a name, a comprehension or an expression as an argument makes the call malformed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax_agent_rl.chat.formats.literals import LiteralError, Literals
from jax_agent_rl.chat.formats.scan import MAX_CALLS, Read, Scanner, resume_after, skip_space
from jax_agent_rl.chat.formats.types import Reply, Schema, ToolCall, ToolFormat

_TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


def _read(text: str, opening: re.Match[str]) -> Read:
    tag = opening.group()
    close = _TAGS.get(tag)
    source = Literals(text, opening.end() if close else text.index("[", opening.start()))
    try:
        calls = _calls(source)
    except LiteralError as error:
        return Read([str(error)], resume_after(text, opening.end(), close, *_TAGS))
    end = skip_space(text, source.at)
    if close and not text.startswith(close, end):
        return Read([f"expected {close} after the calls"], resume_after(text, end, close, *_TAGS))
    return Read(list(calls) or ["an empty list of calls"], end + len(close or ""))


def _calls(source: Literals) -> list[ToolCall]:
    source.expect("[")
    calls: list[ToolCall] = []
    while not source.accept("]"):
        if len(calls) > MAX_CALLS:
            raise source.error(f"more than {MAX_CALLS} calls")
        calls.append(_call(source))
        if not source.accept(","):
            source.expect("]")
            break
    return calls


def _call(source: Literals) -> ToolCall:
    name = source.word(_NAME)
    source.expect("(")
    arguments = {}
    while not source.accept(")"):
        key = source.word()
        source.expect("=")
        if key in arguments:
            raise source.error(f"argument {key[:40]!r} is given twice")
        arguments[key] = source.value()
        if not source.accept(","):
            source.expect(")")
            break
    return ToolCall(name=name, arguments=arguments)


_SCANNER = Scanner("|".join(map(re.escape, _TAGS)) + r"|(?:\A|(?<=</think>))\s*\[(?=\s*[A-Za-z_][\w.\-]*\()", _read)


def _parse(text: str, tools: Sequence[Schema] = ()) -> Reply:
    return _SCANNER.parse(text)


FORMAT = ToolFormat(
    name="pythonic",
    parse=_parse,
    call_end="<|tool_call_end|>",
    result="Result: {}",
    example="[NAME(KEY=VALUE, …)], with strings in quotes",
    markers=(("<|tool_call_start|>[",), ("<|tool_list_start|>",)),
)
