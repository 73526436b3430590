"""What a chat template writes around messages that are inserted after a turn.

::

    <|im_end|> ↵ <|im_start|> tool ↵   57 euros   <|im_end|> ↵ <|im_start|> assistant ↵
    ────────── opening ─────────────   ─ text ─   ─────────── closing ───────────────

A template writes the same ids whatever the text is, so whoever learns to predict what tools say
may leave them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_agent_rl.types.sequences import common_prefix_length

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TemplateMarkup:
    """The ids around the texts of inserted messages.

    Attributes:
        control_ids: of control tokens, which no text holds.
        openings: before the first text: the end of the turn, and the header of a message.
        separators: between the texts of two messages; none that could be in a text by chance.
        closings: after the last text: the end of a message, and the next generation prompt.
    """

    control_ids: frozenset[int]
    openings: frozenset[Ids]
    separators: frozenset[Ids]
    closings: frozenset[Ids]

    def is_text(self, appended_ids: Sequence[int]) -> list[bool]:
        """Return which of the ids inserted after a turn are no markup, [L].

        A header with the name of a call is markup up to the name: what follows counts as text.
        """
        ids = tuple(appended_ids)
        reversed_closings = [closing[::-1] for closing in self.closings]
        text_start = _longest_common(ids, self.openings)
        text_end = len(ids) - _longest_common(ids[::-1], reversed_closings)

        is_text = []
        for position, token in enumerate(ids):
            is_inside = text_start <= position < text_end
            is_text.append(is_inside and token not in self.control_ids)

        for separator in self.separators:
            length = len(separator)
            for start in range(len(ids) - length + 1):
                if ids[start : start + length] == separator:
                    is_text[start : start + length] = [False] * length
        return is_text


def markup_between(one: Sequence[int], other: Sequence[int]) -> tuple[Ids, Ids]:
    """Return the opening and the closing that two insertions of different texts have in common.

    Args:
        one: ids of an insertion.
        other: ids of the same with a text that begins and ends otherwise.
    """
    opening_length = common_prefix_length(one, other)
    closing_length = common_prefix_length(one[::-1], other[::-1])
    closing_start = len(one) - closing_length
    return tuple(one[:opening_length]), tuple(one[closing_start:])


def _longest_common(ids: Ids, beginnings: Iterable[Ids]) -> int:
    return max((common_prefix_length(ids, beginning) for beginning in beginnings), default=0)
