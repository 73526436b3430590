"""Counters of one backend."""

from __future__ import annotations

import time
from collections.abc import Callable

from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.protocol import BackendMetrics


class Usage:
    """Counts requests as they begin and end.

    vLLM does not tell apart the time it spends on prompts, so ``prefill_seconds`` stays 0; ``busy_seconds`` is the
    time with at least one request inside.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._inside: dict[int, RunningRequest] = {}
        self._since = 0.0
        self._busy = 0.0
        self._generated = self._prefilled = self._cached = self._finished = 0
        self.weight_update_seconds = 0.0

    def begin(self, run: RunningRequest) -> None:
        if not self._inside:
            self._since = self._clock()
        self._inside[id(run)] = run

    def end(self, run: RunningRequest) -> None:
        del self._inside[id(run)]
        if not self._inside:
            self._busy += self._clock() - self._since
        self._generated += len(run.token_ids)
        if run.stop_reason is not None:
            self._finished += 1
            self._cached += run.cached_tokens
            self._prefilled += len(run.request.prompt_ids) - run.cached_tokens

    def metrics(self) -> BackendMetrics:
        running = self._clock() - self._since if self._inside else 0.0
        return BackendMetrics(
            generated_tokens=self._generated + sum(len(run.token_ids) for run in self._inside.values()),
            prefill_tokens=self._prefilled,
            cached_tokens=self._cached,
            requests_finished=self._finished,
            busy_seconds=self._busy + running,
            weight_update_seconds=self.weight_update_seconds,
        )
