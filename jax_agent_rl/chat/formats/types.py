"""The types of tool-call formats and parsed replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    """

    name: str
    parse: Callable[[str, Sequence[Schema]], Reply]
    example: str
    markers: tuple[tuple[str, ...], ...] = ()
    call_end: str = ""
    write: Callable[[str, Mapping[str, Any]], str] | None = None
    result: str = "<tool_response>\n{}\n</tool_response>"

    def system_section(self, tools: Sequence[Schema]) -> str:
        """Return the prompt section on tools for a template that has none."""
        schemas = "\n".join(json.dumps(tool) for tool in tools)
        return f"You can call these tools:\n<tools>\n{schemas}\n</tools>\nTo call one, write {self.example}"

    def tool_result(self, text: str) -> str:
        """Return a tool result as part of a user message, for a template without ``tool`` role."""
        return self.result.replace("{}", text, 1)

    def is_of(self, template: str) -> bool:
        """Return whether a chat template, given as source, writes calls in this format."""
        return any(all(marker in template for marker in group) for group in self.markers)
