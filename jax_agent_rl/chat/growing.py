"""A turn that is read while it is sampled, at a cost for each id that does not grow with the turn.

::

    ids ──► GrowingText: only the last ids are decoded ──► Scan: only the end of the text is read ──► the reply so far

What comes out is what :meth:`ChatCodec.parse_reply` reads of the same ids, as both use the scanner
of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jax_agent_rl.chat.formats.base import Scan
from jax_agent_rl.chat.reply import Reply

MAX_INCOMPLETE_IDS = 16
"""Ids that are waited for until their bytes are a character; a character has at most four bytes."""


class GrowingText:
    """The text of ids that become more.

    Args:
        decode: from ids to their text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._text = ""
        self._ids: list[int] = []
        self._context_start = (
            0  # from here on ids are decoded again, as text may depend on the ids before it
        )
        self._read_end = 0  # of the ids whose text is known

    def add(self, ids: Sequence[int]) -> str:
        """Add ids and return the whole text, without a last character of which bytes are missing."""
        self._ids += ids
        known = self._decode(self._ids[self._context_start : self._read_end])
        decoded = self._decode(self._ids[self._context_start :])
        waiting = len(self._ids) - self._read_end
        if not waiting or decoded.endswith("\ufffd") and waiting < MAX_INCOMPLETE_IDS:
            return self._text
        if decoded.startswith(known):
            self._text += decoded[len(known) :]
        else:
            self._text = self._decode(self._ids)
        self._context_start = self._read_end
        self._read_end = len(self._ids)
        return self._text


class GrowingReply:
    """The parts of a turn without tools that is still sampled.

    Args:
        decode: from ids to text with special tokens.
        scan: reads the text; or the parser of a format that reads a turn as a whole.
        end_ids: ids that end a turn, which are not part of it where it ends.
        special_ids: ids of special tokens, which are no part of text.
        without_special_tokens: takes these out of a text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        scan: Scan | Callable[[str], Reply],
        *,
        end_ids: Collection[int],
        special_ids: Collection[int],
        without_special_tokens: Callable[[str], str],
    ) -> None:
        self._text = GrowingText(decode)
        self._scan = scan
        self._end_ids = frozenset(end_ids)
        self._special_ids = frozenset(special_ids)
        self._without_special_tokens = without_special_tokens
        self._ends: list[int] = []  # sampled last; they belong to the turn if it goes on
        self._holds_special = False

    def add(self, ids: Sequence[int]) -> Reply:
        """Add ids and return the turn so far."""
        new_ids = [*self._ends, *ids]
        self._ends = []
        while new_ids and new_ids[-1] in self._end_ids:
            self._ends.insert(0, new_ids.pop())
        self._holds_special = self._holds_special or not self._special_ids.isdisjoint(new_ids)
        text = self._text.add(new_ids)
        reply = self._scan.read_so_far(text) if isinstance(self._scan, Scan) else self._scan(text)
        return reply.with_text(self._without_special_tokens) if self._holds_special else reply
