"""Continuous batching over the slots of an external engine.

::

    submit ──► waiting ──admit──► running ──generate──► finished
                 ▲   prefill (first id), insert in a slot   │  ids, log-probs, versions
                 └── until a slot is free and all running   └─ slot freed
                     requests sample the same way

The engine samples all slots in the same mode, so greedy and random requests take turns: a request of the other mode
waits until the running ones end, and none overtakes it. The engine knows neither stop ids nor budgets: a dispatch runs
as many steps as the smallest remaining budget, and ids after a stop are dropped here.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np

from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.external_engine import ExternalEngineAdapter, read_results
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.models.vision.context import MultimodalContext
from jax_agent_rl.rollout.protocol import BackendMetrics, GenerateRequest, TokenChunk

Progress = list[tuple[RunningRequest, TokenChunk]]


class SlotTable:
    """The ids each slot holds; released slots keep nothing.

    >>> table = SlotTable(2)
    >>> table.take(np.array([5, 6])), table.take(np.array([7])), table.take(np.array([8]))
    (0, 1, None)
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots))
        self._ids: dict[int, list[int]] = {}

    def take(self, ids: np.ndarray) -> int | None:
        """Take a free slot for a context that begins with these ids; None while there is none."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._ids[slot] = ids.tolist()
        return slot

    def append(self, slot: int, ids: Sequence[int]) -> None:
        """Append ids to a slot's context."""
        self._ids[slot] += ids

    def ids(self, slot: int) -> np.ndarray:
        """Return the context without the id that is fed next, int32."""
        return np.asarray(self._ids[slot], np.int32)

    @property
    def used_share(self) -> float:
        """Share of slots taken, in [0, 1]."""
        return len(self._ids) / self._slots

    def release(self, slot: int, *, session_ends: bool) -> None:
        """Free a slot whose request has ended."""
        del self._ids[slot]
        heapq.heappush(self._free, slot)

    def reset(self) -> None:
        """Do nothing: there is no cached KV."""


@dataclass
class ExternalScheduler(Scheduler):
    """A :class:`Scheduler` over an external engine; ``cache`` is its decode state."""

    engine: ExternalEngineAdapter

    def __post_init__(self) -> None:
        super().__post_init__()
        self._key = jax.random.key(self.seed)

    def _make_table(self) -> SlotTable:
        return SlotTable(self.engine.max_concurrent_decodes)

    def submit(self, request: GenerateRequest, multimodal: MultimodalContext | None = None) -> RunningRequest:
        """Queue a request as :meth:`Scheduler.submit` does.

        Raises:
            BackendError: also if the engine cannot report log-probs of such sampling.
        """
        sampling, name = request.sampling, f"request {request.request_id!r}"
        if sampling.temperature not in (0, 1) or (sampling.temperature and (sampling.top_p < 1 or sampling.top_k)):
            raise BackendError(
                f"{name}: temperature={sampling.temperature}, top_p={sampling.top_p}, top_k={sampling.top_k}, but this "
                "engine's log-probs are of the raw logits: set temperature to 1 (or 0), top_p to 1 and top_k to 0"
            )
        if sampling.temperature == 0 and not self.engine.can_be_greedy:
            raise BackendError(f"{name}: temperature=0, but this external engine has no greedy mode")
        most = min(sampling.max_tokens, self.engine.shapes.max_model_len - len(request.prompt_ids))
        if most > self.engine.max_new_tokens:
            raise BackendError(
                f"{name} may sample {most} ids, but a slot holds {self.engine.max_new_tokens} after its prompt; lower "
                "agent.max_response_length, or build the engine for more (MaxText: max_target_length - "
                "max_prefill_predict_length)"
            )
        return super().submit(request, multimodal)

    def step(self, *, admit: bool = True) -> Progress:
        """Admit requests if ``admit``, decode up to ``decode_steps`` ids, and return the new ids of every request."""
        begin = time.perf_counter()
        progress = self._admit_slots() if admit else []
        self.counters.prefill_seconds += time.perf_counter() - begin
        if self.running:
            progress += self._decode()
        self.counters.busy_seconds += time.perf_counter() - begin
        return progress

    def metrics(self) -> BackendMetrics:
        """Return metrics without recompilations, which external engines do not count."""
        return BackendMetrics(**vars(self.counters))

    # --- admission --------------------------------------------------------------------------------------------

    def _admit_slots(self) -> Progress:
        """Prefill the requests that fit; all are dispatched before the first result is read."""
        runs: list[RunningRequest] = []
        results = []
        while self._waiting and len(self.running) < self.engine.max_concurrent_decodes:
            run = self._waiting[0][1]
            if any(_is_greedy(other) != _is_greedy(run) for other in self.running.values()):
                break
            heapq.heappop(self._waiting)
            results.append(self._prefill(run))
            runs.append(run)
        first = read_results(results) if results else []
        return self._accepted((run, ids[:1], logs[:1]) for run, (ids, logs) in zip(runs, first, strict=True))

    def _prefill(self, run: RunningRequest) -> object:
        prompt = np.asarray(run.request.prompt_ids, np.int32)
        slot = cast(SlotTable, self.table).take(prompt[:-1])
        assert slot is not None  # fewer requests run than there are slots
        run.context = slot
        self.running[run.request.request_id] = run
        prefix, result = self.engine.prefill(self.params, prompt, self._next_key(), greedy=_is_greedy(run))
        self.cache = self.engine.insert(prefix, self.cache, slot)
        self.counters.prefill_tokens += len(prompt)
        return result

    # --- decoding ---------------------------------------------------------------------------------------------

    def _decode(self) -> Progress:
        runs = list(self.running.values())
        most = 1 if self._waiting else self.engine.shapes.decode_steps
        results = []
        for _ in range(min(most, *(run.remaining for run in runs))):
            self.cache, result = self.engine.generate(
                self.params, self.cache, self._next_key(), greedy=_is_greedy(runs[0])
            )
            results.append(result)
        self.counters.slot_steps += len(results) * self.engine.max_concurrent_decodes
        steps = read_results(results)
        ids, logs = (np.stack(column) for column in zip(*steps, strict=True))  # [steps, slots]
        return self._accepted((run, ids[:, run.context], logs[:, run.context]) for run in runs)

    def _accepted(self, news) -> Progress:
        return [(run, chunk) for run, ids, logs in news if (chunk := self._take(run, ids, logs)) is not None]

    def _finish(self, run: RunningRequest, new_ids: tuple[int, ...], new_log_probs: tuple[float, ...]) -> TokenChunk:
        slot = run.context
        chunk = super()._finish(run, new_ids, new_log_probs)
        if slot is not None:
            self.engine.free(slot)
        return chunk

    def _next_key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return jax.random.key_data(key)


def _is_greedy(run: RunningRequest) -> bool:
    return run.request.sampling.temperature == 0
