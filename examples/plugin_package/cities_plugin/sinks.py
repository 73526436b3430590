"""Where metrics and traces go: a table of metrics, and a line per trace."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from jax_agent_rl.config import TraceConfig
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.observe.sinks.metrics import RunFacts, StepScalars
from jax_agent_rl.tracing import Trace


class CsvMetrics:
    """Appends ``step,name,value`` to ``metrics.csv`` in the run folder."""

    def open(self, run: RunFacts) -> Mapping[str, str]:
        """Open the file; a resumed run continues it."""
        self._file = (run.run_dir / "metrics.csv").open("a", newline="")
        return {}

    def write(self, item: StepScalars) -> None:
        """Write the numbers of one record."""
        csv.writer(self._file).writerows(
            (item.step, name, value) for name, value in item.values.items()
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TraceTitles:
    """Appends the id and the number of spans of each trace to ``titles.txt`` in the run folder.

    Args:
        config: the section ``trace``.
        run_dir: the run folder.
    """

    def __init__(self, config: TraceConfig, run_dir: RunDir) -> None:
        self._path = Path(run_dir.path) / "titles.txt"

    def write(self, trace: Trace) -> None:
        """Write one line."""
        with self._path.open("a") as file:
            file.write(f"{trace.trajectory_id} {len(trace.spans)}\n")

    def close(self) -> None:
        """Do nothing: every line is on disk."""
