"""Metrics in Prometheus's text format 0.0.4, and counts of a server's requests.

Names begin with ``jax_agent_rl_``: ``engine_…`` are an engine's counts since it started
(:mod:`jax_agent_rl.rollout.engine_metrics`), ``server_requests`` its requests, ``train_…`` the
newest line of a run's ``metrics.jsonl`` (:mod:`jax_agent_rl.observe.sinks.metrics`). Counters end
in ``_total``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "jax_agent_rl_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RequestCounts:
    """Counts of finished requests by path and status, and of running ones.

    Use it from one event loop.
    """

    def __init__(self) -> None:
        self._finished: Counter[tuple[str, int]] = Counter()
        self._running = 0

    @contextmanager
    def request(self, path: str) -> Iterator[list[int]]:
        """Count one request, whose status the caller appends to the list.

        Without one it counts as 499: the client left.

        Args:
            path: of the route, without ids: every id would be a series of its own.
        """
        status: list[int] = []
        self._running += 1
        try:
            yield status
        finally:
            self._running -= 1
            self.count(path, status[-1] if status else 499)

    def count(self, path: str, status: int) -> None:
        """Count one request that ended."""
        self._finished[path, status] += 1

    def families(self) -> Iterator[Metric]:
        """Yield ``server_requests_total{path,status}`` and ``server_requests_running``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        finished = CounterMetricFamily(
            PREFIX + "server_requests", "Requests answered.", labels=["path", "status"]
        )
        for (path, status), count in sorted(self._finished.items()):
            finished.add_metric([path, str(status)], count)
        yield finished
        yield GaugeMetricFamily(
            PREFIX + "server_requests_running", "Requests under way.", value=self._running
        )


def gauges(values: Mapping[str, float]) -> Iterator[Metric]:
    """Yield gauges from values by name, without :data:`PREFIX`."""
    from prometheus_client.core import GaugeMetricFamily

    for name, value in values.items():
        description = name.replace("_", " ").capitalize() + "."
        yield GaugeMetricFamily(PREFIX + name, description, value=value)


def exposition_text(families: Iterable[Metric]) -> bytes:
    """Return the body of ``GET /metrics``; families of one name (of several engines) are merged."""
    from prometheus_client import generate_latest

    merged: dict[str, Metric] = {}
    for family in families:
        if family.name in merged:
            merged[family.name].samples += family.samples
        else:
            merged[family.name] = family

    class MergedFamilies:
        """What ``generate_latest`` expects of a registry."""

        def collect(self) -> Iterable[Metric]:
            return merged.values()

    return generate_latest(MergedFamilies())  # pyright: ignore[reportArgumentType]
