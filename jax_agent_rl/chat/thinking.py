"""Think blocks: which part of an assistant turn is reasoning, and which is its answer.

::

    <think>plan</think>The answer is 4.          plan is reasoning, the rest is the answer
    plan</think>The answer is 4.                 the prompt opened the block, in which the turn then begins
    <think>plan                                  the turn was cut while thinking: there is no answer
    <think>plan</think>Write </think> to stop.   the second closing tag closes nothing, so it is text

Every reader of a turn decides by :class:`ThinkState`, which is told one tag after the other: the
scanner of tool-call formats, agents that look for markers, and whatever reads the text of a turn
(rewards, judges, simulated users).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

THINK_TAGS = ("<think>", "</think>")
SEED_THINK_TAGS = ("<seed:think>", "</seed:think>")
MISTRAL_THINK_TAGS = ("[THINK]", "[/THINK]")
GEMMA4_THINK_TAGS = ("<|channel>", "<channel|>")
ALL_THINK_TAGS = (THINK_TAGS, SEED_THINK_TAGS, MISTRAL_THINK_TAGS, GEMMA4_THINK_TAGS)

ANY_THINK_TAG = "|".join(re.escape(tag) for tags in ALL_THINK_TAGS for tag in tags)
"""Pattern of all opening and closing tags."""

_CLOSE_OF: dict[str, str] = dict(ALL_THINK_TAGS)
_TAG = re.compile(ANY_THINK_TAG)
_VISIBLE = re.compile(r"\S")

_CHANNEL_NAME = (  # which Gemma 4 writes after its opening tag, and is no part of the thought
    "thought\n"
)

Step = Literal["opens", "closes", "began_inside", "text"]


class ThinkState:
    """Whether a reader of a turn stands in a think block, from tag to tag.

    A block ends at its own closing tag. A closing tag that nothing opened means that the turn began
    in a block, which the prompt opened, if it is the first tag of the turn and it is not known
    where that began; any other is text.

    Args:
        thinking: whether the turn begins in a block. None: that is not known, and its first tag
            tells.

    Attributes:
        inside: whether the reader stands in a block.
    """

    def __init__(self, thinking: bool | None) -> None:
        self.inside = bool(thinking)
        self._closing: str | None = None  # of a block that began before the text: any closing tag
        self._may_have_begun_inside = thinking is None

    def read(self, tag: str) -> Step:
        """Move past a tag, and return what it does."""
        may_have_begun_inside = self._may_have_begun_inside
        self._may_have_begun_inside = False
        is_opening = tag in _CLOSE_OF
        if self.inside:
            if is_opening or self._closing not in (None, tag):
                return "text"
            self.inside = False
            self._closing = None
            return "closes"
        if is_opening:
            self.inside = True
            self._closing = _CLOSE_OF[tag]
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
    """Return the text with its think blocks, tags included, blanked: as long as before, so that positions hold.

    Args:
        text: an assistant turn, or the part of one that was sampled last.
        thinking: see :class:`ThinkState`.
    """
    pieces: list[str] = []
    at = 0
    for block in think_blocks(text, thinking=thinking):
        pieces.append(text[at : block.start])
        pieces.append(_VISIBLE.sub(" ", text[block.start : block.end]))
        at = block.end
    pieces.append(text[at:])
    return "".join(pieces)


def ends_thinking(text: str, *, thinking: bool | None = None) -> bool:
    """Return whether a think block is open at the end of the text; arguments as in :func:`outside_thinking`."""
    blocks = think_blocks(text, thinking=thinking)
    return bool(blocks) and not blocks[-1].is_closed


def answer_of(text: str, *, thinking: bool | None = None) -> str:
    """Return what a turn says outside its think blocks, which is all that a reader of answers may look at.

    >>> answer_of("<think>maybe #### 18</think>I cannot tell.")
    'I cannot tell.'
    >>> answer_of("<think>it is 18")
    ''

    Args:
        text: an assistant turn as text.
        thinking: see :class:`ThinkState`.
    """
    return "".join(_outside(text, thinking))


def _outside(text: str, thinking: bool | None) -> Iterator[str]:
    at = 0
    for block in think_blocks(text, thinking=thinking):
        yield text[at : block.start]
        at = block.end
    yield text[at:]


def began_inside(text: str) -> bool:
    """Return whether a turn began in a think block that the prompt opened, as its first tag tells.

    >>> began_inside("2 + 2</think> 4"), began_inside("<think>2 + 2</think> 4")
    (True, False)
    """
    first = _TAG.search(text)
    return first is not None and first.group() not in _CLOSE_OF


def with_closed_thinking(text: str) -> str:
    """Return a turn's text with the tag that closes its last think block, if that was cut.

    So the text of a later turn can follow, without being taken for reasoning.
    """
    blocks = think_blocks(text)
    if not blocks or blocks[-1].is_closed:
        return text
    opening = _TAG.match(text, blocks[-1].start)
    return text + _CLOSE_OF[opening.group()] if opening else text
