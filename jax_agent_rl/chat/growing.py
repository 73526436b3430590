"""A turn that is read while it is sampled, at a cost for each id that does not grow with the turn.

::

    ids ──► GrowingText                   ──► Scan                                ──► reply so far
            (only the last are decoded)       (only the end of the text is read)

The reply is the one that :meth:`ChatCodec.parse_reply` reads of the same ids, as both use the
scanner of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from jax_agent_rl.chat.formats.base import Scan
from jax_agent_rl.chat.reply import Reply

MAX_INCOMPLETE_IDS = 16
"""Number of ids that may wait until their bytes complete a character.

A character has at most four bytes.
"""


class GrowingText:
    """The text of a growing list of ids.

    Args:
        decode: returns the text of ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._text = ""
        self._ids: list[int] = []
        self._read_end = 0  # end of the ids whose text is known
        # The ids from here on are decoded again, since the text of new ids may depend on them.
        self._context_start = 0

    def add(self, ids: Sequence[int]) -> str:
        """Add ids and return the whole text, up to the last character whose bytes are complete."""
        self._ids += ids
        known_text = self._decode(self._ids[self._context_start : self._read_end])
        decoded_text = self._decode(self._ids[self._context_start :])

        waiting = len(self._ids) - self._read_end
        is_incomplete = decoded_text.endswith("\ufffd") and waiting < MAX_INCOMPLETE_IDS
        if waiting == 0 or is_incomplete:
            return self._text

        if decoded_text.startswith(known_text):
            self._text += decoded_text[len(known_text) :]
        else:  # the new ids changed the text of earlier ones
            self._text = self._decode(self._ids)
        self._context_start = self._read_end
        self._read_end = len(self._ids)
        return self._text


class GrowingReply:
    """The parts of a turn without tools that is still sampled.

    Args:
        decode: returns the text of ids, with special tokens.
        scan: reads the text; or the parser of a format that reads a turn as a whole.
        end_ids: ids that end a turn. At its end they are not part of it.
        special_ids: ids of special tokens, which are not part of text.
        without_special_tokens: removes special tokens from a text.
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
        self._last_ends: list[int] = []  # end ids sampled last: part of the turn if it goes on
        self._has_special = False

    def add(self, ids: Sequence[int]) -> Reply:
        """Add ids and return the turn so far."""
        new_ids = [*self._last_ends, *ids]
        self._last_ends = []
        while new_ids and new_ids[-1] in self._end_ids:
            self._last_ends.insert(0, new_ids.pop())
        if not self._special_ids.isdisjoint(new_ids):
            self._has_special = True

        text = self._text.add(new_ids)
        if isinstance(self._scan, Scan):
            reply = self._scan.read_so_far(text)
        else:
            reply = self._scan(text)
        if self._has_special:
            reply = reply.with_text(self._without_special_tokens)
        return reply
