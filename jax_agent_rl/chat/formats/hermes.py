r"""The hermes format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

Used by Hermes, Qwen2.5 and Qwen3, and by this package for templates that have no tool format of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jax_agent_rl.chat.types import Reply, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _END_THINK = "<think>", "</think>"

_MARKER = re.compile(f"{_OPEN}|{_THINK}|{_END_THINK}")
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
# Everything up to the next tag that is not inside a JSON string. Possessive, so it never backtracks.
_BODY = re.compile(r'(?:[^"<]++|"(?:[^"\\\n]++|\\.)*+"|<(?!/?tool_call>))*+')


class HermesFormat:
    """Parser and renderer of the hermes format; see :class:`~jax_agent_rl.chat.formats.ToolFormat`."""

    markers = frozenset({_OPEN, _CLOSE, _THINK, _END_THINK})

    def parse(self, text: str, *, reasoning_open: bool = False) -> Reply:
        """Takes a sampled turn apart.

        A closing tag inside a JSON string does not end its call. Calls inside reasoning are not calls; reasoning
        that is never closed goes to the end. A ``</think>`` that was never opened makes reasoning of all before it.
        ``arguments`` may be left out (no arguments) or be a string that holds a JSON object.
        """
        return _Parser(text).run(reasoning_open)

    def render_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        call = {"name": name, "arguments": arguments}
        return f"{_OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{_CLOSE}"

    def render_result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def render_tools(self, tools: Sequence[Mapping[str, Any]]) -> str:
        signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\n"
            f"These functions can be called; their signatures are:\n<tools>\n{signatures}\n</tools>\n\n"
            "To call one, write a JSON object with its name and arguments:\n"
            f'{_OPEN}\n{{"name": <function name>, "arguments": <arguments object>}}\n{_CLOSE}'
        )


class _Parser:
    """One pass over one text. ``_at`` only grows, which together with ``_unquoted_until`` keeps the time linear."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._unquoted_until = 0  # up to here quotes are known not to pair up, so tags count wherever they stand
        self._content: list[str] = []
        self._reasoning: list[tuple[int, int]] = []  # start and end in the text
        self._calls: list[ToolCall] = []
        self._malformed: list[str] = []

    def run(self, reasoning_open: bool) -> Reply:
        if reasoning_open:
            self._read_reasoning()
        while marker := _MARKER.search(self._text, self._at):
            self._content.append(self._text[self._at : marker.start()])
            self._at = marker.end()
            if marker[0] == _OPEN:
                self._read_call()
            elif marker[0] == _THINK:
                self._read_reasoning()
            else:
                self._all_was_reasoning(marker.start())
        self._content.append(self._text[self._at :])
        return Reply(
            content="".join(self._content).strip(),
            tool_calls=tuple(self._calls),
            malformed=tuple(self._malformed),
            reasoning="\n".join(parts) if (parts := self._reasoning_parts()) else None,
        )

    def _read_reasoning(self) -> None:
        end = self._text.find(_END_THINK, self._at)
        self._reasoning.append((self._at, len(self._text) if end < 0 else end))
        self._at = len(self._text) if end < 0 else end + len(_END_THINK)

    def _reasoning_parts(self) -> list[str]:
        return [self._text[start:end].strip() for start, end in self._reasoning]

    def _all_was_reasoning(self, end: int) -> None:
        self._reasoning = [(0, end)]
        self._content, self._calls, self._malformed = [], [], []

    def _read_call(self) -> None:
        tag = self._find_tag()
        if tag is None:
            self._malformed.append(f"{_OPEN} without {_CLOSE}")
            self._at = len(self._text)
        elif tag[0] == _OPEN:
            self._malformed.append(f"{_OPEN} without {_CLOSE} before the next {_OPEN}")
            self._at = tag.start()
        else:
            body = self._text[self._at : tag.start()]
            self._at = tag.end()
            call = _decode_call(body)
            if isinstance(call, str):
                self._malformed.append(call)
            else:
                self._calls.append(call)

    def _find_tag(self) -> re.Match[str] | None:
        """The tag that ends the call which begins at ``_at``: the next one outside of JSON strings.

        When a quote is never closed (on its line: JSON strings hold no line breaks) strings are no guide, and the next
        tag of all is taken; that goes for every call that starts before that line's end, so no text is scanned thrice.
        """
        if self._at >= self._unquoted_until:
            end = _BODY.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if end == len(self._text) or self._text[end] != '"':
                return _TAG.match(self._text, end)
            line_end = self._text.find("\n", end)
            self._unquoted_until = len(self._text) if line_end < 0 else line_end
        return _TAG.search(self._text, self._at)


def _decode_call(body: str) -> ToolCall | str:
    """The call, or why it is none."""
    try:
        call = _loads(body)
        if not isinstance(call, dict):
            return f"a tool call must be a JSON object, got {_kind(call)}"
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not name:
            return 'the tool call has no "name"'
        if isinstance(arguments, str):
            arguments = _loads(arguments)
    except json.JSONDecodeError as error:
        return f"invalid JSON: {error.msg} at character {error.pos} of {body.strip():.100}"
    except (ValueError, RecursionError) as error:
        return f"invalid JSON: {error}"
    if not isinstance(arguments, dict):
        return f'"arguments" must be a JSON object, got {_kind(arguments)}'
    return ToolCall(name=name, arguments=arguments)


def _loads(text: str) -> Any:
    """Strict JSON: no NaN, and no half surrogate pairs, which no UTF-8 writer downstream could encode."""
    value = json.loads(text, parse_constant=_refuse_constant)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", dict: "an object", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
