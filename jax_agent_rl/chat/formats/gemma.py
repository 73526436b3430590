"""Gemma's function calls: ``call:NAME{KEY:VALUE,…}`` between tokens, strings between tokens of their own.

::

    gemma    (FunctionGemma)  <start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>
    gemma4                    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax_agent_rl.chat.formats.literals import LiteralError, Literals
from jax_agent_rl.chat.formats.scan import Read, Reader, Scanner, resume_after
from jax_agent_rl.chat.formats.types import Reply, Schema, ToolCall, ToolFormat
from jax_agent_rl.chat.thinking import GEMMA4_THINK_TAGS, THINK_TAGS

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


def _reader(open_tag: str, close: str, quote: str) -> Reader:
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


def _format(name: str, tags: tuple[str, str], quote: str, think: tuple[str, str]) -> ToolFormat:
    scanner = Scanner(re.escape(tags[0]), _reader(*tags, quote), think=think)

    def parse(text: str, tools: Sequence[Schema] = ()) -> Reply:
        return scanner.parse(text)

    return ToolFormat(
        name=name,
        parse=parse,
        call_end=tags[1],
        example=f"{tags[0]}call:NAME{{KEY:{quote}TEXT{quote},KEY:NUMBER}}{tags[1]}",
        markers=((tags[0], quote),),
    )


GEMMA = _format("gemma", ("<start_function_call>", "<end_function_call>"), "<escape>", THINK_TAGS)
GEMMA4 = _format("gemma4", ("<|tool_call>", "<tool_call|>"), '<|"|>', GEMMA4_THINK_TAGS)
