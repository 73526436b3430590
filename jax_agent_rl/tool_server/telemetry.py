"""Prometheus metrics of a worker.

In a worker process the library keeps them in files that outlive it (its multiprocess mode), so that the front process
serves exact sums over all workers, killed ones included.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OPENED, CLOSED = "toolserver_environments_opened", "toolserver_environments_closed"
_STEP_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Telemetry:
    """Metrics; ``worker`` labels the process, so that environments a dead one left open can be counted.

    Args:
        registry: where they are registered.
        worker: name of this process.
    """

    def __init__(self, registry: CollectorRegistry, *, worker: str):
        self._worker = worker
        self._steps = Counter("toolserver_steps", "Actions.", ["tool", "outcome"], registry=registry)
        self._seconds = Histogram(
            "toolserver_step_seconds", "Time of an action.", ["tool"], registry=registry, buckets=_STEP_SECONDS
        )
        self._running = Gauge(
            "toolserver_steps_running",
            "Actions under way.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._opened = Counter(OPENED, "Environments opened.", ["worker", "tool"], registry=registry)
        self._closed = Counter(CLOSED, "Environments closed.", ["worker", "tool", "reason"], registry=registry)
        self._close_failures = Counter(
            "toolserver_close_failures", "Environments whose close() raised or hung.", ["tool"], registry=registry
        )

    def step_began(self) -> None:
        """Count an action as under way."""
        self._running.labels(self._worker).inc()

    def step_ended(self, tool: str, outcome: str, seconds: float) -> None:
        """Record the end of an action; ``outcome`` is ``ok`` or the name of a failure."""
        self._running.labels(self._worker).dec()
        self._steps.labels(tool, outcome).inc()
        self._seconds.labels(tool).observe(seconds)

    def opened(self, tool: str) -> None:
        """Count an opened environment."""
        self._opened.labels(self._worker, tool).inc()

    def closed(self, tool: str, reason: str) -> None:
        """Count a closed environment."""
        self._closed.labels(self._worker, tool, reason).inc()

    def close_failed(self, tool: str) -> None:
        """Count a closing that raised or took too long."""
        self._close_failures.labels(tool).inc()
