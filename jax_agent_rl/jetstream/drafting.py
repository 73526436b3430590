"""Drafts for speculative decoding without a draft model.

They are predictions of draws whose random numbers are known.

An id is drawn where the running sum of the probabilities, in order of ids, passes a random number u
in [0, 1) that seed and position fix. So what was drawn in the same context before, at other
numbers, tells what is drawn now::

    u       0        0.2       0.5  0.55        0.9        1
    drawn            cat            cat         dog
    u = 0.5 draws cat for certain
    u = 0.7 draws cat or dog, whichever is probable enough to reach so far

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
        # Draws, and their ids with those before.
        self._parts: deque[tuple[bytes, Sequence[Draw]]] = deque()
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
        """Return an id for each random number, as far as a suffix of the context is known."""
        context = _context_of(ids)
        draft = Draft([], [])
        for number in uniforms:
            match, following = self._longest_match(context)
            if not following:
                break
            token, chance = predict(following, number)
            confidence = sum(1 for bound in CHANCES if chance >= bound)
            draft.ids.append(token)
            draft.evidence.append(f"{match} {confidence}")
            context = context[-(MATCHES[0] - 1) * _BYTES :] + token.to_bytes(_BYTES, "little")
        return draft

    def draws_after(self, ids: Sequence[int]) -> list[Draw]:
        """Return the draws after the longest known suffix of a context, by random number."""
        _, following = self._longest_match(_context_of(ids))
        return following

    def _longest_match(self, context: bytes) -> tuple[int, list[Draw]]:
        """Return the length of the longest known suffix and the draws after it, if any."""
        for match in MATCHES:
            following = self._following.get(context[-match * _BYTES :])
            if following is not None and match * _BYTES <= len(context):
                return match, following
        return 0, []


def _context_of(ids: Sequence[int]) -> bytes:
    """Return the end of a context, as far as it is matched."""
    return np.asarray(ids[-MATCHES[0] :], np.int32).tobytes()


def _contexts(part: bytes, draws: Sequence[Draw]) -> list[tuple[bytes, Draw]]:
    """Return each draw with each suffix of its context."""
    first = len(part) // _BYTES - len(draws)
    contexts = []
    for position, draw in enumerate(draws, first):
        for match in MATCHES:
            if match <= position:
                suffix = part[(position - match) * _BYTES : position * _BYTES]
                contexts.append((suffix, draw))
    return contexts


def predict(draws: Sequence[Draw], number: float) -> tuple[int, float]:
    """Predict which id a random number draws, by other draws in the same context.

    Args:
        draws: ascending by random number, at least one.
        number: in [0, 1).

    Returns:
        The id, and its chance.
    """
    index = bisect.bisect_left(draws, (number,))
    if index == 0:
        above = draws[0]
        return above.token, _reach(above, number, 0.0, 1.0)
    if index == len(draws):
        below = draws[-1]
        return below.token, _reach(below, number, 0.0, 1.0)

    below = draws[index - 1]
    above = draws[index]
    if below.token == above.token:
        return below.token, 1.0
    below_chance = _reach(below, number, 0.0, above.uniform)
    above_chance = _reach(above, number, below.uniform, 1.0)
    if below_chance >= above_chance:
        return below.token, below_chance
    return above.token, above_chance


def _reach(draw: Draw, number: float, low: float, high: float) -> float:
    """Return the chance that ``number`` draws the id of a draw.

    The id's interval is as long as the id is probable, contains the draw's own number, and may lie
    anywhere in [low, high].
    """
    # Where the interval may begin.
    first_begin = max(low, draw.uniform - draw.probability)
    last_begin = min(draw.uniform, high - draw.probability)
    if last_begin <= first_begin:
        return float(first_begin <= number < first_begin + draw.probability)
    # Beginnings whose interval contains the number.
    if number > draw.uniform:
        fitting = last_begin - max(first_begin, number - draw.probability)
    else:
        fitting = min(last_begin, number) - first_begin
    return max(0.0, fitting / (last_begin - first_begin))


def look_up(prompt: Sequence[int], ids: Sequence[int], count: int) -> Draft:
    """Draft what followed the last place in the prompt that ends with the context's last ids.

    Args:
        prompt: where to look.
        ids: the context, which begins with the prompt.
        count: most ids to draft.
    """
    prompt_ids = np.asarray(prompt, np.int32)
    for match in PROMPT_MATCHES:
        if match >= len(prompt_ids):
            continue
        # Whether the last ids are found at each place of the prompt that something follows.
        matches = np.ones(len(prompt_ids) - match, bool)
        for i, token in enumerate(ids[-match:]):
            matches &= prompt_ids[i : len(matches) + i] == token
        begins = np.flatnonzero(matches)
        if begins.size:
            begin = begins[-1] + match
            drafted = prompt_ids[begin : begin + count].tolist()
            # Each drafted id lengthens the match of the next.
            evidence = [f"prompt {min(match + i, PROMPT_MATCHES[0])}" for i in range(len(drafted))]
            return Draft(drafted, evidence)
    return Draft([], [])


class LookupDrafter:
    """The drafter of the module docstring: what was drawn first, then the prompt.

    Attributes:
        index: what requests have drawn.
    """

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self._uniform = jax.jit(uniform)
        self._device = _host()
        # The random numbers of each id to sample, as far as they were computed.
        self._uniforms: WeakKeyDictionary[RunningRequest, list[float]] = WeakKeyDictionary()
        self._block(0, 0)  # compile it

    def propose(self, runs: Sequence[RunningRequest], count: int) -> list[Draft]:
        drafts = []
        for run in runs:
            tail = run.tail(MATCHES[0])
            begin = len(run.token_ids)
            draft = self.index.draft(tail, self._numbers(run, begin, begin + count))
            if not draft.ids:
                draft = look_up(run.request.prompt_ids, tail, count)
            drafts.append(draft)
        return drafts

    def observe(self, run: RunningRequest, new: int) -> None:
        end = len(run.token_ids)
        begin = end - new
        numbers = self._numbers(run, begin, end)
        chances = map(math.exp, run.log_probs[begin:])
        draws = [*map(Draw, numbers, run.token_ids[begin:], chances)]
        self.index.add(run.tail(MATCHES[0] + new), draws)

    def _numbers(self, run: RunningRequest, begin: int, end: int) -> list[float]:
        """Return the random numbers of ids that a request samples."""
        numbers = self._uniforms.setdefault(run, [])
        while len(numbers) < end:
            numbers += self._block(run.seed, len(run.request.prompt_ids) + len(numbers))
        return numbers[begin:end]

    def _block(self, seed: int, position: int) -> list[float]:
        """Return the random numbers of a block of positions."""
        positions = np.arange(position, position + _BLOCK, dtype=np.int32)
        with jax.default_device(self._device):
            return self._uniform(np.full(_BLOCK, seed, np.uint32), positions).tolist()


def _host() -> Any:
    """Return the processor, where no engine's program is waited for.

    None if ``JAX_PLATFORMS`` leaves it out.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
