"""Parsing of model-written text (tags, fenced code, tool calls, file names) and formatting of results.

All parsing takes one pass: each search begins where the previous one ended, and none is repeated once it failed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FENCE = "```"
_RESULTS = ("result", "output")  # names of a result block that a model may open itself


def last_tag(action: str, tag: str) -> str | None:
    """Return the stripped contents of the last ``<tag>…</tag>``; None if there is none or it is not closed."""
    start = action.rfind(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = action.find(f"</{tag}>", start)
    return None if end < 0 else action[start:end].strip()


def tag_blocks(action: str, tag: str) -> Iterator[str]:
    """Yield the contents of each ``<tag>…</tag>``, in order."""
    opening, closing, at = f"<{tag}>", f"</{tag}>", 0
    while (start := action.find(opening, at)) >= 0:
        start += len(opening)
        end = action.find(closing, start)
        if end < 0:
            return
        yield action[start:end]
        at = end + len(closing)


def fenced_blocks(action: str, *languages: str) -> Iterator[str]:
    """Yield the contents of each fenced block in one of these languages, from after the language's name.

    A block may be a single line: ```` ```python print(3)``` ````.
    """
    opening, at = _opening_fence(languages), 0
    while found := opening.search(action, at):
        end = action.find(_FENCE, found.end())
        if end < 0:
            return
        yield action[found.end() : end]
        at = end + len(_FENCE)


@cache
def _opening_fence(languages: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, languages))
    return re.compile(rf"{_FENCE}[ \t]*(?:{names})(?=\s|{_FENCE})")


def extract_code(action: str, tag: str, *languages: str) -> str | None:
    """Return all code of an action, joined by newlines: from ``<tag>…</tag>``, else from fenced blocks.

    Args:
        action: the model's text.
        tag: e.g. ``python``.
        languages: allowed after the opening fence, e.g. ``python``, ``py``.
    """
    blocks = list(tag_blocks(action, tag)) or list(fenced_blocks(action, *languages))
    return "\n".join(map(_dedent, blocks)) if blocks else None


def _dedent(block: str) -> str:
    """Dedent code, and strip the blanks after its opening."""
    lines = block.lstrip(" \t").strip("\r\n").split("\n")
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip()]
    margin = len(os.path.commonprefix(margins))
    return "\n".join(line[margin:] for line in lines)


def parse_tool_call(action: str) -> tuple[str, Mapping[str, Any]] | None:
    """Parse the last ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` into name and arguments.

    The arguments may be the JSON text of an object, as OpenAI's are; with ``"server"``, the name is ``SERVER.NAME``.
    """
    call = _parse_object(last_tag(action, "tool_call"))
    if call is None or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    arguments = {} if arguments is None else _parse_object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return None
    server = call.get("server")
    return (f"{server}.{call['name']}" if isinstance(server, str) and server else call["name"]), arguments


def _parse_object(text: str | None) -> dict[str, Any] | None:
    try:
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def result_block(action: str, text: str) -> str:
    """Format a result in the style of the action: fenced after fenced code, in a tag after a tag.

    If the action ends by opening a result block, the result only closes it.
    """
    written = action.rstrip()
    for name in _RESULTS:
        if written.endswith(f"<{name}>"):
            return f"\n{text}\n</{name}>\n"
        if written.endswith(_FENCE + name):
            return f"\n{text}\n{_FENCE}\n"
    if _FENCE in action and "</" not in action.rpartition(_FENCE)[2]:
        closing = "" if action.count(_FENCE) % 2 == 0 else f"{_FENCE}\n"  # it stopped before its closing fence
        return f"\n{closing}{_fenced_result(text)}"
    if written.endswith("</tool_call>"):
        return f"\n<tool_response>\n{_fenced_result(text)}</tool_response>\n"
    return f"\n<result>\n{text}\n</result>\n"


def _fenced_result(text: str) -> str:
    return f"{_FENCE}result\n{text}\n{_FENCE}\n"


NO_PATH = (OSError, ValueError, RuntimeError)
"""Errors of impossible paths: too long, a link to itself, a NUL or a lone surrogate inside."""


def resolve_file(root: Path, name: str) -> Path | None:
    """Resolve a file name below a resolved folder, following links; None if it is not a file or lies elsewhere."""
    try:
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except NO_PATH:
        return None
