"""Think blocks: which part of an assistant turn is reasoning, and which is its answer.

::

    <think>plan</think>The answer is 4.          "plan" is reasoning, all else is the answer
    plan</think>The answer is 4.                 likewise: the prompt opened the block
    <think>plan                                  the turn was cut while thinking: no answer
    <think>plan</think>Write </think> to stop.   the second closing tag closes nothing: it is text

Every reader of a turn decides by :class:`ThinkState`, which is told one tag after the other: the
scanner of tool-call formats, agents that look for markers, and all that read the text of a turn
(rewards, judges, simulated users).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Literal

THINK_TAGS = ("<think>", "</think>")
SEED_THINK_TAGS = ("<seed:think>", "</seed:think>")
MISTRAL_THINK_TAGS = ("[THINK]", "[/THINK]")
GEMMA4_THINK_TAGS = ("<|channel>", "<channel|>")
ALL_THINK_TAGS = (THINK_TAGS, SEED_THINK_TAGS, MISTRAL_THINK_TAGS, GEMMA4_THINK_TAGS)

ANY_THINK_TAG = "|".join(map(re.escape, itertools.chain.from_iterable(ALL_THINK_TAGS)))
"""Pattern of all opening and closing tags."""

_CLOSING_TAGS: dict[str, str] = dict(ALL_THINK_TAGS)  # by opening tag
_TAG = re.compile(ANY_THINK_TAG)
_VISIBLE = re.compile(r"\S")

# Gemma 4 writes it after its opening tag; it is not part of the thought.
_CHANNEL_NAME = "thought\n"

Step = Literal["opens", "closes", "began_inside", "text"]


class ThinkState:
    """Whether a reader of a turn stands in a think block, from tag to tag.

    A block ends at its own closing tag. If the first tag of a turn is a closing tag, the turn began
    in a block that the prompt opened, provided that it is not known where the turn began. Any other
    closing tag that closes nothing is text.

    Args:
        thinking: whether the turn begins in a block. None: that is not known; its first tag tells.

    Attributes:
        inside: whether the reader stands in a block.
    """

    def __init__(self, thinking: bool | None) -> None:
        self.inside = bool(thinking)
        # The tag that closes the block. None for a block that the prompt opened: any tag does.
        self._closing: str | None = None
        self._may_have_begun_inside = thinking is None

    def read(self, tag: str) -> Step:
        """Move past a tag, and return what it does."""
        may_have_begun_inside = self._may_have_begun_inside
        self._may_have_begun_inside = False
        is_opening = tag in _CLOSING_TAGS
        if self.inside:
            if is_opening or self._closing not in (None, tag):
                return "text"
            self.inside = False
            self._closing = None
            return "closes"

        if is_opening:
            self.inside = True
            self._closing = _CLOSING_TAGS[tag]
            return "opens"
        return "began_inside" if may_have_begun_inside else "text"


def thought_start(text: str, tag: re.Match[str]) -> int:
    """Return where the reasoning after an opening tag begins."""
    if tag.group() == GEMMA4_THINK_TAGS[0] and text.startswith(_CHANNEL_NAME, tag.end()):
        return tag.end() + len(_CHANNEL_NAME)
    return tag.end()


@dataclass(frozen=True, slots=True)
class ThinkBlock:
    """A think block in a text.

    Attributes:
        start: where it begins, with its opening tag.
        end: where it ends, after its closing tag or at the end of the text.
        text: the reasoning between the tags.
        is_closed: whether a tag closes it.
    """

    start: int
    end: int
    text: str
    is_closed: bool = True


def think_blocks(text: str, *, thinking: bool | None = None) -> list[ThinkBlock]:
    """Return the think blocks of a turn in order.

    Args:
        text: an assistant turn, or the part of one that was sampled last.
        thinking: see :class:`ThinkState`.
    """
    state = ThinkState(thinking)
    blocks: list[ThinkBlock] = []
    start = 0
    text_start = 0

    for tag in _TAG.finditer(text):
        step = state.read(tag.group())
        if step == "opens":
            start = tag.start()
            text_start = thought_start(text, tag)
        elif step == "closes":
            blocks.append(ThinkBlock(start, tag.end(), text[text_start : tag.start()]))
        elif step == "began_inside":
            blocks.append(ThinkBlock(0, tag.end(), text[: tag.start()]))

    if state.inside:
        blocks.append(ThinkBlock(start, len(text), text[text_start:], is_closed=False))
    return blocks


def outside_thinking(text: str, *, thinking: bool | None = None) -> str:
    """Return the text with its think blocks, tags included, replaced by white space.

    Its length and all positions in it stay the same.

    Args:
        text: an assistant turn, or the part of one that was sampled last.
        thinking: see :class:`ThinkState`.
    """
    pieces: list[str] = []
    position = 0
    for block in think_blocks(text, thinking=thinking):
        pieces.append(text[position : block.start])
        pieces.append(_VISIBLE.sub(" ", text[block.start : block.end]))
        position = block.end
    pieces.append(text[position:])
    return "".join(pieces)


def ends_thinking(text: str, *, thinking: bool | None = None) -> bool:
    """Return whether a think block is open at the end of the text.

    Args:
        text: an assistant turn, or the part of one that was sampled last.
        thinking: see :class:`ThinkState`.
    """
    blocks = think_blocks(text, thinking=thinking)
    return bool(blocks) and not blocks[-1].is_closed


def answer_of(text: str, *, thinking: bool | None = None) -> str:
    """Return what a turn says outside its think blocks: all that a reader of answers may look at.

    >>> answer_of("<think>maybe #### 18</think>I cannot tell.")
    'I cannot tell.'
    >>> answer_of("<think>it is 18")
    ''

    Args:
        text: an assistant turn as text.
        thinking: see :class:`ThinkState`.
    """
    pieces: list[str] = []
    position = 0
    for block in think_blocks(text, thinking=thinking):
        pieces.append(text[position : block.start])
        position = block.end
    pieces.append(text[position:])
    return "".join(pieces)


def began_inside(text: str) -> bool:
    """Return whether a turn began in a think block that the prompt opened, as its first tag tells.

    >>> began_inside("2 + 2</think> 4"), began_inside("<think>2 + 2</think> 4")
    (True, False)
    """
    first = _TAG.search(text)
    return first is not None and first.group() not in _CLOSING_TAGS


def with_closed_thinking(text: str) -> str:
    """Return a turn's text with its last think block closed, if the block was cut.

    The text of a later turn can then follow without being taken for reasoning.
    """
    blocks = think_blocks(text)
    if not blocks or blocks[-1].is_closed:
        return text
    opening = _TAG.match(text, blocks[-1].start)
    if opening is None:
        return text
    return text + _CLOSING_TAGS[opening.group()]
