"""Drafts for speculative decoding without a draft model: predictions of draws whose random numbers are known.

An id is drawn where the running sum of the probabilities, in order of ids, passes a random number u
in [0, 1) that seed and position fix. So what was drawn in the same context before, at other
numbers, tells what is drawn now::

    u       0        0.2       0.5  0.55        0.9        1
    drawn            cat            cat         dog
    u = 0.5 draws cat for certain; u = 0.7 draws cat or dog, whichever is probable enough to reach so far

Siblings of a group and earlier training steps sample the same contexts over and over.
:class:`SuffixIndex` finds them by their last ids (Oliaro et al. 2024, "SuffixDecoding") and
predicts ids that are anything but certain, where the most frequent continuation would be right no
more often than it is drawn. The same coupling with a draft model, in place of earlier draws, is in
Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
Where nothing is known, ids follow as in the request's own prompt (:func:`look_up`; Saxena 2023,
"Prompt Lookup Decoding"). Another :class:`Drafter`, such as a model's heads for multi-token
prediction, may take their place.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import jax
import numpy as np

from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.sampling import uniform

MATCHES = (32, 8, 4, 3, 2)
"""Numbers of ids before a position by which a :class:`SuffixIndex` finds it, the longest first."""
PROMPT_MATCHES = (4, 3, 2)
CHANCES = (0.3, 0.6, 0.9)
"""Bounds of the chance of a predicted id, for :attr:`Draft.evidence`."""
MAX_INDEXED_IDS = 1 << 16
"""At most 75 MB."""
_BYTES = 4  # of an id
_BLOCK = 64  # random numbers computed at a time


@dataclass(frozen=True, slots=True)
class Draft:
    """Ids that may follow a context.

    Attributes:
        ids: in order.
        evidence: for each id what it was drafted from, one of a few kinds, such as the length of
            the match and the chance of the prediction. How often ids of a kind are accepted is
            measured.
    """

    ids: list[int]
    evidence: list[str]


class Drafter(Protocol):
    """Proposes how running requests go on."""

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        """Return a draft of at most ``count`` ids for each request; none where nothing is known."""
        ...

    def observe(self, run: RunningRequest, new: int) -> None:
        """Learn from the last ``new`` ids of a request, which were sampled."""
        ...


class Draw(NamedTuple):
    """An id that was drawn, its random number, and its probability."""

    uniform: float
    token: int
    probability: float


class SuffixIndex:
    """The newest ``max_ids`` draws, by the last ids of their contexts.

    >>> index = SuffixIndex()
    >>> index.add([1, 2, 3, 4], [Draw(0.2, 3, 0.5), Draw(0.7, 4, 0.9)])
    >>> index.draft([9, 1, 2], [0.3, 0.8, 0.1]).ids
    [3, 4]
    """

    def __init__(self, max_ids: int = MAX_INDEXED_IDS) -> None:
        self._max_ids = max_ids
        self._following: dict[bytes, list[Draw]] = {}  # by random number
        self._parts: deque[tuple[bytes, Sequence[Draw]]] = (
            deque()
        )  # draws, and their ids with those before
        self._count = 0

    def __len__(self) -> int:
        """Return the number of contexts."""
        return len(self._following)

    def add(self, ids: Sequence[int], draws: Sequence[Draw]) -> None:
        """Add draws, whose ids are the last ones of ``ids``."""
        part = np.asarray(ids[-(MATCHES[0] + len(draws)) :], np.int32).tobytes()
        self._parts.append((part, draws))
        self._count += len(draws)
        for context, draw in _contexts(part, draws):
            bisect.insort(self._following.setdefault(context, []), draw)
        while self._count > self._max_ids:
            part, draws = self._parts.popleft()
            self._count -= len(draws)
            for context, draw in _contexts(part, draws):
                following = self._following[context]
                del following[bisect.bisect_left(following, draw)]
                if not following:
                    del self._following[context]

    def draft(self, ids: Sequence[int], uniforms: Sequence[float]) -> Draft:
        """Return an id for each random number, of the longest known suffix, as far as one is known."""
        context, draft = np.asarray(ids[-MATCHES[0] :], np.int32).tobytes(), Draft([], [])
        for number in uniforms:
            for match in MATCHES:
                following = self._following.get(context[-match * _BYTES :])
                if following is not None and match * _BYTES <= len(context):
                    break
            else:
                break
            token, chance = predict(following, number)
            draft.ids.append(token)
            draft.evidence.append(f"{match} {sum(chance >= bound for bound in CHANCES)}")
            context = context[-(MATCHES[0] - 1) * _BYTES :] + token.to_bytes(_BYTES, "little")
        return draft


def _contexts(part: bytes, draws: Sequence[Draw]) -> list[tuple[bytes, Draw]]:
    """Return each draw with each suffix of its context."""
    first = len(part) // _BYTES - len(draws)
    return [
        (part[(place - match) * _BYTES : place * _BYTES], draw)
        for place, draw in enumerate(draws, first)
        for match in MATCHES
        if match <= place
    ]


def predict(draws: Sequence[Draw], number: float) -> tuple[int, float]:
    """Return which id a random number draws, by other draws in the same context, and with what chance.

    Args:
        draws: ascending by random number, at least one.
        number: in [0, 1).
    """
    at = bisect.bisect_left(draws, (number,))
    below, above = draws[at - 1] if at else None, draws[at] if at < len(draws) else None
    if below is None or above is None:
        draw = below or above
        assert draw is not None
        return draw.token, _reach(draw, number, 0.0, 1.0)
    if below.token == above.token:
        return below.token, 1.0
    low, high = _reach(below, number, 0.0, above.uniform), _reach(above, number, below.uniform, 1.0)
    return (below.token, low) if low >= high else (above.token, high)


def _reach(draw: Draw, number: float, low: float, high: float) -> float:
    """Return the chance that a draw's id is drawn at ``number``, too.

    Its interval is as long as the id is probable, contains the draw's own number, and may lie
    anywhere in [low, high].
    """
    first, last = (
        max(low, draw.uniform - draw.probability),
        min(draw.uniform, high - draw.probability),
    )  # its beginning
    if last <= first:
        return float(first <= number < first + draw.probability)
    fitting = (
        last - max(first, number - draw.probability)
        if number > draw.uniform
        else min(last, number) - first
    )
    return max(0.0, fitting / (last - first))


def look_up(prompt: Sequence[int], ids: Sequence[int], count: int) -> Draft:
    """Draft what followed the last place in the prompt that ends with the context's last ids.

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
            return Draft(
                own, [f"prompt {min(match + i, PROMPT_MATCHES[0])}" for i in range(len(own))]
            )
    return Draft([], [])


class LookupDrafter:
    """The drafter of the module docstring: what was drawn first, then the prompt."""

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._uniform, self._device = jax.jit(uniform), _host()
        self._known: WeakKeyDictionary[RunningRequest, list[float]] = (
            WeakKeyDictionary()
        )  # of each id to sample
        self._block(0, 0)  # compile it

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        drafts = []
        for run in runs:
            tail, done = run.tail(MATCHES[0]), len(run.token_ids)
            draft = self._index.draft(tail, self._numbers(run, done, done + count))
            drafts.append(draft if draft.ids else look_up(run.request.prompt_ids, tail, count))
        return drafts

    def observe(self, run: RunningRequest, new: int) -> None:
        done = len(run.token_ids)
        numbers, chances = (
            self._numbers(run, done - new, done),
            map(math.exp, run.log_probs[done - new :]),
        )
        draws = [*map(Draw, numbers, run.token_ids[done - new :], chances)]
        self._index.add(run.tail(MATCHES[0] + new), draws)

    def _numbers(self, run: RunningRequest, begin: int, end: int) -> list[float]:
        """Return the random numbers of ids that a request samples."""
        known = self._known.setdefault(run, [])
        while len(known) < end:
            known += self._block(run.seed, len(run.request.prompt_ids) + len(known))
        return known[begin:end]

    def _block(self, seed: int, position: int) -> list[float]:
        positions = np.arange(position, position + _BLOCK, dtype=np.int32)
        with jax.default_device(self._device):
            return self._uniform(np.full(_BLOCK, seed, np.uint32), positions).tolist()


def _host() -> Any:
    """Return the processor, where no engine's program is waited for; None if ``JAX_PLATFORMS`` leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
