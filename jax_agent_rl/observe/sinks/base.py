"""What a sink is, and what it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a sink is told when it opens.

    Attributes:
        folder: the run folder; its name is the run's.
        project: the name that runs are shown together under.
        config: the resolved configuration, as JSON.
        step: the step the run goes on from; what was logged after it is logged again. 0: a new run.
        identity: what :meth:`Sink.open` returned when the run began; None: it begins now.
    """

    folder: Path
    project: str
    config: Mapping[str, Any]
    step: int = 0
    identity: Mapping[str, str] | None = None


class Sink(Protocol):
    """One library that keeps metrics. All three are called in one thread, in this order; any may raise."""

    def open(self, run: RunFacts) -> Mapping[str, str]:
        """Begins or goes on; returns what names the run, for the next time."""
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Takes the metrics of a step, or of the evaluation after it."""
        ...

    def close(self) -> None:
        """Everything logged is kept when this returns. Also called after a failure."""
        ...


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a ``metrics.jsonl`` line by name, nested ones with a slash.

    >>> scalars({"kind": "evaluation", "step": 3, "accuracy": 0.5, "lost": {"tool": 1}})
    {'evaluation/accuracy': 0.5, 'evaluation/lost/tool': 1.0}
    """
    prefix = "" if record["kind"] == "step" else f"{record['kind']}/"
    return dict(_numbers({k: v for k, v in record.items() if k not in ("kind", "step")}, prefix))


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
