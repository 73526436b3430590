"""Speculative decoding that leaves what is sampled as it is, and stops where it does not pay.

A draft of d ids is verified by one forward pass over d + 1 positions. Every position draws an id
from the model's own distribution, with the random number that plain decoding uses there (seed and
position fix it). Drafted ids are accepted up to the first that differs from the draw, and that draw
follows them::

    context … the     draft   answer  is   4
    draws             answer  is      7    (any)      taken: answer, is, 7

So ids are as in plain decoding with the same seed, but for rounding, and log-probs are the
model's, whatever was drafted. A draft that knows nothing of the random numbers is rejection
sampling of a proposal that is certain of its ids: one of probability p is accepted with probability
p, and what replaces it is distributed as the rest. (Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model
Decoding with Speculative Sampling".) Ours know them (:mod:`~jax_agent_rl.jetstream.drafting`) and
do better.

A pass of more columns takes longer, so each dispatch takes as many drafted ids as promise the most
ids per second, or none: by measured seconds of plain steps and of verifications, and by how often
ids of each kind of evidence were right. That is also measured while nothing is speculated. Where
losses to time spent on it exceed ``LOSS_SHARE``, even drafting pauses. Seconds of compilation never
count.

A dispatch in which a request has restricted sampling decodes plainly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jax_agent_rl.jetstream.drafting import Draft, Drafter
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.request import Counters, RunningRequest

LOSS_SHARE = 0.01
"""Share of decoding that unsuccessful speculation may take."""
LOSS_SECONDS = 0.25
"""What it may take besides, at a time."""
REFRESH_PLAIN = 50
"""Verifications after which a plain step is measured again …"""
REFRESH_CLOSE = 10
"""… where they promise less than ``CLOSE`` times its ids per second, so that it costs little."""
CLOSE = 1.25
LEAST_GAIN = 1.05
"""Times the ids per second of a plain step that a verification must promise: measured times are
not exact."""
EXPIRY = 100
"""Dispatches after which a measured time is forgotten: other work may have slowed it down."""
GROWTH = 0.25
"""Seconds grow at least with this power of the columns, until they are measured: an optimistic
guess, so that they soon are. Beyond columns that were measured they grow as from the next fewer
ones to these, so that programs that cannot pay are not even compiled."""


@dataclass(slots=True)
class _Pace:
    """Moving average of the seconds of a program, and the dispatch that measured it last."""

    seconds: float
    dispatch: int


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
        for token, evidence, sampled_token in zip(draft.ids, draft.evidence, sampled, strict=False):
            right, tested = self._right_of.get(evidence, (1.0, 2.0))
            if tested > self._HALVED_AT:
                right /= 2
                tested /= 2
            tested += 1
            if token == sampled_token:
                right += 1
            self._right_of[evidence] = (right, tested)
            if token != sampled_token:  # what follows was drafted in another context
                return


class Speculation:
    """The choices of the module docstring.

    Args:
        counters: count the drafts and their accepted ids.
        clock: seconds.
    """

    def __init__(
        self,
        engine: JaxEngine,
        drafter: Drafter,
        counters: Counters,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._drafter = drafter
        self._counters = counters
        self._clock = clock
        self._acceptance = Acceptance()
        self._plain: dict[int, _Pace] = {}  # by slots
        self._verified: dict[int, _Pace] = {}  # by columns
        self._balance = LOSS_SECONDS  # seconds that speculation may still lose
        self._dispatches = 0
        self._since_plain = 0  # verifications since the last plain step
        self._gain = 1.0  # of the last choice over a plain step
        self.steps = 1  # of a plain dispatch: twice as many each time

        # The current dispatch:
        self._begin = 0.0
        self._drafting = 0.0  # seconds
        self._compiling = 0.0  # seconds of compilation before it
        self._running = 0
        self._slots = 0
        self._columns: int | None = None
        self._proposed: dict[RunningRequest, Draft] = {}
        self._verifying: dict[RunningRequest, list[int]] = {}

    def choose(self, runs: Sequence[RunningRequest]) -> Mapping[RunningRequest, list[int]] | None:
        """Return the ids to verify for each of all running requests.

        None decodes plainly, :attr:`steps` steps.
        """
        self._begin = self._clock()
        self._compiling = self._engine.program_table.compile_seconds
        self._running = len(runs)
        self._slots = self._engine.width(len(runs))
        self._columns = None
        self._drafting = 0.0
        self._dispatches += 1
        self._proposed.clear()
        if any(run.request.sampling.restricted for run in runs) or self._balance < 0:
            self.steps = self._engine.shapes.decode_steps
            return None

        drafts = self._drafter.propose(runs, self._engine.shapes.num_speculative_tokens)
        self._proposed.update(zip(runs, drafts, strict=True))
        self._drafting = self._clock() - self._begin

        # Measure plain steps again from time to time.
        plain_seconds = self._pace(self._plain, self._slots)
        refresh_after = REFRESH_CLOSE if self._gain < CLOSE else REFRESH_PLAIN
        if plain_seconds is None or self._since_plain >= refresh_after:
            self.steps = 1
            return None

        # Every drafted id with the probability that it is accepted, the most probable first. As
        # that never rises along a draft, the first ones of this list are beginnings of drafts.
        candidates = []
        for slot, (run, draft) in enumerate(zip(runs, drafts, strict=True)):
            for index, chance in enumerate(self._chances(draft)[: run.remaining - 1]):
                candidates.append((-chance, index, slot))
        candidates.sort()

        chances = [-negative_chance for negative_chance, _, _ in candidates]
        self._columns = self.best_columns(plain_seconds, chances)
        if self._columns is None:
            return None
        self._verifying = {run: [] for run in runs}
        for _, index, slot in candidates[: self._columns - len(runs)]:
            self._verifying[runs[slot]].append(drafts[slot].ids[index])
        return self._verifying

    @property
    def most_columns(self) -> int | None:
        """The most columns with which drafts of the running requests can be verified, if any."""
        return max(self._engine.verified_columns(self._running), default=None)

    def best_columns(self, plain_seconds: float, chances: Sequence[float]) -> int | None:
        """Return the columns that promise the most ids per second, None if a plain step does.

        Args:
            plain_seconds: seconds of a plain step.
            chances: probability that each drafted id is accepted, the highest first.
        """
        # Ids gained by verifying the first n drafted ids.
        gains = np.cumsum([0.0, *chances])

        plain_rate = self._running / plain_seconds
        best_rate = LEAST_GAIN * plain_rate
        best_columns = None

        if len(chances):
            previous_columns = self._slots
            previous_seconds = plain_seconds
            growth = GROWTH
            for columns in self._engine.verified_columns(self._running):
                times_columns = max(1.0, columns / previous_columns)
                seconds = self._pace(self._verified, columns)
                if not seconds:  # never measured: estimated from the next smaller number
                    seconds = previous_seconds * times_columns**growth
                elif times_columns > 1:
                    times_seconds = seconds / previous_seconds
                    growth = max(GROWTH, math.log(times_seconds) / math.log(times_columns))

                drafted = min(columns - self._running, len(chances))
                rate = (self._running + gains[drafted]) / seconds
                if rate > best_rate:
                    best_rate = rate
                    best_columns = columns

                previous_columns = columns
                previous_seconds = seconds

        self._gain = best_rate / plain_rate
        return best_columns

    def _chances(self, draft: Draft) -> np.ndarray:
        """Return the probability that each drafted id is accepted, with all before it."""
        return np.cumprod([self._acceptance.rate(evidence) for evidence in draft.evidence])

    def observe(self, run: RunningRequest, new: int) -> None:
        """Learn from the last ``new`` ids of a request."""
        if self._balance < 0:
            return
        begin = self._clock()
        draft = self._proposed.pop(run, None)
        if draft is not None:
            self._acceptance.learn(draft, run.token_ids[-new:])
        self._drafter.observe(run, new)
        self._drafting += self._clock() - begin

    def measure(self, counts: Sequence[int]) -> None:
        """Learn how long the chosen dispatch took.

        Args:
            counts: how many ids each request got from it.
        """
        seconds = self._clock() - self._begin
        if self._columns is None:
            self._since_plain = 0
            self.steps = min(2 * self.steps, self._engine.shapes.decode_steps)
        else:
            self._since_plain += 1
            self.steps = 1
            for draft in self._verifying.values():
                if draft:
                    self._counters.drafts += 1
                self._counters.draft_tokens += len(draft)
            self._counters.accepted_tokens += sum(counts) - len(counts)
        if self._engine.program_table.compile_seconds > self._compiling or not counts:
            return

        plain_seconds = self._pace(self._plain, self._slots)
        if self._columns is None:
            self._learn(self._plain, self._slots, seconds / max(counts))
            lost_seconds = self._drafting
        else:
            self._learn(self._verified, self._columns, seconds)
            # Against the plain steps that would have sampled as many ids.
            lost_seconds = 0.0
            if plain_seconds:
                lost_seconds = seconds - sum(counts) * plain_seconds / self._running
        self._balance = min(self._balance + LOSS_SHARE * seconds - lost_seconds, LOSS_SECONDS)

    def _learn(self, paces: dict[int, _Pace], key: int, seconds: float) -> None:
        previous = self._pace(paces, key)
        if previous is not None:
            seconds = previous + 0.2 * (seconds - previous)
        paces[key] = _Pace(seconds, self._dispatches)

    def _pace(self, paces: dict[int, _Pace], key: int) -> float | None:
        """Return the seconds of a program; None if they were not measured of late."""
        pace = paces.get(key)
        if pace is None or self._dispatches - pace.dispatch > EXPIRY:
            return None
        return pace.seconds
