"""What a run reports: the lines of ``metrics.jsonl``, trajectories, the display, and the observers of the lines.

::

    Trainer ─► RunReporter ─► run folder: metrics.jsonl, trajectories
                        ─► display
                        ─► observers, of each line ─► Watch: warnings
                                                   ─► Sinks: TensorBoard, W&B, Trackio
                                                   ─► TrainerMetrics: GET /metrics
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.config import Config
from jax_agent_rl.learner.losses import aggregation
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.scored_batch import trained_lengths
from jax_agent_rl.observe.progress import Progress, role_rewards
from jax_agent_rl.observe.run_dir import RunDir, read_records
from jax_agent_rl.observe.sinks.metrics import MetricSinks, RunFacts, check_sinks, open_sinks
from jax_agent_rl.observe.warnings import missing_agent_warning, rules
from jax_agent_rl.observe.watch import Watch
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.groups import recorded
from jax_agent_rl.trainer.record import RunRecord, evaluation_record
from jax_agent_rl.trainer.timing import Phases
from jax_agent_rl.types import Group

Observer = Callable[[Mapping[str, Any]], None]
"""Takes a line of metrics once it is recorded; never fails."""


@dataclass
class RunReporter:
    """Reports the steps and evaluations of a run.

    Args:
        runtime: the parts of the run.
        folder: where results go.
        record: the progress.
        progress: the display.
        phases: what the trainer did when.
        clock: seconds, monotonic.
        observers: called with each line.
    """

    runtime: RunComponents
    folder: RunDir
    record: RunRecord
    progress: Progress
    phases: Phases
    clock: Callable[[], float]
    observers: Sequence[Observer] = ()
    _aggregation_described: bool = False

    def write_step(self, line: dict[str, Any], groups: Sequence[Group], result: UpdateResult) -> None:
        """Write a step's line of metrics, of :func:`step_record`, and its trajectories to the folder."""
        self._write(line)
        self.folder.add_trajectories(line["step"], "train", recorded(groups), token_values=result.tokens)

    def show_step(self, line: dict[str, Any]) -> None:
        """Display the step that ``record`` now ends with, and pass its line to the observers."""
        record = self.record
        left = (self.runtime.config.trainer.steps - record.step) * record.train_seconds / record.step
        self.progress.step(line | {"accuracy": record.latest_accuracy}, seconds_left=left)
        record.latest_accuracy = None
        self._notify(line)

    def report_evaluation(self, groups: Sequence[Group], *, seconds: float) -> float:
        """Report an evaluation after the last step; return its accuracy."""
        step = self.record.step
        line = evaluation_record(step, groups, seconds=seconds)
        self._write(line)
        self.folder.add_trajectories(step, "heldout", recorded(groups))
        accuracy = self.record.latest_accuracy = line["accuracy"]
        self.record.evaluated = step
        roles = f"; reward {by_role}" if (by_role := role_rewards(line)) else ""
        self.progress.print_line(
            f"  held-out accuracy after step {step}: {accuracy:.1%} of {len(groups)}{roles} ({line['seconds']:.0f} s)"
        )
        self._notify(line)
        return accuracy

    def show_learning(self, selection: Selection, rollout_status: Callable[[], str]) -> Callable[[int, int], None]:
        """Show the learner at work; return what takes (micro-batches done, total).

        For the first batch, say what a token weighs in the loss, where that depends on trajectory lengths.
        """
        config, done = self.runtime.config, [0, 0]
        minis = config.learner.num_minibatches
        if not self._aggregation_described and aggregation.depends_on_lengths(config.algorithm, minis):
            lengths = trained_lengths(
                selection.groups, minis, masked=selection.masked, segment_weight=config.algorithm.segment_weight
            )
            self.progress.print_line(f"  {aggregation.describe_batch(config.algorithm, lengths)}")
        self._aggregation_described = True
        self.progress.phase(
            f"step {self.record.step + 1}: learner",
            lambda: f"{done[0]}/{done[1] or '?'} micro-batches{rollout_status()}",
        )

        def tick(*counts: int) -> None:
            done[:] = counts

        return tick

    def _write(self, line: dict[str, Any]) -> None:
        self.folder.add_metrics(line | {"phase_seconds": self.phases.take()})

    def _notify(self, line: dict[str, Any]) -> None:
        for observer in self.observers:
            observer(line)


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
    each: Sequence[Observer]

    def summary(self) -> dict[str, Any]:
        """Return the warnings of the run and the records that sinks have lost, for ``summary.json``."""
        return {"warnings": [asdict(warned) for warned in self.watch.warnings], "lost_by_logger": self.sinks.lost()}


def check_observers(config: Config) -> None:
    """Check, before any work, that the configured sinks can be used; raise ConfigError if not."""
    check_sinks(config.trainer.logger)


@contextmanager
def observers(
    config: Config, folder: RunDir, *, step: int, rows: Collection[Mapping[str, Any]], progress: Progress
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
        each: list[Observer] = [sinks]
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
