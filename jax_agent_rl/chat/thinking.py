"""What part of a sampled text is thinking. Nothing in it that looks like a call is one, whichever agent reads it.

A block runs from its opening tag to its own closing tag, or to the end of a text that was cut. The generation prompt
may have opened one already: everything up to a closing tag that nothing opened is thinking, too.
"""

from __future__ import annotations

import re

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
    """Where blocks begin and end, and whether the last one is still open."""
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
