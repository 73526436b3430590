"""What a tool-call format makes of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One decoded call: ``name``, and ``arguments`` (not validated yet)."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An assistant turn, taken apart.

    Attributes:
        content: the text outside reasoning and calls.
        tool_calls: decoded calls, in order.
        malformed: for each call that could not be decoded, why.
        reasoning: the text inside ``<think>``, or None. Calls in it are not calls.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str | None = None
