"""Parsing of model-written text (tags, code, tool calls, file names) and formatting of results.

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
    """Return the stripped contents of the last ``<tag>…</tag>``.

    None if there is no such tag, or the last one is not closed.
    """
    start = action.rfind(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = action.find(f"</{tag}>", start)
    if end < 0:
        return None
    return action[start:end].strip()


def tag_blocks(action: str, tag: str) -> Iterator[str]:
    """Yield the contents of each ``<tag>…</tag>``, in order."""
    opening = f"<{tag}>"
    closing = f"</{tag}>"
    position = 0
    while True:
        start = action.find(opening, position)
        if start < 0:
            return
        start += len(opening)
        end = action.find(closing, start)
        if end < 0:
            return
        yield action[start:end]
        position = end + len(closing)


def code_blocks(action: str, *languages: str) -> Iterator[str]:
    """Yield the contents of each closed fenced block in one of these languages.

    A block may be a single line.
    """
    for block in fenced_blocks(action):
        if block.is_closed and block.language in languages:
            yield block.content


def extract_code(action: str, tag: str, *languages: str) -> str | None:
    """Return all code of an action, joined by newlines; None if there is none.

    It is the contents of each ``<tag>…</tag>``; without such a tag, of the fenced blocks.

    Args:
        action: the model's text.
        tag: a tag's name, such as ``python``.
        languages: words allowed after the opening fence, such as ``python`` and ``py``.
    """
    blocks = list(tag_blocks(action, tag))
    if not blocks:
        blocks = list(code_blocks(action, *languages))
    if not blocks:
        return None
    return "\n".join(_dedent(block) for block in blocks)


def _dedent(block: str) -> str:
    """Dedent code, and strip the blanks after its opening."""
    lines = block.lstrip(" \t").strip("\r\n").split("\n")
    indents = []
    for line in lines:
        if line.strip():
            indent_chars = len(line) - len(line.lstrip(" \t"))
            indents.append(line[:indent_chars])
    margin = len(os.path.commonprefix(indents))
    return "\n".join(line[margin:] for line in lines)


def parse_tool_call(action: str) -> tuple[str, Mapping[str, Any]] | None:
    """Parse the last tool call into its name and arguments.

    A call is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``. It is read in the same way
    as a call of the policy's own tools (:func:`jax_agent_rl.chat.formats.base.to_call`). If it has
    the key ``"server"``, the name is ``SERVER.NAME``. None if there is no call, or a malformed one.
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

    name = call.name
    server = value.get("server")
    if isinstance(server, str) and server:
        name = f"{server}.{name}"
    return name, call.arguments


def result_block(action: str, text: str) -> str:
    """Format a result in the style of the action: fenced after fenced code, in a tag after a tag.

    If the action ends by opening a result block, the result only closes it.
    """
    action_text = action.rstrip()
    for name in _RESULTS:
        if action_text.endswith(f"<{name}>"):
            return f"\n{text}\n</{name}>\n"

    blocks = list(fenced_blocks(action))
    if blocks:
        last = blocks[-1]
        if not last.is_closed and last.language in _RESULTS and not last.content.strip():
            return f"\n{text}\n{last.fence}\n"

        if last.is_closed:
            text_after = action[last.end :]
            closing = ""
        else:  # the action stopped before its closing fence
            text_after = last.content
            closing = f"{last.fence}\n"
        if "</" not in text_after:
            return f"\n{closing}{fenced(text, 'result')}\n"

    if action_text.endswith("</tool_call>"):
        return f"\n<tool_response>\n{fenced(text, 'result')}\n</tool_response>\n"
    return f"\n<result>\n{text}\n</result>\n"


NO_PATH = (OSError, ValueError, RuntimeError)
"""Errors of impossible paths: too long, a link to itself, a NUL or a lone surrogate inside."""


def resolve_file(root: Path, name: str) -> Path | None:
    """Resolve a file name below a resolved folder, following links.

    None if it is not a file, or lies outside the folder.
    """
    try:
        path = (root / name).resolve()
        if path.is_relative_to(root) and path.is_file():
            return path
        return None
    except NO_PATH:
        return None
