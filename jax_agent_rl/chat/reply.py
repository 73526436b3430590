"""A parsed assistant turn: its parts in the order in which the model wrote them.

::

    <think>plan</think>                                              reasoning "plan"
    Let me see.                                                      text "Let me see."
    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>      call f(x=1)
    <tool_call>{"na</tool_call>                                      malformed "not valid JSON: …"

Agents, the endpoint, its streams, rewards, judges and simulated users all read a turn as a
:class:`Reply`. The answer, the calls in order and the reasoning are views of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

PartKind = Literal["text", "reasoning", "call", "malformed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One decoded call.

    Attributes:
        name: name of the tool.
        arguments: not validated yet. Where the tool's schema is known they are converted by it
            (formats that write values as bare text give strings), see
            :func:`jax_agent_rl.tools.schema.convert_arguments`.
        id: id that the model gave the call, in formats that have one; the result refers to it.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPart:
    """A stretch of an assistant turn.

    Attributes:
        kind: ``text``, ``reasoning``, ``call`` (a decoded call) or ``malformed`` (a call that could
            not be decoded).
        text: what the model wrote; reasoning is without the tags around it.
        call: the decoded call; None for other kinds.
        problem: why a malformed call could not be decoded.
        is_closed: whether reasoning was finished.
    """

    kind: PartKind
    text: str
    call: ToolCall | None = None
    problem: str = ""
    is_closed: bool = True


@dataclass(frozen=True, slots=True, init=False)
class Reply:
    """A parsed assistant turn.

    Args:
        content: text of an answer.
        tool_calls: decoded calls.
        malformed: for each call that could not be decoded, why.
        reasoning: text of the thinking before the answer; None: there is none.
        parts: the parts, instead of all these.

    Attributes:
        parts: in the order in which the model wrote them.
    """

    parts: tuple[ReplyPart, ...]

    def __init__(
        self,
        content: str = "",
        *,
        tool_calls: Iterable[ToolCall] = (),
        malformed: Iterable[str] = (),
        reasoning: str | None = None,
        parts: Iterable[ReplyPart] | None = None,
    ) -> None:
        described_parts = tuple(_parts(content, tool_calls, malformed, reasoning))
        if parts is None:
            parts = described_parts
        elif described_parts:
            raise TypeError(
                "a reply is made of its parts, or of content, calls and reasoning; give one of"
                " the two"
            )
        object.__setattr__(self, "parts", tuple(parts))

    @property
    def content(self) -> str:
        """The text outside reasoning and calls, without white space around it: the answer."""
        return self.text_of("text").strip()

    @property
    def reasoning(self) -> str | None:
        """The text of the model's thinking; None if there is no think block.

        What looks like a call in it is not a call.
        """
        thoughts = [part.text for part in self.parts if part.kind == "reasoning"]
        return "".join(thoughts) if thoughts else None

    @property
    def ends_thinking(self) -> bool:
        """Whether the turn was cut while thinking."""
        if not self.parts:
            return False
        last = self.parts[-1]
        return last.kind == "reasoning" and not last.is_closed

    @property
    def calls(self) -> tuple[ReplyPart, ...]:
        """Decoded and malformed calls, in order."""
        return tuple(part for part in self.parts if part.kind in ("call", "malformed"))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Decoded calls, in order."""
        return tuple(part.call for part in self.parts if part.call is not None)

    @property
    def malformed(self) -> tuple[str, ...]:
        """For each call that could not be decoded, why."""
        return tuple(part.problem for part in self.parts if part.kind == "malformed")

    def text_of(self, *kinds: PartKind) -> str:
        """Return what the model wrote of these kinds, in order."""
        return "".join(part.text for part in self.parts if part.kind in kinds)

    def with_calls(self, change: Callable[[ToolCall], ToolCall]) -> Reply:
        """Return the turn with each decoded call changed."""
        parts: list[ReplyPart] = []
        for part in self.parts:
            if part.call is not None:
                part = replace(part, call=change(part.call))
            parts.append(part)
        return Reply(parts=parts)

    def with_text(self, change: Callable[[str], str]) -> Reply:
        """Return the turn with its text and reasoning changed, but not the text of calls."""
        parts: list[ReplyPart] = []
        for part in self.parts:
            if part.kind in ("text", "reasoning"):
                part = replace(part, text=change(part.text))
            parts.append(part)
        return Reply(parts=parts)


def _parts(
    content: str, tool_calls: Iterable[ToolCall], malformed: Iterable[str], reasoning: str | None
) -> Iterator[ReplyPart]:
    if reasoning is not None:
        yield ReplyPart(kind="reasoning", text=reasoning)
    if content:
        yield ReplyPart(kind="text", text=content)
    for call in tool_calls:
        yield ReplyPart(kind="call", text="", call=call)
    for problem in malformed:
        yield ReplyPart(kind="malformed", text="", problem=problem)


class ReplyBuilder:
    """Collects the parts of a turn; neighbouring text becomes one part, and so does a think block.

    Attributes:
        count: calls so far, malformed ones included.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[ReplyPart] = []
        self._kind: PartKind = "text"  # of the part that is being written
        self._pieces: list[str] = []

    def add_text(self, text: str) -> None:
        """Add text outside reasoning and calls."""
        if text:
            self._pieces.append(text)

    def begin_reasoning(self) -> None:
        """Open a think block."""
        self._finish_part()
        self._kind = "reasoning"

    def add_reasoning(self, text: str) -> None:
        """Add text to the block that is open."""
        self._pieces.append(text)

    def end_reasoning(self) -> None:
        """Close the block that is open."""
        self._finish_part()

    def add_calls(self, items: Sequence[ToolCall | str], text: str) -> None:
        """Add the calls that the model wrote as ``text``.

        Args:
            items: decoded calls, and for each call that could not be decoded, why.
            text: becomes the text of the first problem, which is shown to whoever has to mend it,
                or else of the first call.
        """
        self._finish_part()
        problems = [index for index, item in enumerate(items) if isinstance(item, str)]
        index_with_text = problems[0] if problems else 0
        for index, item in enumerate(items):
            part_text = text if index == index_with_text else ""
            if isinstance(item, str):
                self._parts.append(ReplyPart(kind="malformed", text=part_text, problem=item))
            else:
                self._parts.append(ReplyPart(kind="call", text=part_text, call=item))
        self.count += len(items)

    def copy(self) -> ReplyBuilder:
        """Return an independent builder with the same parts."""
        self._pieces = ["".join(self._pieces)]
        builder = ReplyBuilder()
        builder.count = self.count
        builder._parts = list(self._parts)
        builder._kind = self._kind
        builder._pieces = list(self._pieces)
        return builder

    def turn_into_reasoning(self, text: str) -> None:
        """Replace everything so far by reasoning: the turn began in a think block."""
        self._parts = [ReplyPart(kind="reasoning", text=text)]
        self._pieces = []
        self.count = 0

    def build(self) -> Reply:
        """Return the turn; a block that is still open was cut."""
        self._finish_part(is_closed=False)
        return Reply(parts=self._parts)

    def _finish_part(self, *, is_closed: bool = True) -> None:
        text = "".join(self._pieces)
        if self._kind == "reasoning":
            self._parts.append(ReplyPart(kind="reasoning", text=text, is_closed=is_closed))
        elif text:
            self._parts.append(ReplyPart(kind="text", text=text))
        self._kind = "text"
        self._pieces = []
