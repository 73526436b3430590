"""Special tokens in text: finding them, and keeping those that people or tools wrote from becoming ids.

A tool result that contains ``<|im_end|>`` would, tokenized naively, end its own message and let its author write the
next turn. :meth:`SpecialTokens.disarm` puts a mark inside each such string before the chat template is rendered, and
:meth:`SpecialTokens.encode_after` cuts the text there: neither half is a special token, and nothing is added or lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MARK = "\ue000"  # private use: no template writes it, and no filter (trim, tojson) changes it


class SpecialTokens:
    """The special tokens of one tokenizer: its added tokens that say ``special: true``, or that end a generation.

    Args:
        tokenizer: the tokenizer.
        eos_token_ids: ids that end a generation.

    Attributes:
        ids: special ids by their text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_ids: Collection[int] = ()):
        added = {id_: t for id_, t in tokenizer.added_tokens_decoder.items() if t.special or id_ in eos_token_ids}
        self.ids: dict[str, int] = {token.content: id_ for id_, token in added.items()}
        self._texts = {id_: text for text, id_ in self.ids.items()}
        self._tokenizer = tokenizer
        # Longest first, as the tokenizer matches them. Never matches without any special tokens.
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # A special token that leaves the white space around it alone.
        self._lead = next((token.content for token in added.values() if not (token.lstrip or token.rstrip)), None)

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first special token in ``text`` from ``start`` on."""
        return self._pattern.search(text, start)

    def find_all(self, text: str) -> list[re.Match[str]]:
        return list(self._pattern.finditer(text))

    def without(self, ids: Collection[int], *, keep: Collection[str] = ()) -> list[int]:
        """``ids`` without special ones, save those whose text is in ``keep``."""
        return [id_ for id_ in ids if id_ not in self._texts or self._texts[id_] in keep]

    def mark_for(self, texts: Collection[str]) -> str:
        """A string that occurs in none of ``texts``."""
        mark = _MARK
        while any(mark in text for text in texts):
            mark += _MARK
        return mark

    def disarm(self, content: str, mark: str) -> str:
        """``content`` with ``mark`` inside every string that would become a special token.

        A mark goes after the string's first character and the search goes on from there, so overlapping ones are
        broken too. A special token of a single character can't be broken and stays.
        """
        parts, start, at = [], 0, 0
        while match := self._pattern.search(content, at):
            at = match.start() + 1
            if len(match[0]) > 1:
                parts.append(content[start:at])
                start = at
        return mark.join([*parts, content[start:]])

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` at the start of a context; strings of special tokens become those."""
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def encode_after(self, lead: str | None, text: str, mark: str) -> list[int]:
        """Ids of ``text`` in the middle of a context, cut at each ``mark``.

        Some tokenizers put a space before the first word of a context. So each piece is tokenized behind a special
        token, whose id is then taken away again.

        Args:
            lead: the special token that ``text`` stands behind in the context, or None for any.
        """
        first, *rest = text.split(mark)
        ids = self._encode_behind(lead or self._lead, first)
        for piece in rest:
            ids += self._encode_behind(self._lead, piece)
        return ids

    def _encode_behind(self, lead: str | None, text: str) -> list[int]:
        if lead is None:
            return self.encode(text)
        ids = self.encode(lead + text)
        if not ids or ids[0] != self.ids[lead]:
            raise TemplateError(f"the tokenizer does not keep its special token {lead!r} apart: {ids[:3]}")
        return ids[1:]
