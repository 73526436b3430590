"""Formats that write a call in a language of literals: Python's and Gemma's.

::

    pythonic  [f(a=1, b="x"), g()]                alone in the turn or in tokens of their own (Llama 4, LFM2)
    gemma     <start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>    (FunctionGemma)
    gemma4    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Read as literals, never evaluated: a name, a comprehension or an expression as an argument makes the call malformed.
"""

from __future__ import annotations

import re

from jax_agent_rl.chat.formats.literals import LiteralError, Literals
from jax_agent_rl.chat.formats.scan import MAX_CALLS, Read, Reader, Scanner, resume_after, skip_space
from jax_agent_rl.chat.formats.types import ToolCall, ToolFormat
from jax_agent_rl.chat.thinking import GEMMA4_THINK_TAGS, THINK_TAGS

_TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


def _read_python(text: str, opening: re.Match[str]) -> Read:
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


PYTHONIC = ToolFormat(
    name="pythonic",
    parse=Scanner(
        "|".join(map(re.escape, _TAGS)) + r"|(?:\A|(?<=</think>))\s*\[(?=\s*[A-Za-z_][\w.\-]*\()", _read_python
    ).parse,
    call_end="<|tool_call_end|>",
    result="Result: {}",
    example="[NAME(KEY=VALUE, …)], with strings in quotes",
    markers=(("<|tool_call_start|>[",), ("<|tool_list_start|>",)),
)


def _gemma_reader(open_tag: str, close: str, quote: str) -> Reader:
    def read(text: str, opening: re.Match[str]) -> Read:
        source = Literals(text, opening.end(), quote=quote)
        try:
            source.expect("call:")
            name = source.word(_NAME)
            if not source.text.startswith("{", source.at):
                raise source.error("expected '{'")
            arguments = source.value()
            source.expect(close)
        except LiteralError as error:
            return Read([str(error)], resume_after(text, opening.end(), close, open_tag))
        return Read([ToolCall(name=name, arguments=arguments)], source.at)

    return read


def _gemma_format(name: str, tags: tuple[str, str], quote: str, think: tuple[str, str]) -> ToolFormat:
    return ToolFormat(
        name=name,
        parse=Scanner(re.escape(tags[0]), _gemma_reader(*tags, quote), think=think).parse,
        call_end=tags[1],
        example=f"{tags[0]}call:NAME{{KEY:{quote}TEXT{quote},KEY:NUMBER}}{tags[1]}",
        markers=((tags[0], quote),),
    )


GEMMA = _gemma_format("gemma", ("<start_function_call>", "<end_function_call>"), "<escape>", THINK_TAGS)
GEMMA4 = _gemma_format("gemma4", ("<|tool_call>", "<tool_call|>"), '<|"|>', GEMMA4_THINK_TAGS)
