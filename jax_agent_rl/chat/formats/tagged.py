r"""Formats that write each argument between tags: Qwen3-Coder, Seed-OSS, MiniMax-M2, GLM.

::

    qwen3_coder  <tool_call><function=NAME>
                 <parameter=KEY>\nVALUE\n</parameter></function></tool_call>
    seed         <seed:tool_call><function=NAME>
                 <parameter=KEY>VALUE</parameter></function></seed:tool_call>
    minimax      <minimax:tool_call><invoke name="NAME">
                 <parameter name="KEY">VALUE</parameter></invoke> …
    glm          <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>

Values are bare text. A value ends at a closing tag after which the call goes on or ends. It may
therefore hold a closing tag, unless the text after that tag could continue the call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jax_agent_rl.chat.formats.base import Read, Scanner, ToolFormat, resume_after, skip_space
from jax_agent_rl.chat.reply import ToolCall
from jax_agent_rl.chat.thinking import think_blocks


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of one format; white space between them does not count.

    Attributes:
        open: tag before a call, or before several if ``end_call`` is set.
        close: tag after them.
        call: pattern of the beginning of a call, with the tool's name in group 1.
        end_call: tag that ends the call; None if ``close`` does.
        key: pattern of the beginning of an argument, with its name in group 1.
        end_value: tag that ends the argument.
        padded: whether the format puts a line feed on either side of a value.
    """

    open: str
    close: str
    call: str
    end_call: str | None
    key: str
    end_value: str
    padded: bool = False


class TaggedReader:
    """Reads the calls between one pair of outer tags."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._call = re.compile(r"\s*" + tags.call)
        self._key = re.compile(r"\s*" + tags.key)
        self._end_call = re.compile(r"\s*" + re.escape(tags.end_call or ""))
        self._close = re.compile(r"\s*" + re.escape(tags.close))
        following = f"{tags.key}|{re.escape(tags.end_call or tags.close)}"
        self._end_value = re.compile(rf"{re.escape(tags.end_value)}(?=\s*(?:{following}))")
        next_calls = [re.escape(tags.close) + r"\s*" + re.escape(tags.open)]
        if tags.end_call:
            next_calls.append(re.escape(tags.end_call) + r"\s*" + tags.call)
        self._next_call = re.compile("|".join(next_calls))

    def __call__(self, text: str, opening: re.Match[str]) -> Read:
        tags = self._tags
        items: list[ToolCall | str] = []
        at = opening.end()
        while call := self._call.match(text, at):
            name = call[1].strip()
            arguments, at, problem = self._arguments(text, call.end())
            if problem is not None:
                return self._broken(text, at, problem)
            end = self._end_call.match(text, at)
            if end is None:
                problem = f"{name[:40]!r}: expected {tags.end_call}, got {_quote(text, at)}"
                return self._broken(text, at, problem)
            items.append(ToolCall(name=name, arguments=arguments))
            at = end.end()
            if tags.end_call is None:  # the outer tags hold one call
                break

        close = self._close.match(text, at)
        if close is None:
            problem = f"{tags.open}: expected {tags.close}, got {_quote(text, at)}"
            return self._broken(text, at, problem)
        return Read(items or ["no tool is named"], close.end())

    def _arguments(self, text: str, at: int) -> tuple[dict[str, str], int, str | None]:
        """Return the arguments from ``at``, where they end, and their problem."""
        arguments: dict[str, str] = {}
        while key := self._key.match(text, at):
            name = key[1].strip()
            end = self._end_value.search(text, key.end())
            value = text[key.end() : end.start()] if end else ""
            if end is None or self._swallows_call(value):
                problem = f"argument {name[:40]!r} without {self._tags.end_value}"
                return arguments, key.end(), problem
            if name in arguments:
                return arguments, end.end(), f"argument {name[:40]!r} is given twice"
            arguments[name] = _without_padding(value) if self._tags.padded else value
            at = end.end()
        return arguments, at, None

    def _swallows_call(self, value: str) -> bool:
        """Return whether another call begins in a value.

        The argument was then not finished, or the call up to here was reasoning.
        """
        if self._next_call.search(value):
            return True
        blocks = think_blocks(value)
        if not blocks or blocks[0].start > 0:
            return False
        return self._tags.open in value[blocks[0].end :]

    def _broken(self, text: str, at: int, problem: str) -> Read:
        """Reject everything between the outer tags when a part is malformed."""
        return Read([problem], resume_after(text, at, self._tags.close, self._tags.open))


def _without_padding(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _quote(text: str, at: int) -> str:
    """Return the beginning of the text after white space, quoted for a message."""
    at = skip_space(text, at)
    return repr(text[at : at + 40]) if at < len(text) else "the end"


def _format(
    name: str, tags: Tags, *, example: str, markers: tuple[tuple[str, ...], ...]
) -> ToolFormat:
    scanner = Scanner(re.escape(tags.open), TaggedReader(tags))
    return ToolFormat(
        name=name,
        parse=scanner.parse,
        scanner=scanner,
        example=example,
        markers=markers,
        call_end=tags.close,
    )


_FUNCTION = r"<function=([^<>\n]+)>"
_PARAMETER = r"<parameter=([^<>\n]+)>"

QWEN3_CODER = _format(
    "qwen3_coder",
    Tags(
        open="<tool_call>",
        close="</tool_call>",
        call=_FUNCTION,
        end_call="</function>",
        key=_PARAMETER,
        end_value="</parameter>",
        padded=True,
    ),
    example=(
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    markers=(("<tool_call>", "<function=", "<parameter="),),
)
SEED = _format(
    "seed",
    Tags(
        open="<seed:tool_call>",
        close="</seed:tool_call>",
        call=_FUNCTION,
        end_call="</function>",
        key=_PARAMETER,
        end_value="</parameter>",
    ),
    example=(
        "<seed:tool_call>\n<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n"
        "</seed:tool_call>"
    ),
    markers=(("<seed:tool_call>", "<function="),),
)
MINIMAX = _format(
    "minimax",
    Tags(
        open="<minimax:tool_call>",
        close="</minimax:tool_call>",
        call=r'<invoke name="([^"<>\n]+)">',
        end_call="</invoke>",
        key=r'<parameter name="([^"<>\n]+)">',
        end_value="</parameter>",
    ),
    example=(
        '<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="KEY">VALUE</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    markers=(("minimax:tool_call", "<invoke name="),),
)
GLM = _format(
    "glm",
    Tags(
        open="<tool_call>",
        close="</tool_call>",
        call=r"([^\s<>{}][^<>{}\n]*)",
        end_call=None,
        key=r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>",
        end_value="</arg_value>",
    ),
    example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    markers=(("<tool_call>", "<arg_key>", "<arg_value>"),),
)
