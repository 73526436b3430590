"""Truncation of a tool result to a number of tokens, cheap even for ten million characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from jax_agent_rl.utils.text import replace_lone_surrogates

Side = Literal["left", "middle", "right"]
Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

MARKER = "...(truncated)..."
CHARS_PER_TOKEN = 64
"""No realistic text has longer tokens on average, so cutting at this many characters first loses nothing."""


def truncate_text(text: str, limit: int, side: Side, *, encode: Encode, decode: Decode) -> str:
    """Return ``text`` itself if it has at most ``limit`` tokens, else as much of it as fits with a marker.

    Lone surrogates, which no tokenizer accepts, become question marks.

    Args:
        text: the tool result.
        limit: maximum number of returned tokens, including the marker (omitted if the limit is too small for it).
        side: the side that is cut: ``left`` keeps the end, ``right`` the beginning, ``middle`` both.
        encode: text to ids, without special tokens added.
        decode: ids to text.
    """
    text = replace_lone_surrogates(text)
    short = _keep(text, limit * CHARS_PER_TOKEN, side) if len(text) > limit * CHARS_PER_TOKEN else text
    ids = encode(short)
    if len(ids) <= limit and short is text:
        return text
    marker_tokens = len(encode(MARKER))
    marker = MARKER if 2 * marker_tokens <= limit else ""
    keep = min(len(ids), limit - (marker_tokens if marker else 0))
    while True:
        head, tail = _split(keep, side)
        # A cut through a multi-byte character decodes to replacement characters, which are removed.
        start, end = decode(ids[:head]).rstrip("\ufffd"), decode(ids[len(ids) - tail :]).lstrip("\ufffd")
        result = start + marker + end
        excess = len(encode(result)) - limit  # > 0 if the pieces have more tokens apart than together
        if excess <= 0:
            return result
        keep = max(0, keep - excess)


def _split(keep: int, side: Side) -> tuple[int, int]:
    """Return how many of ``keep`` are at the beginning and at the end."""
    if side == "left":
        return 0, keep
    if side == "right":
        return keep, 0
    return keep - keep // 2, keep // 2


def _keep(text: str, chars: int, side: Side) -> str:
    head, tail = _split(chars, side)
    return text[:head] + text[len(text) - tail :]
