"""Observers of a run: the warnings, the sinks of ``trainer.logger``, the Prometheus port.

::

    Trainer ─► a line of metrics (already in metrics.jsonl) ─► Watch: warnings
                                                            ─► Sinks: TensorBoard, W&B, Trackio
                                                            ─► TrainerMetrics: GET /metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from jax_agent_rl.config import Config
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir, read_records
from jax_agent_rl.observe.sinks.metrics import MetricSinks, RunFacts, check_sinks, open_sinks
from jax_agent_rl.observe.warnings import missing_agent_warning, rules
from jax_agent_rl.observe.watch import Watch


@dataclass(frozen=True, kw_only=True)
class Observers:
    """The observers of one run.

    Attributes:
        watch: the warnings.
        sinks: where metrics go besides the run folder.
        each: all that take a line of metrics.
    """

    watch: Watch
    sinks: MetricSinks
    each: Sequence[Callable[[Mapping[str, Any]], None]]

    def summary(self) -> dict[str, Any]:
        """Return the warnings of the run and the records that sinks have lost, for ``summary.json``."""
        return {"warnings": [asdict(warned) for warned in self.watch.warnings], "lost_by_logger": self.sinks.lost()}


def check_observers(config: Config) -> None:
    """Check, before any work, that the configured sinks can be used; raise ConfigError if not."""
    check_sinks(config.trainer.logger)


@contextmanager
def observers(
    config: Config, folder: RunDir, *, step: int, rows: Sequence[Mapping[str, Any]], progress: Progress
) -> Iterator[Observers]:
    """Open the observers of a run, and close them at its end.

    Args:
        config: as it is saved with the run.
        folder: of the run.
        step: last finished step; earlier metrics are read silently.
        rows: to train on.
        progress: displays warnings.

    Raises:
        ConfigError: ``trainer.prometheus_port`` is in use.
    """
    facts = RunFacts(
        run_dir=folder.path, project=config.trainer.project_name, config=config.model_dump(mode="json"), step=step
    )
    with ExitStack() as stack:
        sinks = stack.enter_context(open_sinks(config.trainer.logger, facts, print_line=progress.print_line))
        each: list[Callable[[Mapping[str, Any]], None]] = [sinks]
        if config.trainer.prometheus_port is not None:
            from jax_agent_rl.observe.prometheus import serve_trainer

            each.append(
                stack.enter_context(serve_trainer(config.trainer.prometheus_port, print_line=progress.print_line))
            )
        watch = Watch(rules(config, rows), progress.print_line)
        if warning := missing_agent_warning(config, rows):
            watch.add(warning)
        for record in read_records(folder.metrics):
            watch.update(record, silent=True)

        def look(record: Mapping[str, Any]) -> None:
            watch.update(record)
            progress.warn(watch.active)

        yield Observers(watch=watch, sinks=sinks, each=[look, *each])


def format_warnings(warnings: Sequence[Mapping[str, Any]]) -> str:
    """Format the warnings of ``summary.json`` for the end of a run, one a line; empty without any."""
    lines = [
        f"  {warned['name']} ({_when(warned)}): {warned['message']}. What to do: {warned['advice']}"
        for warned in warnings
    ]
    return "\n".join(["warnings:", *lines]) if lines else ""


def _when(warned: Mapping[str, Any]) -> str:
    if not warned["first_step"]:
        return "from the start"
    until = "the end" if warned["active"] else f"step {warned['last_step']}"
    return f"step {warned['first_step']} to {until}, {warned['steps']} steps"
