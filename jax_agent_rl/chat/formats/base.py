"""What all tool-call formats share: the types, the limits of think blocks, and the scanner.

The scanner reads text, reasoning and calls of an assistant turn in one pass::

    text ──► content                <think> … </think> ──► reasoning, nothing in it is a call
    opening of a call ──► the format's reader ──► calls, or why there is none
    </think> with no <think> before it: the prompt opened it, so everything so far was reasoning

A reader says itself where its call ends, so a tag inside a value (a closing tag in a JSON string, say) is no tag. Each
call costs at most a few looks at the rest of the text, and :data:`MAX_CALLS` bounds the calls: the time is linear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_agent_rl.chat.grammar import CallSyntax
from jax_agent_rl.validation import has_lone_surrogate

THINK_TAGS = ("<think>", "</think>")
SEED_THINK_TAGS = ("<seed:think>", "</seed:think>")
MISTRAL_THINK_TAGS = ("[THINK]", "[/THINK]")
GEMMA4_THINK_TAGS = ("<|channel>", "<channel|>")
ALL_THINK_TAGS = (THINK_TAGS, SEED_THINK_TAGS, MISTRAL_THINK_TAGS, GEMMA4_THINK_TAGS)

_CLOSE_OF: dict[str, str] = dict(ALL_THINK_TAGS)
_ANY_TAG = re.compile("|".join(re.escape(tag) for tags in ALL_THINK_TAGS for tag in tags))
_VISIBLE = re.compile(r"\S")


def outside_thinking(text: str, *, thinking: bool = False) -> str:
    """Return the text with its think blocks, tags included, blanked: as long as before, so that positions hold.

    A block runs from its opening tag to its own closing tag, or to the end of a text that was cut. The generation
    prompt may have opened one: everything up to a closing tag that nothing opened is thinking, too.

    Args:
        text: an assistant turn, or the part of one that was sampled last.
        thinking: the text begins inside a block that the prompt, or an earlier part of the turn, opened.
    """
    parts, at = [], 0
    for start, end in _blocks(text, thinking)[0]:
        parts += [text[at:start], _VISIBLE.sub(" ", text[start:end])]
        at = end
    return "".join([*parts, text[at:]])


def ends_thinking(text: str, *, thinking: bool = False) -> bool:
    """Return whether a think block is open at the end of the text; arguments as in :func:`outside_thinking`."""
    return _blocks(text, thinking)[1]


def _blocks(text: str, thinking: bool) -> tuple[list[tuple[int, int]], bool]:
    """Return where blocks begin and end, and whether the last one is still open."""
    blocks: list[tuple[int, int]] = []
    start = 0 if thinking else None
    close = None  # of a block that was opened before the text: any closing tag
    for tag in _ANY_TAG.finditer(text):
        if tag.group() in _CLOSE_OF:
            if start is None:
                start, close = tag.start(), _CLOSE_OF[tag.group()]
        elif start is None:
            blocks = [(0, tag.end())]
        elif close in (None, tag.group()):
            blocks.append((start, tag.end()))
            start = close = None
    if start is not None:
        blocks.append((start, len(text)))
    return blocks, start is not None


Message = Mapping[str, Any]
Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One decoded call.

    Attributes:
        name: of the tool.
        arguments: not validated yet. Formats that write values as bare text give them as strings; checking them
            against the tool's schema turns them into numbers and so on.
        id: what the model itself calls the call, in formats that write one; its result is answered under it.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A parsed assistant turn.

    Attributes:
        content: the text outside reasoning and calls.
        tool_calls: decoded calls, in order.
        malformed: for each call that could not be decoded, why.
        reasoning: the text of the model's thinking, or None. Calls in it are not calls.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str | None = None


def call_json(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as most formats write it: one JSON object."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFormat:
    """How one family of models writes tool calls.

    Attributes:
        name: value of ``agent.tool_format``.
        parse: parses an assistant turn (its text with special tokens), given the schemas of the sample's tools.
            Never raises, never evaluates anything, and takes time linear in the text.
        example: a call as the model should write it, for templates that have no section for tools.
        markers: a chat template is of this format if its source has every text of one of these groups.
        call_end: the text that closes the last call of a turn (not the turn), "" if there is none.
        write: a call as the model would write it, for templates that show none; None: such a template cannot be used.
        result: a tool result inside a user message, for templates that have no ``tool`` role; ``{}`` is the result.
        syntaxes: of calls that a request demands, see ``CallSyntax.needs``; none: such requests are refused.
    """

    name: str
    parse: Callable[[str, Sequence[Schema]], Reply]
    example: str
    markers: tuple[tuple[str, ...], ...] = ()
    call_end: str = ""
    write: Callable[[str, Mapping[str, Any]], str] | None = None
    result: str = "<tool_response>\n{}\n</tool_response>"
    syntaxes: tuple[CallSyntax, ...] = ()

    def system_section(self, tools: Sequence[Schema]) -> str:
        """Return the prompt section on tools for a template that has none."""
        schemas = "\n".join(json.dumps(tool) for tool in tools)
        return f"You can call these tools:\n<tools>\n{schemas}\n</tools>\nTo call one, write {self.example}"

    def tool_result(self, text: str) -> str:
        """Return a tool result as part of a user message, for a template without ``tool`` role."""
        return self.result.replace("{}", text, 1)

    def matches(self, template: str) -> bool:
        """Return whether a chat template, given as source, writes calls in this format."""
        return any(all(marker in template for marker in group) for group in self.markers)


MAX_CALLS = 64
"""Calls (decodable or not) read in one turn; a turn of more is a degenerate one, and the rest of it is not read."""

_ALL_THINK_TAGS = tuple(tag for tags in ALL_THINK_TAGS for tag in tags)


class Read(NamedTuple):
    """Calls, or problems as text, and where they end."""

    items: list[ToolCall | str]
    end: int


Reader = Callable[[str, re.Match[str]], Read | None]
"""From the text and the match of the opening to what is there; None: it is text after all."""


class Scanner:
    """Parses turns of one format.

    Args:
        opening: pattern of what begins a call (or a section of calls). Must not match the empty string.
        read: reads what begins there. ``Read.end`` must lie after the beginning of the opening.
        noise: pattern of format tokens between calls that are not part of the content.
        think: the tags around reasoning.
    """

    def __init__(
        self, opening: str, read: Reader, *, noise: str | None = None, think: tuple[str, str] = THINK_TAGS
    ) -> None:
        begin, end = map(re.escape, think)
        parts = [f"(?P<think>{begin})", f"(?P<end>{end})", f"(?P<call>{opening})"]
        if noise:
            parts.append(f"(?P<noise>{noise})")
        self._marks = re.compile("|".join(parts), re.DOTALL)
        self._read = read

    def parse(self, text: str, tools: Sequence[Schema] = ()) -> Reply:
        """Parse an assistant turn; ``tools`` is unused, see :class:`ToolFormat`."""
        content: list[str] = []
        reasoning: list[str] = []
        items: list[ToolCall | str] = []
        thinking, reasoned, at = False, False, 0
        hidden = 0  # everything before this place turned out to be reasoning
        while mark := self._marks.search(text, at):
            (reasoning if thinking else content).append(text[at : mark.start()])
            at = mark.end()
            kind = mark.lastgroup if mark.lastgroup in ("think", "end", "noise") else "call"
            if kind == "think":
                thinking = reasoned = True
            elif kind == "end":
                if not thinking:
                    hidden = mark.start()
                    content, reasoning, items = [], [], []
                thinking, reasoned = False, True
            elif thinking:
                reasoning.append(mark.group())
            elif kind == "call":
                if len(items) >= MAX_CALLS:
                    items.append(f"more than {MAX_CALLS} calls in one turn: the rest was not read")
                    at = len(text)
                    break
                if (found := self._read(text, mark)) is None:
                    content.append(mark.group())
                else:
                    items += found.items
                    at = found.end
        (reasoning if thinking else content).append(text[at:])
        items = items[: MAX_CALLS + 1]
        return Reply(
            content="".join(content).strip(),
            tool_calls=tuple(item for item in items if isinstance(item, ToolCall)),
            malformed=tuple(item for item in items if isinstance(item, str)),
            reasoning=text[:hidden] + "".join(reasoning) if reasoned else None,
        )


def resume_after(text: str, at: int, close: str | None, *marks: str) -> int:
    """Return where to resume after a malformed call: after its closing tag, or before an earlier mark or thinking tag.

    Args:
        text: the assistant turn.
        at: where the call broke, or where it began if a string of it may have swallowed a mark.
        close: its closing tag, if it has one.
        marks: tags that begin something else.
    """
    tags = "|".join(re.escape(tag) for tag in (close, *marks, *_ALL_THINK_TAGS) if tag)
    found = re.compile(tags).search(text, at)
    if found is None:
        return len(text)
    return found.end() if found.group() == close else found.start()


def skip_space(text: str, at: int) -> int:
    """Return the first position from ``at`` that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def json_at(text: str, at: int) -> tuple[Any, int, str | None]:
    """Return ``(value, end, None)`` of the JSON after white space, or ``(None, start, problem)``."""
    at = skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        if _SURROGATE.search(text, at, end) and has_lone_surrogate(json.dumps(value, ensure_ascii=False)):
            return None, at, "not valid JSON: a lone surrogate in a string"
    except RecursionError:
        return None, at, "not valid JSON: nested too deeply"
    except ValueError as error:
        return None, at, f"not valid JSON: {str(error)[:120]}"
    return value, end, None


def to_arguments(value: Any) -> dict[str, Any] | str:
    """Return arguments as an object, decoding a string of JSON, or their problem."""
    if isinstance(value, str):
        decoded, end, problem = json_at(value, 0)
        value = decoded if problem is None and skip_space(value, end) == len(value) else value
    if not isinstance(value, dict):
        return f'"arguments" must be an object, got {type(value).__name__}'
    return value


def to_call(value: Any, *, keys: tuple[str, ...] = ("arguments",)) -> ToolCall | str:
    """Return a decoded ``{"name": …, "arguments": {…}}`` as a call, or its problem.

    Of the possible ``keys`` of the arguments the first one present counts, and none means no arguments.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return f'expected an object with "name" and "{keys[0]}"'
    arguments = to_arguments(next((value[key] for key in keys if key in value), {}))
    if isinstance(arguments, str):
        return arguments
    return ToolCall(name=value["name"], arguments=arguments)
