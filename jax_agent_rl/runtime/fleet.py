"""Several engines as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.protocol import BackendMetrics, RolloutBackend

_PATIENCE_SECONDS = 10.0
"""How long the slowest engine may take to tell its metrics."""


class FleetMetrics:
    """The metrics of several engines added up; one that is gone, or does not answer, counts with what it last said.

    An engine that joins later counts from then on: a server that was only out of reach has its old counters still.

    Args:
        backends: those that there are now.
    """

    def __init__(self, backends: Callable[[], Sequence[RolloutBackend]]) -> None:
        self._backends = backends
        self._first: dict[RolloutBackend, BackendMetrics] = {b: BackendMetrics() for b in backends()}
        self._last: dict[RolloutBackend, BackendMetrics] = {}
        self._gone = BackendMetrics()

    async def read(self) -> BackendMetrics:
        backends = self._backends()
        await asyncio.gather(*map(self._read, backends))
        for backend in self._first.keys() - set(backends):
            del self._first[backend]
            self._gone = _sum(self._gone, self._last.pop(backend, BackendMetrics()))
        return _sum(self._gone, *self._last.values())

    async def _read(self, backend: RolloutBackend) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                now = await backend.metrics()
        except (BackendError, TimeoutError):
            return
        first = self._first.setdefault(backend, now)
        self._last[backend] = _combine(lambda now, first: now - first, now, first)


def _sum(*metrics: BackendMetrics) -> BackendMetrics:
    return _combine(lambda *values: sum(values), *metrics)


def _combine(how: Callable[..., Any], *metrics: BackendMetrics) -> BackendMetrics:
    """Each counter by itself."""
    names = BackendMetrics.__dataclass_fields__
    return BackendMetrics(**{name: how(*(getattr(m, name) for m in metrics)) for name in names})
