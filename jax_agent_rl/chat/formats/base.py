"""The description that all tool-call formats share, and their scanner.

The scanner reads text, reasoning and calls of an assistant turn in one pass::

    text                                          ──► content
    <think> … </think>                            ──► reasoning; nothing in it is a call
    a first </think> without <think> before it    ──► all text so far was reasoning, in a block that
                                                      the prompt opened, unless it is known that it
                                                      opened none
    opening of a call  ──► the format's reader    ──► calls, or why there is none

A reader says where its call ends, so a tag inside a value (a closing tag in a JSON string, say) is
no tag. Each call is followed by at most a few searches of the remaining text, and
:data:`MAX_CALLS` bounds the calls: the time is linear.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jax_agent_rl.chat.grammar import CallSyntax
from jax_agent_rl.chat.reply import Reply, ReplyBuilder, ToolCall
from jax_agent_rl.chat.thinking import ANY_THINK_TAG, ThinkState, thought_start
from jax_agent_rl.utils.bounded_json import parse_json, parse_json_at

Message = Mapping[str, Any]
Schema = Mapping[str, Any]


class Parse(Protocol):
    """Parses an assistant turn.

    Never raises, never evaluates anything, and takes time linear in the text.

    Args:
        text: the turn, with special tokens.
        tools: schemas of the sample's tools.
        thinking: whether the turn begins in a think block that the prompt opened; None: that is not
            known.
    """

    def __call__(
        self, text: str, tools: Sequence[Schema] = (), *, thinking: bool | None = None
    ) -> Reply: ...


def call_json(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as most formats write it: one JSON object."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How one family of models writes tool calls.

    Attributes:
        name: value of ``agent.tool_format``.
        parse: parses an assistant turn.
        example: a call as the model should write it, for templates that have no section for tools.
        markers: a chat template is of this format if its source has every text of one of these
            groups.
        call_end: the text that closes the last call of a turn (not the turn), "" if there is none.
        write: returns a call as the model would write it, for templates that show no calls; None:
            such a template cannot be used.
        result: a tool result inside a user message, for templates that have no ``tool`` role;
            ``{}`` stands for the result.
        syntaxes: how calls are written that a request demands, in order of preference (see
            ``CallSyntax.needs``); none: such requests are refused.
        scanner: reads turns that are still being written; None: they are parsed anew whenever they
            grow.
    """

    name: str
    parse: Parse
    example: str
    markers: tuple[tuple[str, ...], ...] = ()
    call_end: str = ""
    write: Callable[[str, Mapping[str, Any]], str] | None = None
    result: str = "<tool_response>\n{}\n</tool_response>"
    syntaxes: tuple[CallSyntax, ...] = ()
    scanner: Scanner | None = None

    def system_section(self, tools: Sequence[Schema]) -> str:
        """Return the prompt section on tools for a template that has none."""
        schemas = "\n".join(json.dumps(tool) for tool in tools)
        return (
            f"You can call these tools:\n<tools>\n{schemas}\n</tools>\nTo call one, write"
            f" {self.example}"
        )

    def tool_result(self, text: str) -> str:
        """Return a tool result as part of a user message, for a template without ``tool`` role."""
        return self.result.replace("{}", text, 1)

    def matches(self, template: str) -> bool:
        """Return whether a chat template, given as source, writes calls in this format."""
        for group in self.markers:
            if all(marker in template for marker in group):
                return True
        return False


LONGEST_MARK = 64
"""Characters at the end of a growing turn that may still become part of a tag or another mark."""
MAX_CALLS = 64
"""Maximum number of calls (decodable or not) that are read in one turn.

A turn of more is degenerate, and its further text is not read.
"""


class Read(NamedTuple):
    """Calls, or problems as text, and where they end."""

    items: list[ToolCall | str]
    end: int


Reader = Callable[[str, re.Match[str]], Read | None]
"""Reads the calls that begin at the match of an opening in a text; None: it is text after all."""


class Scanner:
    """Parses turns of one format.

    Args:
        opening: pattern of the beginning of a call (or a section of calls). Must not match the
            empty string.
        read: reads the calls from an opening on. ``Read.end`` must lie after the beginning of the
            opening.
        noise: pattern of format tokens between calls that are not part of the content.
        announces: the noise after which there has to be a call; None: there is no such noise.
    """

    def __init__(
        self, opening: str, read: Reader, *, noise: str | None = None, announces: str | None = None
    ) -> None:
        patterns = [f"(?P<think>{ANY_THINK_TAG})", f"(?P<call>{opening})"]
        if noise:
            patterns.append(f"(?P<noise>{noise})")
        self.marks = re.compile("|".join(patterns), re.DOTALL)
        self.read = read
        self.announces = announces

    def parse(
        self, text: str, tools: Sequence[Schema] = (), *, thinking: bool | None = None
    ) -> Reply:
        """Parse an assistant turn; ``tools`` is unused, see :class:`Parse`."""
        return Scan(self, thinking=thinking).read_to_end(text)

    def start(self, *, thinking: bool | None) -> Scan:
        """Begin to read a turn that is still being written; ``thinking`` as in :class:`Parse`."""
        return Scan(self, thinking=thinking)


class Scan:
    """The reading of one turn, which may still grow.

    Text and reasoning, but for their last characters, cannot change when the turn grows, and are
    read once. A call and the text after it are read again every time, since the end of the call may
    depend on all that follows.

    Args:
        thinking: see :class:`Parse`.
    """

    def __init__(self, scanner: Scanner, *, thinking: bool | None) -> None:
        self._scanner = scanner
        self._state = ThinkState(thinking)
        self._reply = ReplyBuilder()
        self._position = 0  # up to which the turn was read
        self._announced = False  # whether a call has to follow
        if self._state.inside:
            self._reply.begin_reasoning()

    def read_so_far(self, text: str) -> Reply:
        """Return the turn as it is, if it ends here.

        Args:
            text: the turn so far, which begins with the text of the last call.
        """
        self._read(text, len(text) - LONGEST_MARK)
        return self._copy().read_to_end(text)

    def read_to_end(self, text: str) -> Reply:
        """Return the turn; nothing can be read after that."""
        self._read(text, None)
        self._add(text[self._position :])
        if self._announced and self._reply.count == 0:
            announced = self._scanner.announces or ""
            self._reply.add_calls([f"no call after {announced}"], announced)
        return self._reply.build()

    def _copy(self) -> Scan:
        scan = copy.copy(self)
        scan._state = copy.copy(self._state)
        scan._reply = self._reply.copy()
        return scan

    def _read(self, text: str, limit: int | None) -> None:
        """Read on from the current position.

        Args:
            limit: read up to here, and no call, because the turn may grow. None: the turn has
                ended.
        """
        while mark := self._scanner.marks.search(text, self._position):
            kind = mark.lastgroup if mark.lastgroup in ("think", "noise") else "call"
            begins_call = kind == "call" and not self._state.inside
            if limit is not None and (mark.end() > limit or begins_call):
                limit = min(limit, mark.start())
                break

            preceding = text[self._position : mark.start()]
            if kind == "think":
                self._position = self._read_tag(text, preceding, mark)
            elif self._state.inside:  # a call in reasoning is reasoning
                self._reply.add_reasoning(preceding + mark.group())
                self._position = mark.end()
            elif kind == "call":
                self._reply.add_text(preceding)
                self._position = self._read_call(text, mark)
            else:
                self._reply.add_text(preceding)
                self._position = mark.end()
                if mark.group() == self._scanner.announces:
                    self._announced = True

        if limit is not None and limit > self._position:
            final_text = text[self._position : limit]
            if not final_text.isspace():  # white space may belong to a mark
                self._add(final_text)
                self._position = limit

    def _add(self, text: str) -> None:
        """Add text without marks."""
        if self._state.inside:
            self._reply.add_reasoning(text)
        else:
            self._reply.add_text(text)

    def _read_tag(self, text: str, preceding: str, tag: re.Match[str]) -> int:
        """Add the text before a think tag, apply the tag, and return where to go on.

        Args:
            preceding: the text before the tag that was not added yet.
            tag: the match of the tag in the turn.
        """
        was_inside = self._state.inside
        step = self._state.read(tag.group())

        if step == "opens":
            self._reply.add_text(preceding)
            self._reply.begin_reasoning()
            return thought_start(text, tag)
        if step == "closes":
            self._reply.add_reasoning(preceding)
            self._reply.end_reasoning()
        elif step == "began_inside":
            self._reply.turn_into_reasoning(text[: tag.start()])
            self._announced = False
        elif was_inside:
            self._reply.add_reasoning(preceding + tag.group())
        else:
            self._reply.add_text(preceding + tag.group())
        return tag.end()

    def _read_call(self, text: str, opening: re.Match[str]) -> int:
        """Add the calls that begin at an opening, and return where to go on."""
        reply = self._reply
        if reply.count >= MAX_CALLS:
            problem = f"more than {MAX_CALLS} calls in one turn: the rest was not read"
            reply.add_calls([problem], text[opening.start() :])
            return len(text)
        calls = self._scanner.read(text, opening)
        if calls is None:
            reply.add_text(opening.group())
            return opening.end()
        items = calls.items[: MAX_CALLS + 1 - reply.count]
        reply.add_calls(items, text[opening.start() : calls.end])
        return calls.end


def resume_after(text: str, at: int, close: str | None, *marks: str) -> int:
    """Return where to resume after a malformed call.

    It is after the closing tag of the call, or before an earlier mark or think tag.

    Args:
        at: where the call broke, or where it began if a string of it may have swallowed a mark.
        close: its closing tag, if it has one.
        marks: tags that begin something else.
    """
    tags = [re.escape(tag) for tag in (close, *marks) if tag]
    tag = re.compile("|".join([*tags, ANY_THINK_TAG])).search(text, at)
    if tag is None:
        return len(text)
    return tag.end() if tag.group() == close else tag.start()


def skip_space(text: str, at: int) -> int:
    """Return the first position from ``at`` that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def json_at(text: str, at: int) -> tuple[Any, int, str | None]:
    """Return ``(value, end, None)`` of JSON after white space, or ``(None, start, problem)``."""
    at = skip_space(text, at)
    try:
        value, end = parse_json_at(text, at)
    except ValueError as error:
        return None, at, str(error)
    return value, end, None


def arguments_at(text: str, at: int, close: re.Pattern[str]) -> tuple[dict[str, Any] | str, int]:
    """Return the arguments between ``at`` and ``close``, or their problem, and where they end.

    Nothing between the two is a call without arguments.
    """
    if close.match(text, skip_space(text, at)):
        return {}, at
    value, end, problem = json_at(text, at)
    if problem is not None:
        return problem, end
    return to_arguments(value), end


def to_arguments(value: Any) -> dict[str, Any] | str:
    """Return arguments as an object, or their problem.

    Some models write them as a string of JSON. For a tool without parameters they may be null or an
    empty string.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else {}
        except ValueError:
            pass  # reported below
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return f'"arguments" must be an object, got {type(value).__name__}'
    return dict(value)


def to_call(value: Any, *, keys: tuple[str, ...] = ("arguments",)) -> ToolCall | str:
    """Return a decoded ``{"name": …, "arguments": {…}}`` as a call, or its problem.

    Args:
        value: decoded JSON.
        keys: names that the arguments may have; the first one present counts, and none means no
            arguments.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return f'expected an object with "name" and "{keys[0]}"'
    arguments_value = next((value[key] for key in keys if key in value), {})
    arguments = to_arguments(arguments_value)
    if isinstance(arguments, str):
        return arguments
    return ToolCall(name=name, arguments=arguments)
