"""What a sampled assistant turn says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call the model wrote and that could be decoded: ``name`` and its JSON object of ``arguments``."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """An assistant turn, taken apart.

    Attributes:
        content: text outside of calls and reasoning, without white space at its ends.
        tool_calls: decoded calls, in order.
        malformed: for each call that could not be decoded, why, in words the model can read.
        reasoning: text inside ``<think>`` blocks, or None if there is no such block.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str | None = None
