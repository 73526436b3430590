r"""Formats that write a call in a language of literals: Python's and Gemma's.

::

    pythonic  [f(a=1, b="x"), g()]
    olmo3     <function_calls>f(a=1, b="x")\ng()</function_calls>
    gemma     <start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>
    gemma4    <|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Pythonic calls are alone in the turn, or between special tokens (Llama 4, LFM2); OLMo 3 writes them
one a line between tags. ``gemma`` is FunctionGemma's format. Calls are read as literals and never
evaluated: a name, a comprehension or an expression as an argument makes the call malformed. One
parser (:class:`Literals`) reads both notations, with bounded depth in linear time.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from jax_agent_rl.chat.formats.base import (
    MAX_CALLS,
    Read,
    Reader,
    Scanner,
    ToolFormat,
    resume_after,
    skip_space,
)
from jax_agent_rl.chat.reply import ToolCall

MAX_DEPTH = 64
T = TypeVar("T")

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_PYTHON_STRING = re.compile(
    r"'''((?:[^\\']|\\.|'(?!''))*)'''"
    r'|"""((?:[^\\"]|\\.|"(?!""))*)"""'
    r"|'((?:[^\\'\n]|\\.)*)'"
    r'|"((?:[^\\"\n]|\\.)*)"',
    re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"  # JSON's pair of a character
    r"|\\(?:([\\'\"abfnrtv])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n))",
    re.DOTALL,
)
_ESCAPED = {
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_CONSTANTS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}


class LiteralError(ValueError):
    """The text is not a literal; ``at`` says where."""

    def __init__(self, message: str, at: int):
        super().__init__(f"{message} (at character {at})")
        self.at = at


class Literals:
    """A cursor in a text.

    Args:
        at: where to begin reading.
        quote: the token around strings in Gemma's notation; None: Python's strings.
    """

    def __init__(self, text: str, at: int, *, quote: str | None = None) -> None:
        self.text = text
        self.at = at
        self._quote = quote

    def accept(self, literal: str) -> bool:
        """Move past ``literal`` if it comes next, ignoring white space."""
        self._skip_space()
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True

    def expect(self, literal: str) -> None:
        """Move past ``literal``.

        Raises:
            LiteralError: something else comes next.
        """
        if not self.accept(literal):
            raise self.error(f"expected {literal!r}")

    def word(self, pattern: re.Pattern[str] = _WORD) -> str:
        """Read a name."""
        self._skip_space()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise self.error("expected a name")
        self.at = match.end()
        return match.group()

    def value(self, depth: int = 0) -> Any:
        """Read the next value.

        Raises:
            LiteralError: there is none, or it is nested deeper than :data:`MAX_DEPTH`.
        """
        if depth > MAX_DEPTH:
            raise self.error("nested too deeply")

        self._skip_space()
        text = self._string()
        if text is not None:
            return text
        if self.accept("["):
            return self.items("]", lambda: self.value(depth + 1))
        if self._quote is None and self.accept("("):
            return self.items(")", lambda: self.value(depth + 1))
        if self.accept("{"):
            return dict(self.items("}", lambda: self._pair(depth + 1)))
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            return self._to_number(number.group())

        word = self.word()
        if word not in _CONSTANTS:
            raise self.error(f"{word[:40]!r} is not a literal")
        return _CONSTANTS[word]

    def error(self, message: str) -> LiteralError:
        """Return an error at the current position, quoting the text there."""
        return LiteralError(f"{message}, got {self.text[self.at : self.at + 20]!r}", self.at)

    def items(self, close: str, read: Callable[[], T]) -> list[T]:
        """Return what ``read`` finds between commas, up to ``close``."""
        items = []
        while not self.accept(close):
            items.append(read())
            if not self.accept(","):
                self.expect(close)
                break
        return items

    def _pair(self, depth: int) -> tuple[str, Any]:
        """Read a key and its value."""
        self._skip_space()
        key = self._string()
        if key is None:
            if self._quote is None:
                raise self.error("expected a string as key")
            key = self.word(_GEMMA_KEY).strip()
        self.expect(":")
        return key, self.value(depth)

    def _string(self) -> str | None:
        """Read the string that begins here, if any."""
        if self._quote is not None:
            return self._quoted(self._quote)
        match = _PYTHON_STRING.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        content = match[match.lastindex or 0]  # each kind of quotes has a group
        return _ESCAPE.sub(_unescape, content)

    def _quoted(self, quote: str) -> str | None:
        if not self.text.startswith(quote, self.at):
            return None
        begin = self.at + len(quote)
        end = self.text.find(quote, begin)
        if end < 0:
            raise self.error("a string that does not end")
        self.at = end + len(quote)
        return self.text[begin:end]

    def _to_number(self, text: str) -> int | float:
        is_integer = re.fullmatch(r"[+-]?[\d_]+", text) is not None
        try:
            number = int(text) if is_integer else float(text)
        except ValueError:  # more digits than Python converts
            raise self.error("a number that is too long") from None
        if isinstance(number, float) and math.isinf(number):
            raise self.error("a number that is larger than any float")
        return number

    def _skip_space(self) -> None:
        space = _SPACE.match(self.text, self.at)
        if space is not None:
            self.at = space.end()


_GEMMA_KEY = re.compile(r"[^\s{}\[\],:<>][^{}\[\],:<>]*")


def _unescape(escape: re.Match[str]) -> str:
    """Return the character that an escape stands for."""
    high, low, simple, two_digits, four_digits, eight_digits, newline = escape.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if newline:
        return ""
    if simple:
        return _ESCAPED[simple]
    code = int(two_digits or four_digits or eight_digits, 16)
    is_character = code < 0x110000 and not 0xD800 <= code < 0xE000  # in Unicode, and no surrogate
    return chr(code) if is_character else escape.group()


_TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


def _read_python(text: str, opening: re.Match[str]) -> Read:
    tag = opening.group()
    close = _TAGS.get(tag)  # None for a list that is alone in the turn
    begin = opening.end() if close else text.index("[", opening.start())
    source = Literals(text, begin)
    try:
        calls = _read_calls(source)
    except LiteralError as error:
        return Read([str(error)], resume_after(text, opening.end(), close, *_TAGS))

    end = skip_space(text, source.at)
    if close is not None:
        if not text.startswith(close, end):
            problem = f"expected {close} after the calls"
            return Read([problem], resume_after(text, end, close, *_TAGS))
        end += len(close)
    return Read([*calls] or ["an empty list of calls"], end)


def _read_calls(source: Literals) -> list[ToolCall]:
    count = itertools.count()

    def read_call() -> ToolCall:
        if next(count) > MAX_CALLS:
            raise source.error(f"more than {MAX_CALLS} calls")
        return _read_call(source)

    source.expect("[")
    return source.items("]", read_call)


def _read_call(source: Literals) -> ToolCall:
    arguments: dict[str, Any] = {}

    def read_argument() -> None:
        key = source.word()
        source.expect("=")
        if key in arguments:
            raise source.error(f"argument {key[:40]!r} is given twice")
        arguments[key] = source.value()

    name = source.word(_NAME)
    source.expect("(")
    source.items(")", read_argument)
    return ToolCall(name=name, arguments=arguments)


_PYTHONIC_SCANNER = Scanner(
    "|".join(map(re.escape, _TAGS)) + r"|(?:\A|(?<=</think>))\s*\[(?=\s*[A-Za-z_][\w.\-]*\()",
    _read_python,
)
PYTHONIC = ToolFormat(
    name="pythonic",
    parse=_PYTHONIC_SCANNER.parse,
    scanner=_PYTHONIC_SCANNER,
    call_end="<|tool_call_end|>",
    result="Result: {}",
    example="[NAME(KEY=VALUE, …)], with strings in quotes",
    markers=(("<|tool_call_start|>[",), ("<|tool_list_start|>",)),
)


_OLMO3_TAGS = ("<function_calls>", "</function_calls>")


def _read_olmo3(text: str, opening: re.Match[str]) -> Read:
    open_tag, close = _OLMO3_TAGS
    source = Literals(text, opening.end())
    calls: list[ToolCall | str] = []
    try:
        while not source.accept(close):
            if len(calls) > MAX_CALLS:
                raise source.error(f"more than {MAX_CALLS} calls")
            calls.append(_read_call(source))
    except LiteralError as error:
        return Read([str(error)], resume_after(text, opening.end(), close, open_tag))
    return Read(calls or [f"no call between {open_tag} and {close}"], source.at)


_OLMO3_SCANNER = Scanner(re.escape(_OLMO3_TAGS[0]), _read_olmo3)
OLMO3 = ToolFormat(
    name="olmo3",
    parse=_OLMO3_SCANNER.parse,
    scanner=_OLMO3_SCANNER,
    call_end=_OLMO3_TAGS[1],
    example="<function_calls>NAME(KEY=VALUE, …)</function_calls>, with strings in quotes",
    markers=(_OLMO3_TAGS,),
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


def _gemma_format(name: str, tags: tuple[str, str], quote: str) -> ToolFormat:
    open_tag, close = tags
    scanner = Scanner(re.escape(open_tag), _gemma_reader(open_tag, close, quote))
    return ToolFormat(
        name=name,
        parse=scanner.parse,
        scanner=scanner,
        call_end=close,
        example=f"{open_tag}call:NAME{{KEY:{quote}TEXT{quote},KEY:NUMBER}}{close}",
        markers=((open_tag, quote),),
    )


GEMMA = _gemma_format("gemma", ("<start_function_call>", "<end_function_call>"), "<escape>")
GEMMA4 = _gemma_format("gemma4", ("<|tool_call>", "<tool_call|>"), '<|"|>')
