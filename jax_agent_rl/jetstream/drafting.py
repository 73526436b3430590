"""Drafts for speculative decoding without a draft model: ids that followed the same ids before.

- :class:`SuffixIndex`: in what this engine sampled, siblings of the group and earlier training steps above all (Oliaro
  et al. 2024, "SuffixDecoding").
- :class:`PromptLookup`: in the request's own prompt (Saxena 2023, "Prompt Lookup Decoding").

Another :class:`Drafter`, such as a model's heads for multi-token prediction, takes their place in
``jetstream.speculation``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jax_agent_rl.jetstream.request import RunningRequest

MATCHES = (8, 4, 3, 2)
"""Numbers of ids before a position by which a :class:`SuffixIndex` finds it, the longest first."""
PROMPT_MATCHES = (4, 3, 2)
SHARES = (0.5, 0.8, 0.95)
"""Bounds of the share of a context's continuations that agree, for :attr:`Draft.evidence`."""
MAX_INDEXED_IDS = 1 << 16
"""About 50 MB."""
_BYTES = 4  # of an id


@dataclass(frozen=True, slots=True)
class Draft:
    """Ids that may follow a context.

    Attributes:
        ids: in order.
        evidence: for each id what it was drafted from, one of a few kinds. How often ids of a kind are accepted is
            measured.
    """

    ids: list[int]
    evidence: list[str]


NO_DRAFT = Draft([], [])


class Drafter(Protocol):
    """Proposes how running requests go on."""

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        """Return a draft of at most ``count`` ids for each request; none where nothing is known."""
        ...

    def observe(self, run: RunningRequest, new: int) -> None:
        """Learn from the last ``new`` ids of a request, which were sampled."""
        ...


class SuffixIndex:
    """What followed the last ids of a context, and how often, in the newest ``max_ids`` ids added.

    >>> index = SuffixIndex()
    >>> index.add([1, 2, 3, 4, 1, 2, 3], new=7)
    >>> index.draft([9, 1, 2], 3).ids
    [3, 4, 1]
    """

    def __init__(self, max_ids: int = MAX_INDEXED_IDS) -> None:
        self._max_ids = max_ids
        self._following: dict[bytes, dict[int, int]] = {}
        self._parts: deque[tuple[bytes, int]] = deque()  # ids with those before them, and how many of them are new
        self._count = 0

    def __len__(self) -> int:
        """Return the number of contexts."""
        return len(self._following)

    def add(self, ids: Sequence[int], new: int) -> None:
        """Add the last ``new`` of some ids, as what followed those before them."""
        part = np.asarray(ids[-(MATCHES[0] + new) :], np.int32).tobytes()
        self._parts.append((part, new))
        self._change(part, new, 1)
        self._count += new
        while self._count > self._max_ids:
            part, new = self._parts.popleft()
            self._change(part, new, -1)
            self._count -= new

    def _change(self, part: bytes, new: int, by: int) -> None:
        ids = np.frombuffer(part, np.int32).tolist()
        for place in range(len(ids) - new, len(ids)):
            token, end = ids[place], place * _BYTES
            for match in MATCHES:
                if match > place:
                    continue
                context = part[end - match * _BYTES : end]
                following = self._following.setdefault(context, {})
                left = following[token] = following.get(token, 0) + by
                if not left:
                    del following[token]
                    if not following:
                        del self._following[context]

    def draft(self, ids: Sequence[int], count: int) -> Draft:
        """Return what most often followed the longest known suffix, repeatedly."""
        context, draft = np.asarray(ids[-MATCHES[0] :], np.int32).tobytes(), Draft([], [])
        for _ in range(count):
            for match in MATCHES:
                following = self._following.get(context[-match * _BYTES :])
                if following is not None and match * _BYTES <= len(context):
                    break
            else:
                break
            token = max(following, key=following.__getitem__)
            draft.ids.append(token)
            draft.evidence.append(_evidence(match, following[token], sum(following.values())))
            context = context[-(MATCHES[0] - 1) * _BYTES :] + token.to_bytes(_BYTES, "little")
        return draft


def _evidence(match: int, count: int, total: int) -> str:
    """Name a kind of evidence: the length of the match, and how many of its continuations agree."""
    if total == 1:
        return f"{match} once"
    return f"{match} {sum(count / total >= share for share in SHARES)}"


class PromptLookup:
    """Drafts what followed the last place in the prompt that ends with the context's last ids."""

    def draft(self, prompt: Sequence[int], ids: Sequence[int], count: int) -> Draft:
        """Draft at most ``count`` ids.

        Args:
            prompt: where to look.
            ids: the context, which begins with the prompt.
            count: most ids to draft.
        """
        there = np.asarray(prompt, np.int32)
        for match in PROMPT_MATCHES:
            if match >= len(there):
                continue
            found = np.ones(len(there) - match, bool)  # of places that something follows
            for i, token in enumerate(ids[-match:]):
                found &= there[i : len(found) + i] == token
            if (places := np.flatnonzero(found)).size:
                begin = places[-1] + match
                own = there[begin : begin + count].tolist()
                return Draft(own, [f"prompt {min(match + i, PROMPT_MATCHES[0])}" for i in range(len(own))])
        return NO_DRAFT


class LookupDrafter:
    """The drafter of the module docstring: what was sampled first, then the prompt."""

    def __init__(self) -> None:
        self._index, self._prompt = SuffixIndex(), PromptLookup()

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        return [self._draft(run, count) for run in runs]

    def _draft(self, run: RunningRequest, count: int) -> Draft:
        tail = run.tail(MATCHES[0])
        draft = self._index.draft(tail, count)
        if draft.ids:
            return draft
        return self._prompt.draft(run.request.prompt_ids, tail, count)

    def observe(self, run: RunningRequest, new: int) -> None:
        self._index.add(run.tail(MATCHES[0] + new), new)
