"""The summed metrics of all engines of a run, whatever joins and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.protocol import BackendMetrics, RolloutBackend

_METRICS_TIMEOUT_SECONDS = 10.0
"""Time limit of the slowest engine for reporting its metrics."""


class FleetMetrics:
    """The summed metrics of several engines.

    An engine that is gone or does not answer keeps its last values. One that joins later counts
    from then on: a server that was only out of reach still has its old counters.

    Args:
        backends: returns the current engines.
    """

    def __init__(self, backends: Callable[[], Sequence[RolloutBackend]]) -> None:
        self._backends = backends
        # What each engine had counted before it joined; the first engines count from zero.
        self._baselines: dict[RolloutBackend, BackendMetrics] = {}
        for backend in backends():
            self._baselines[backend] = BackendMetrics()
        self._latest: dict[RolloutBackend, BackendMetrics] = {}
        self._departed = BackendMetrics()

    async def read(self) -> BackendMetrics:
        backends = self._backends()
        await asyncio.gather(*(self._read(backend) for backend in backends))
        for backend in self._baselines.keys() - set(backends):
            del self._baselines[backend]
            self._departed = _sum(self._departed, self._latest.pop(backend, BackendMetrics()))
        return _sum(self._departed, *self._latest.values())

    async def _read(self, backend: RolloutBackend) -> None:
        try:
            async with asyncio.timeout(_METRICS_TIMEOUT_SECONDS):
                metrics = await backend.metrics()
        except (BackendError, TimeoutError):
            return
        baseline = self._baselines.setdefault(backend, metrics)
        self._latest[backend] = _difference(metrics, baseline)


def _sum(*metrics: BackendMetrics) -> BackendMetrics:
    sums: dict[str, Any] = {}
    for name in BackendMetrics.__dataclass_fields__:
        sums[name] = sum(getattr(server_metrics, name) for server_metrics in metrics)
    return BackendMetrics(**sums)


def _difference(metrics: BackendMetrics, baseline: BackendMetrics) -> BackendMetrics:
    """Return all differences; ``BackendMetrics.since`` leaves out ``recompilations``."""
    differences: dict[str, Any] = {}
    for name in BackendMetrics.__dataclass_fields__:
        differences[name] = getattr(metrics, name) - getattr(baseline, name)
    return BackendMetrics(**differences)
