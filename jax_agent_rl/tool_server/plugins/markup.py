"""Parsing of model-written text (tags, fenced code, tool calls, file names) and formatting of results.

All parsing takes one pass: each search begins where the previous one ended, and none is repeated
once it failed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_agent_rl.chat.formats.base import to_call
from jax_agent_rl.utils.bounded_json import parse_json
from jax_agent_rl.utils.fences import fenced, fenced_blocks

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


def code_blocks(action: str, *languages: str) -> Iterator[str]:
    """Yield the contents of each closed fenced block in one of these languages; a block may be a single line."""
    for block in fenced_blocks(action):
        if block.is_closed and block.language in languages:
            yield block.content


def extract_code(action: str, tag: str, *languages: str) -> str | None:
    """Return all code of an action, joined by newlines: from ``<tag>…</tag>``, else from fenced blocks.

    Args:
        action: the model's text.
        tag: e.g. ``python``.
        languages: allowed after the opening fence, e.g. ``python``, ``py``.
    """
    blocks = list(tag_blocks(action, tag)) or list(code_blocks(action, *languages))
    return "\n".join(map(_dedent, blocks)) if blocks else None


def _dedent(block: str) -> str:
    """Dedent code, and strip the blanks after its opening."""
    lines = block.lstrip(" \t").strip("\r\n").split("\n")
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip()]
    margin = len(os.path.commonprefix(margins))
    return "\n".join(line[margin:] for line in lines)


def parse_tool_call(action: str) -> tuple[str, Mapping[str, Any]] | None:
    """Parse the last ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` into name and arguments.

    It is read as calls of the policy's own tools are
    (:func:`jax_agent_rl.chat.formats.base.to_call`); with ``"server"``, the name is
    ``SERVER.NAME``.
    """
    text = last_tag(action, "tool_call")
    if text is None:
        return None
    try:
        value = parse_json(text)
    except ValueError:
        return None
    call = to_call(value)
    if isinstance(call, str):
        return None
    server = value.get("server")
    name = f"{server}.{call.name}" if isinstance(server, str) and server else call.name
    return name, call.arguments


def result_block(action: str, text: str) -> str:
    """Format a result in the style of the action: fenced after fenced code, in a tag after a tag.

    If the action ends by opening a result block, the result only closes it.
    """
    written = action.rstrip()
    for name in _RESULTS:
        if written.endswith(f"<{name}>"):
            return f"\n{text}\n</{name}>\n"

    blocks = list(fenced_blocks(action))
    if blocks:
        last = blocks[-1]
        if not last.is_closed and last.language in _RESULTS and not last.content.strip():
            return f"\n{text}\n{last.fence}\n"
        behind = action[last.end :] if last.is_closed else last.content
        if "</" not in behind:
            closing = (
                "" if last.is_closed else f"{last.fence}\n"
            )  # it stopped before its closing fence
            return f"\n{closing}{fenced(text, 'result')}\n"

    if written.endswith("</tool_call>"):
        return f"\n<tool_response>\n{fenced(text, 'result')}\n</tool_response>\n"
    return f"\n<result>\n{text}\n</result>\n"


NO_PATH = (OSError, ValueError, RuntimeError)
"""Errors of impossible paths: too long, a link to itself, a NUL or a lone surrogate inside."""


def resolve_file(root: Path, name: str) -> Path | None:
    """Resolve a file name below a resolved folder, following links; None if it is not a file or lies elsewhere."""
    try:
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except NO_PATH:
        return None
