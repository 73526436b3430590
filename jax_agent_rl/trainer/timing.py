"""Where the time of a run goes: phases for the timeline of ``jax-agent-rl report``, totals for the end of ``train``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jax_agent_rl.observe.progress import duration


class Phases:
    """Collects the phases that have ended since the last :meth:`take`.

    Args:
        clock: seconds, monotonic.
        wall: seconds since the epoch; read once, so that phases never overlap because the system's clock was set.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._epoch = wall() - clock()
        self._ended: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a phase; one that fails or is interrupted counts, too."""
        began = self._clock()
        try:
            yield
        finally:
            self.ended(name, self._clock() - began)

    def ended(self, name: str, seconds: float) -> None:
        """Record a phase of so many seconds that ends now."""
        now = self._epoch + self._clock()
        self._ended.append((name, now - seconds, now))

    def take(self) -> list[list[str | float]]:
        """Return and forget ``[name, begin, end]`` of each, in seconds since the epoch."""
        taken = [[name, round(begin, 3), round(end, 3)] for name, begin, end in self._ended]
        self._ended.clear()
        return taken


ENVIRONMENT_SECONDS = "JAX_AGENT_RL_ENVIRONMENT_SECONDS"
"""Environment variable in which a launch script says how long it took before it called ``train``."""
_COMPILED = frozenset(f"/jax/core/compile/{part}_duration" for part in ("jaxpr_to_mlir_module", "backend_compile"))
_STAGES = {"evaluate": "evaluation", "engine": "rollout", "teach": "learning", "learn": "learning"}


class Breakdown:
    """Seconds by stage, from the start of a run to its end.

    Compilation is what comes before the first rollout or evaluation (loading the model, too), and what is compiled
    later because it is needed. Where rollout and learner overlap, the stages add up to more than the whole.

    Args:
        clock: seconds, monotonic.
        wall: seconds since the epoch, those of ``phase_seconds``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._began = clock()
        self._first_phase = wall()
        self._started = 0.0
        self._compiled: list[tuple[float, float]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record every compilation of the process while the context is open."""
        jax.monitoring.register_event_duration_secs_listener(self.on_event)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self.on_event)

    def on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        """Record a compilation that ends now; ignore other events."""
        if event in _COMPILED:
            self._compiled.append((self._wall(), duration_secs))

    def started(self) -> None:
        """Record that engine and learner are up: the run begins."""
        self._started, self._first_phase = self._clock() - self._began, self._wall()

    def stages(self, metrics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Return seconds by stage, from the lines of ``metrics.jsonl``.

        Phases from before :meth:`started`, of a run that was resumed, do not count.
        """
        stages = dict.fromkeys(("environment", "compilation", *_STAGES.values(), "rest"), 0.0)
        stages["environment"] = _environment_seconds()
        stages["compilation"] = self._started
        compiled = self._compiled
        for name, begin, end in (phase for line in metrics for phase in line.get("phase_seconds", ())):
            if name not in _STAGES or begin < self._first_phase - 0.01:
                continue
            compiling = min(sum(seconds for ended, seconds in compiled if begin <= ended <= end), end - begin)
            compiled = [(ended, seconds) for ended, seconds in compiled if not begin <= ended <= end]
            stages["compilation"] += compiling
            stages[_STAGES[name]] += end - begin - compiling
        whole = stages["environment"] + self._clock() - self._began
        stages["rest"] = max(0.0, whole - sum(stages.values()))
        return {name: round(seconds, 3) for name, seconds in stages.items()} | {"total": round(whole, 3)}


def format_breakdown(stages: Mapping[str, float]) -> str:
    """Return ``time: environment 1m36s · compilation 58s · … · 5m40s in all``, without what took no time."""
    parts = [f"{name} {duration(seconds)}" for name, seconds in stages.items() if name != "total" and seconds >= 0.5]
    return f"time: {' · '.join([*parts, duration(stages['total']) + ' in all'])}"


def _environment_seconds() -> float:
    """Return what the launch script reports; 0 without a number."""
    try:
        return max(0.0, float(os.environ.get(ENVIRONMENT_SECONDS, "0")))
    except ValueError:
        return 0.0
