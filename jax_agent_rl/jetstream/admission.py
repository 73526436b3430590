"""Admission of requests: its copies and prefills, what they cost, and whose KV is worth keeping.

Keeping a waiting session's KV is a bet: memory is spent until the session returns, and what is won
is that nothing is computed again. With ``T`` the time of return of a session that has waited ``w``
seconds, the best bet on it pays

    rate(w) = max over h of  P(T <= w + h | T > w) / E[min(T, w + h) - w | T > w]

returns per second of keeping: its Gittins index (Gittins 1979, "Bandit Processes and Dynamic
Allocation Indices"). It rises while a session waits if tools take about the same time in every
call, and falls if a few calls take very long. The distribution is of recent waits; since the
next call of a session often takes about as long as its last one, waits are told apart by the length
of the wait before them. One more wait that never ends stands for sessions that do not come back. A
few samples say nothing of a short time, so ``h`` spans at least an eighth of ``w`` and of the
returns.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jax_agent_rl.jetstream.block_manager import Allocation
from jax_agent_rl.jetstream.decode_batch import Extension
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.models.vision_context import MultimodalContext


class Patience:
    """How long the first request in the queue waits for pages that sessions will need again.

    Computing the ids of a prompt stalls all running requests, which costs seconds of each slot. For
    as many seconds a slot may stay empty to keep the KV of a waiting session, and the first request
    in the queue may wait while others, whose KV is in the cache, overtake it.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Of recent prefills.
        self._ids = 0.0
        self._seconds = 0.0
        # The first request in the queue, and since when it is the first.
        self._first: Hashable = None
        self._first_since = 0.0

    def add_prefill(self, ids: int, seconds: float) -> None:
        """Learn the speed of prefills; older ones count less."""
        self._ids = 0.9 * self._ids + ids
        self._seconds = 0.9 * self._seconds + seconds

    def cost(self, first: Hashable, count: int, running: int) -> float:
        """Return what computing an id costs, in seconds of a slot.

        It is 0 once the first request has waited long enough.

        Args:
            first: identifies the first request in the queue.
            count: ids of its context.
            running: requests that a prefill stalls.
        """
        if self._first is None or self._first != first:
            self._first = first
            self._first_since = self._clock()
        if not self._ids:
            return 0.0
        cost = running * self._seconds / self._ids
        waited = self._clock() - self._first_since
        return cost if waited < count * cost else 0.0


Checkpoints = tuple[tuple[int, int], ...]
"""Positions after which a context's state is copied, and the slots it is copied to."""
Storage = tuple[Literal["page", "state"], int]
"""A page, or the slot of a recurrent state, by its number."""


@dataclass
class AdmissionStage:
    """Operations of a stage, in order.

    Attributes:
        copies: source and target pages.
        state_copies: source and target slots of recurrent states.
        restored: contents of host pages, and the pages they are written to.
        restored_states: contents of host slots, and the slots they are written to.
        prefills: prefills, which run together, and the checkpoints they leave.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[KVCache, list[int]]] = field(default_factory=list)
    restored_states: list[tuple[Any, int]] = field(default_factory=list)
    prefills: list[tuple[Extension, Checkpoints]] = field(default_factory=list)

    def run(self, engine: JaxEngine, params: EngineParams, cache: KVCache) -> KVCache:
        """Run the operations on an engine; ``cache`` is donated."""
        for source, target in self.copies:
            cache = engine.copy_page(cache, source, target)
        for source, target in self.state_copies:
            cache = engine.copy_state(cache, source, target)
        for content, pages in self.restored:
            cache = engine.put_pages(cache, content, pages)
        for content, slot in self.restored_states:
            cache = engine.put_state(cache, content, slot)

        # Up to the next checkpoint of each, then up to the one after it.
        remaining = self.prefills
        while remaining:
            extensions: list[Extension] = []
            checkpoint_copies: list[tuple[int, int]] = []
            following: list[tuple[Extension, Checkpoints]] = []
            for extension, checkpoints in remaining:
                if not checkpoints:
                    extensions.append(extension)
                    continue
                position, slot = checkpoints[0]
                extensions.append(extension.until(position))
                checkpoint_copies.append((extension.state, slot))
                after_checkpoint = extension.after(position - extension.start)
                following.append((after_checkpoint, checkpoints[1:]))

            cache = engine.extend(params, cache, extensions)
            for source, target in checkpoint_copies:
                cache = engine.copy_state(cache, source, target)
            remaining = following
        return cache


class AdmissionPlan:
    """Copies and prefills of one round of admissions, in stages whose prefills run together.

    Within a stage copies come first, in planned order, then what comes from the host. A page or a
    slot of a recurrent state is reused or copied in a stage after the one that fills it, and not
    written before the stage that copies from it.

    Args:
        size: positions of a page.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._stages: list[AdmissionStage] = []
        # Numbers of the last stage that writes a page or a slot, and of the last that copies it.
        self._last_write: dict[Storage, int] = {}
        self._last_read: dict[Storage, int] = {}

    def add(
        self,
        allocation: Allocation,
        new_ids: np.ndarray,
        multimodal: MultimodalContext | None = None,
        adapter: int = 0,
        restored: KVCache | None = None,
        restored_state: Any = None,
    ) -> None:
        """Plan one admission: optional copies, what comes from the host, then a prefill.

        Args:
            allocation: pages of the context, what is copied to them and what they hold already.
            new_ids: int32, the ids after the reused ones.
            multimodal: the whole context, if it has images.
            adapter: number of the LoRA adapter, 0 for the base model.
            restored: content of ``allocation.restored``.
            restored_state: content of ``allocation.state.host_source``.
        """
        restored_pages = [page for _, page in allocation.restored]
        stage = self._stage_of(allocation, restored_pages)
        if allocation.copy is not None:
            stage.copies.append(allocation.copy)
        if restored is not None:
            stage.restored.append((restored, restored_pages))

        extension = Extension(allocation.pages, allocation.reused, new_ids, multimodal, adapter)
        checkpoints: Checkpoints = ()
        state = allocation.state
        if state is not None:
            extension = replace(extension, state=state.slot)
            checkpoints = state.checkpoints
            if state.source is None:
                stage.restored_states.append((restored_state, state.slot))
            else:
                stage.state_copies.append((state.source, state.slot))

        stage.prefills.append((extension, checkpoints))

    def _stage_of(self, allocation: Allocation, restored_pages: Sequence[int]) -> AdmissionStage:
        """Return the first stage that an admission can be in, and record what it uses there."""
        num_reused_pages = allocation.reused // self._size
        reused: list[Storage] = []
        for page in allocation.pages[:num_reused_pages]:
            reused.append(("page", page))
        writes: list[Storage] = []
        for page in (*restored_pages, *allocation.pages[num_reused_pages:]):
            writes.append(("page", page))
        copy_sources: list[Storage] = []
        if allocation.copy is not None:
            copy_sources.append(("page", allocation.copy[0]))
        state = allocation.state
        if state is not None:
            writes.append(("state", state.slot))
            for _, slot in state.checkpoints:
                writes.append(("state", slot))
            if state.source is not None:
                copy_sources.append(("state", state.source))

        # What is reused or copied has been filled by an earlier stage; and what is written has been
        # read by then, for copies come first within a stage.
        number = 0
        for storage in (*reused, *copy_sources):
            number = max(number, self._last_write.get(storage, -1) + 1)
        for storage in writes:
            number = max(number, self._last_read.get(storage, 0))

        for storage in copy_sources:
            self._last_read[storage] = max(number, self._last_read.get(storage, 0))
        for storage in writes:
            self._last_write[storage] = number
        while len(self._stages) <= number:
            self._stages.append(AdmissionStage())
        return self._stages[number]

    def run(self, engine: JaxEngine, params: EngineParams, cache: KVCache) -> KVCache:
        """Run all stages on an engine; ``cache`` is donated."""
        for stage in self._stages:
            cache = stage.run(engine, params, cache)
        return cache


RECENT_WAITS = 128
MIN_WAITS = 8
"""Fewer waits of a kind say less than the waits of all kinds."""
MIN_HORIZON = 1 / 8
MAX_SESSIONS = 1 << 14
"""Sessions remembered; those that never come back and never end would otherwise add up."""
STEPS_PER_DOUBLING = 8
"""Resolution of the time a session has waited."""


class RecentWaits:
    """The latest waits of a kind."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=RECENT_WAITS)
        self._sorted = np.zeros(0)
        self._rates: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, seconds: float) -> None:
        self._waits.append(seconds)
        self._sorted = np.sort(np.array(self._waits))
        self._rates.clear()

    def rate(self, waited: float) -> float:
        """Return the index of the module docstring, to the resolution of ``waited``."""
        step = math.floor(STEPS_PER_DOUBLING * math.log2(max(waited, 1e-3)))
        if step not in self._rates:
            self._rates[step] = self._index(2 ** (step / STEPS_PER_DOUBLING))
        return self._rates[step]

    def _index(self, waited: float) -> float:
        """Return the index; past the longest wait, as if one more session took as long again."""
        num_shorter = bisect.bisect_right(self._sorted, waited)
        remaining = self._sorted[num_shorter:] - waited
        if not len(remaining):
            return 1 / ((len(self._waits) + 1) * waited)

        shortest = math.ceil(MIN_HORIZON * len(remaining)) - 1
        horizons = np.maximum(remaining, MIN_HORIZON * waited)[shortest:]
        returns = np.searchsorted(remaining, horizons, side="right")
        # Seconds until the returns within each horizon; the others, and one wait that never ends,
        # last as long as the horizon.
        returned_seconds = np.cumsum(remaining)[returns - 1]
        spent = returned_seconds + (len(remaining) + 1 - returns) * horizons
        return float(np.max(returns / spent))


@dataclass(slots=True)
class _Session:
    waits_since: float | None = None  # None while it is queued or runs
    previous_wait: float | None = None  # seconds


class ReturnTimes:
    """Records when sessions leave for their tools and return, to estimate when waiting ones will.

    Args:
        clock: seconds.

    Attributes:
        sessions: known sessions, the latest last.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.sessions: dict[str, _Session] = {}
        self._all = RecentWaits()
        self._kinds: dict[int | None, RecentWaits] = {}

    def leave(self, session: str) -> None:
        """Begin to wait: the session's request ended and another one will come."""
        self._latest(session).waits_since = self._clock()

    def come_back(self, session: str) -> None:
        """End the wait of a session, if it had begun: its next request is here."""
        known = self._latest(session)
        if known.waits_since is None:
            return
        wait = self._clock() - known.waits_since
        self._all.add(wait)
        self._kinds.setdefault(_kind(known.previous_wait), RecentWaits()).add(wait)
        known.waits_since = None
        known.previous_wait = wait

    def forget(self, session: str) -> None:
        """Drop a session of which no further request is expected."""
        self.sessions.pop(session, None)

    def rate(self, session: str) -> float:
        """Return the returns per second of keeping this session's KV.

        It is infinite for a session whose next request is queued, and 0 for an unknown one or while
        there is nothing to learn from.
        """
        known = self.sessions.get(session)
        if known is None:
            return 0.0
        if known.waits_since is None:
            return math.inf

        waits = self._kinds.get(_kind(known.previous_wait), self._all)
        if len(waits) < MIN_WAITS:
            waits = self._all
        if len(waits) < MIN_WAITS:
            return 0.0
        return waits.rate(self._clock() - known.waits_since)

    def _latest(self, session: str) -> _Session:
        """Return a session, which is now the latest; the oldest is forgotten if there are many."""
        known = self.sessions.pop(session, None)
        if known is None:
            known = _Session()
        self.sessions[session] = known
        if len(self.sessions) > MAX_SESSIONS:
            oldest = next(iter(self.sessions))
            del self.sessions[oldest]
        return known


def _kind(previous_wait: float | None) -> int | None:
    """Tell waits apart by the wait before them, to a factor of four."""
    if previous_wait is None:
        return None
    return round(math.log2(max(previous_wait, 1e-3)) / 2)
