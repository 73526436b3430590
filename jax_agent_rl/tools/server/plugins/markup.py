"""How models write actions: tags, fenced code, tool calls; and how results are written back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def tagged(action: str, tag: str) -> str | None:
    """The contents of the last ``<tag>…</tag>``, stripped; None if there is none."""
    start = action.rfind(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = action.find(f"</{tag}>", start)
    return None if end < 0 else action[start:end].strip()


def code_of(action: str, tag: str, *languages: str) -> str | None:
    """All code of an action, joined by newlines: from ``<tag>…</tag>``, else from fenced blocks of a language.

    Args:
        action: what the model wrote.
        tag: e.g. ``python``.
        languages: what may stand behind the opening fence, e.g. ``python``, ``py``.
    """
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", action, re.DOTALL)
    if not blocks:
        names = "|".join(map(re.escape, languages))
        blocks = re.findall(rf"```[ \t]*(?:{names})[ \t]*\n(.*?)```", action, re.DOTALL)
    return "\n".join(block.strip("\n") for block in blocks) if blocks else None


def tool_call(action: str) -> tuple[str, Mapping[str, Any]] | None:
    """Name and arguments of the last ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, if it is one."""
    text = tagged(action, "tool_call")
    if text is None:
        return None
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def result_block(action: str, text: str) -> str:
    """A result in the manner of the action: fenced after fenced code, in a tag after a tag."""
    if "```" in action and "</" not in action.rpartition("```")[2]:
        closing = "" if action.count("```") % 2 == 0 else "```\n"  # an action stopped before its closing fence
        return f"\n{closing}```output\n{text}\n```\n"
    return f"\n<result>\n{text}\n</result>\n"
