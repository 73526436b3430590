"""Speculative decoding that leaves what is sampled as it is, and stops where it does not pay.

A draft of d ids is verified by one forward pass over d + 1 positions. Every position draws an id
from the model's own distribution, with the random number that plain decoding uses there (seed and
position fix it). Drafted ids are accepted up to the first that differs from the draw, and that draw
follows them::

    context … the     draft   answer  is   4
    draws             answer  is      7    (any)      taken: answer, is, 7

So ids are those of plain decoding with the same seed, but for rounding, and log-probs are the
model's, whatever was drafted. A draft that knows nothing of the random numbers is rejection
sampling of a proposal that is certain of its ids: one of probability p is accepted with probability
p, and what replaces it is distributed as the rest. (Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model
Decoding with Speculative Sampling".) Ours know them (:mod:`~jax_agent_rl.jetstream.drafting`) and
do better.

A pass of more columns takes longer, so each dispatch takes as many drafted ids as promise the most
ids per second, or
none: by measured seconds of plain steps and of verifications, and by how often ids of each kind of
evidence were right. That is also measured while nothing is speculated. Where losses to time spent
on it exceed ``LOSS_SHARE``, even drafting pauses. Seconds of compilation never count.

Requests with restricted sampling take no part, nor does anyone beside them: a dispatch with one
decodes plainly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jax_agent_rl.jetstream.drafting import Draft, Drafter
from jax_agent_rl.jetstream.request import Counters, RunningRequest

if TYPE_CHECKING:
    from jax_agent_rl.jetstream.engine import JaxEngine


LOSS_SHARE = 0.01
"""Share of decoding that unsuccessful speculation may take."""
LOSS_SECONDS = 0.25
"""What it may take besides, at a time."""
REFRESH_PLAIN = 50
"""Verifications after which a plain step is measured again …"""
REFRESH_CLOSE = 10
"""… where they promise less than ``CLOSE`` times its ids per second, so that it costs little."""
CLOSE, LEAST_GAIN = 1.25, 1.05
"""The latter is what a verification has to promise: measured times are not exact."""
EXPIRY = 100
"""Dispatches after which a measured time is forgotten: other work may have slowed it down."""
GROWTH = 0.25
"""Seconds grow with this power of the columns, until they are measured: an optimistic guess, so
that they soon are."""


def accepted_ids(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many drafted ids are accepted, given the draws [len(draft) + 1] at their positions and the next."""
    return next((i for i, token in enumerate(draft) if token != drawn[i]), len(draft))


@dataclass(slots=True)
class _Pace:
    """Moving average of the seconds of a program, and the dispatch that measured it last."""

    seconds: float
    at: int


class Acceptance:
    """How often drafted ids were right, by kind of evidence; older ones count less."""

    _HALVED_AT = 256

    def __init__(self) -> None:
        self._right_of: dict[str, tuple[float, float]] = {}

    def rate(self, evidence: str) -> float:
        right, tested = self._right_of.get(evidence, (1.0, 2.0))
        return right / tested

    def learn(self, draft: Draft, sampled: Sequence[int]) -> None:
        """Compare a draft with the ids that followed."""
        for token, evidence, own in zip(draft.ids, draft.evidence, sampled, strict=False):
            right, tested = self._right_of.get(evidence, (1.0, 2.0))
            if tested > self._HALVED_AT:
                right, tested = right / 2, tested / 2
            self._right_of[evidence] = right + (token == own), tested + 1
            if token != own:
                return


class Speculation:
    """The choices of the module docstring.

    Args:
        engine: verifies drafts.
        drafter: proposes them.
        counters: count them.
        clock: seconds.
    """

    def __init__(
        self,
        engine: JaxEngine,
        drafter: Drafter,
        counters: Counters,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._drafter, self._counters, self._clock = engine, drafter, counters, clock
        self._acceptance = Acceptance()
        self._plain: dict[int, _Pace] = {}  # by slots
        self._verified: dict[int, _Pace] = {}  # by columns
        self._balance = LOSS_SECONDS
        self._dispatches = self._since_plain = 0
        self._gain = 1.0  # of the last choice over a plain step
        self.steps = 1  # of a plain dispatch: twice as many each time
        # The current dispatch:
        self._begin = self._drafting = self._compiling = 0.0
        self._running = self._slots = 0
        self._columns: int | None = None
        self._proposed: dict[RunningRequest, Draft] = {}
        self._verifying: dict[RunningRequest, list[int]] = {}

    def choose(self, runs: Sequence[RunningRequest]) -> Mapping[RunningRequest, list[int]] | None:
        """Return the ids to verify for each of all running requests; None to decode :attr:`steps` steps plainly."""
        self._begin, self._compiling = self._clock(), self._engine.table.compile_seconds
        self._running, self._slots, self._columns = len(runs), self._engine.width(len(runs)), None
        self._drafting, self._dispatches = 0.0, self._dispatches + 1
        self._proposed.clear()
        if any(run.request.sampling.restricted for run in runs) or self._balance < 0:
            self.steps = self._engine.shapes.decode_steps
            return None
        drafts = self._drafter.propose(runs, self._engine.shapes.num_speculative_tokens)
        self._proposed.update(zip(runs, drafts, strict=True))
        self._drafting = self._clock() - self._begin
        plain = self._pace(self._plain, self._slots)
        if plain is None or self._since_plain >= (
            REFRESH_CLOSE if self._gain < CLOSE else REFRESH_PLAIN
        ):
            self.steps = 1
            return None
        # Every drafted id with the probability that it is taken; that never rises along a draft.
        chances = sorted(
            (-chance, place, slot)
            for slot, (run, draft) in enumerate(zip(runs, drafts, strict=True))
            for place, chance in enumerate(self._chances(draft)[: run.remaining - 1])
        )
        self._columns = self._best_columns(plain, [-chance for chance, _, _ in chances])
        if self._columns is None:
            return None
        self._verifying = {run: [] for run in runs}
        for _, place, slot in chances[: self._columns - len(runs)]:
            self._verifying[runs[slot]].append(drafts[slot].ids[place])
        return self._verifying

    @property
    def most_columns(self) -> int | None:
        """The most columns that can verify drafts of the requests chosen for, if any."""
        return max(self._engine.verified_columns(self._running), default=None)

    def _best_columns(self, plain: float, chances: Sequence[float]) -> int | None:
        """Return the columns that promise the most ids per second, None if a plain step of so many seconds does."""
        gains = np.cumsum([0.0, *chances])
        alone = self._running / plain
        best, chosen, (smaller, seconds) = LEAST_GAIN * alone, None, (self._slots, plain)
        for columns in self._engine.verified_columns(self._running) if len(chances) else ():
            guess = seconds * max(1.0, columns / smaller) ** GROWTH
            smaller, seconds = columns, self._pace(self._verified, columns) or guess
            rate = (self._running + gains[min(columns - self._running, len(chances))]) / seconds
            if rate > best:
                best, chosen = rate, columns
        self._gain = best / alone
        return chosen

    def _chances(self, draft: Draft) -> np.ndarray:
        """Return the probability that each drafted id is taken, with all before it."""
        return np.cumprod([self._acceptance.rate(evidence) for evidence in draft.evidence])

    def took(self, run: RunningRequest, new: int) -> None:
        """Learn from the last ``new`` ids of a request."""
        if self._balance < 0:
            return
        begin = self._clock()
        if (draft := self._proposed.pop(run, None)) is not None:
            self._acceptance.learn(draft, run.token_ids[-new:])
        self._drafter.observe(run, new)
        self._drafting += self._clock() - begin

    def measure(self, counts: Sequence[int]) -> None:
        """Learn how long the dispatch took that was chosen last, and how many ids each request got from it."""
        seconds, verified = self._clock() - self._begin, self._columns is not None
        self._since_plain = self._since_plain + 1 if verified else 0
        self.steps = 1 if verified else min(2 * self.steps, self._engine.shapes.decode_steps)
        if verified:
            drafts = self._verifying.values()
            self._counters.drafts += sum(map(bool, drafts))
            self._counters.draft_tokens += sum(map(len, drafts))
            self._counters.accepted_tokens += sum(counts) - len(counts)
        if self._engine.table.compile_seconds > self._compiling or not counts:
            return
        lost, plain = self._drafting, self._pace(self._plain, self._slots)
        if self._columns is None:
            self._learn(self._plain, self._slots, seconds / max(counts))
        else:
            self._learn(self._verified, self._columns, seconds)
            lost = seconds - sum(counts) * plain / self._running if plain else 0.0
        self._balance = min(self._balance + LOSS_SHARE * seconds - lost, LOSS_SECONDS)

    def _learn(self, paces: dict[int, _Pace], key: int, seconds: float) -> None:
        old = self._pace(paces, key)
        paces[key] = _Pace(
            seconds if old is None else old + 0.2 * (seconds - old), self._dispatches
        )

    def _pace(self, paces: dict[int, _Pace], key: int) -> float | None:
        pace = paces.get(key)
        return pace.seconds if pace is not None and self._dispatches - pace.at <= EXPIRY else None
