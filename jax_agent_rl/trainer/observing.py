"""Report a run: the lines of ``metrics.jsonl``, trajectories, the display, the observers of lines.

Also report where its time goes: phases for the timeline of ``jax-agent-rl report``, and totals for
the end of ``train``.

::

    Trainer ─► RunReporter ─► run folder: metrics.jsonl, trajectories
                        ─► display
                        ─► observers, of each line ─► Watch: warnings
                                                   ─► Sinks: TensorBoard, W&B, Trackio
                                                   ─► TrainerMetrics: GET /metrics
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.config import Config
from jax_agent_rl.config.default_agent import report_idle_tools
from jax_agent_rl.learner.losses.aggregation import depends_on_lengths, describe_batch
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.packing import trained_lengths
from jax_agent_rl.observe.progress import Progress, duration, role_rewards
from jax_agent_rl.observe.run_dir import RunDir, has_attachments
from jax_agent_rl.observe.sinks.metrics import MetricSinks, RunFacts, open_sinks, serve_trainer
from jax_agent_rl.observe.warnings import rules
from jax_agent_rl.observe.watch import RunWarning, Watch
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord, evaluation_record
from jax_agent_rl.trainer.step import recorded
from jax_agent_rl.types import Group
from jax_agent_rl.utils.text import counted


class Phases:
    """Collects the phases that have ended since the last :meth:`take`.

    Args:
        clock: seconds, monotonic.
        wall: seconds since the epoch. It is read once: phases do not overlap when the system's
            clock is set.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._clock_start = wall() - clock()  # in seconds since the epoch
        self._ended: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a phase, even one that fails or is interrupted."""
        began = self._clock()
        try:
            yield
        finally:
            self.ended(name, self._clock() - began)

    def ended(self, name: str, seconds: float) -> None:
        """Record a phase of so many seconds that ends now."""
        now = self._clock_start + self._clock()
        self._ended.append((name, now - seconds, now))

    def take(self) -> list[list[str | float]]:
        """Return and forget ``[name, begin, end]`` of each phase, in seconds since the epoch."""
        phases: list[list[str | float]] = []
        for name, begin, end in self._ended:
            phases.append([name, round(begin, 3), round(end, 3)])
        self._ended.clear()
        return phases


ENVIRONMENT_SECONDS = "JAX_AGENT_RL_ENVIRONMENT_SECONDS"
"""Environment variable for launch scripts: the seconds they took before they called ``train``."""

_COMPILATION_EVENTS = frozenset(
    {
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    }
)

_STAGE_OF_PHASE = {
    "evaluate": "evaluation",
    "engine": "rollout",
    "teach": "learning",
    "learn": "learning",
}


class Breakdown:
    """Seconds by stage, from the start of a run to its end.

    Everything before the first rollout or evaluation counts as compilation, the loading of the
    model included; so does what is compiled later because it is needed. If rollout and learner
    overlap, the stages add up to more than the total.

    Args:
        clock: seconds, monotonic.
        wall: seconds since the epoch, like ``phase_seconds``.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._first_phase = wall()
        self._startup_seconds = 0.0
        self._compilations: list[tuple[float, float]] = []  # (when it ended, seconds)

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
        if event in _COMPILATION_EVENTS:
            self._compilations.append((self._wall(), duration_secs))

    def started(self) -> None:
        """Record that engine and learner are up: the run begins."""
        self._startup_seconds = self._clock() - self._began
        self._first_phase = self._wall()

    def stages(self, metrics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Return seconds by stage, from the lines of ``metrics.jsonl``.

        Phases from before :meth:`started`, of a run that was resumed, do not count.
        """
        names = ("environment", "compilation", *_STAGE_OF_PHASE.values(), "rest")
        stages = dict.fromkeys(names, 0.0)
        stages["environment"] = _environment_seconds()
        stages["compilation"] = self._startup_seconds

        phases = [phase for line in metrics for phase in line.get("phase_seconds", ())]
        compilations = self._compilations
        for phase, begin, end in phases:
            is_earlier = begin < self._first_phase - 0.01  # phases are rounded to milliseconds
            if is_earlier or phase not in _STAGE_OF_PHASE:
                continue

            # Phases may overlap: a compilation is subtracted from the first one that it ended in.
            compile_seconds = 0.0
            later_compilations = []
            for ended, seconds in compilations:
                if begin <= ended <= end:
                    compile_seconds += seconds
                else:
                    later_compilations.append((ended, seconds))
            compilations = later_compilations

            phase_seconds = end - begin
            compile_seconds = min(compile_seconds, phase_seconds)  # it may have begun before
            stages["compilation"] += compile_seconds
            stages[_STAGE_OF_PHASE[phase]] += phase_seconds - compile_seconds

        total = stages["environment"] + self._clock() - self._began
        stages["rest"] = max(0.0, total - sum(stages.values()))
        stages["total"] = total
        return {name: round(seconds, 3) for name, seconds in stages.items()}


def format_breakdown(stages: Mapping[str, float]) -> str:
    """Return ``time: environment 1m36s · compilation 58s · … · 5m40s in all``.

    Stages that took no time are left out.
    """
    parts = []
    for name, seconds in stages.items():
        if name != "total" and seconds >= 0.5:
            parts.append(f"{name} {duration(seconds)}")
    parts.append(f"{duration(stages['total'])} in all")
    return f"time: {' · '.join(parts)}"


def _environment_seconds() -> float:
    """Return the seconds that the launch script reports; 0 without a number."""
    try:
        return max(0.0, float(os.environ.get(ENVIRONMENT_SECONDS, "0")))
    except ValueError:
        return 0.0


Observer = Callable[[Mapping[str, Any]], None]
"""A function that takes a line of metrics once it is recorded, and never fails."""


REFUSED_CALLS = ("malformed", "unknown_tool", "bad_arguments", "over_parallel_limit")
"""Kinds of errors of tool calls that no tool was asked to run."""


def describe_refused_calls(line: Mapping[str, Any], run: str) -> str:
    """Return one line on the tool calls of a step that could not be run; empty if there were none.

    Args:
        line: of metrics, of :func:`~jax_agent_rl.trainer.record.step_record`.
        run: the run folder.
    """
    errors = line["tool_errors_by_kind"]
    refused = {kind: errors[kind] for kind in REFUSED_CALLS if errors.get(kind)}
    if not refused:
        return ""
    count = sum(refused.values())
    calls = round(line["tool_errors"] / line["tool_error_share"])
    kind = max(refused, key=lambda name: refused[name])
    return (
        f"{count} of {counted(calls, 'tool call')} could not be run ({count / calls:.0%}), most of"
        f" them {kind}: jax-agent-rl view {run} --step {line['step']} --tool-error {kind}"
    )


@dataclass
class RunReporter:
    """Reports the steps and evaluations of a run.

    Args:
        folder: results are written here.
        record: progress that survives a restart.
        phases: begin and end of what the trainer did; written with each line.
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

    async def store_attachments(self, step: int, groups: Sequence[Group], *, learned: bool) -> None:
        """Store what the records of a step or an evaluation will name.

        Args:
            learned: it is a training step, whose records hold all that the learner reads.
        """
        trajectories = recorded(groups)
        if any(map(has_attachments, trajectories)):
            learned_groups = groups if learned else ()
            await asyncio.to_thread(
                self.folder.store_attachments, step, trajectories, learned_groups
            )

    def write_step(
        self,
        line: dict[str, Any],
        groups: Sequence[Group],
        result: UpdateResult,
    ) -> None:
        """Write a step to the folder: its line, see :func:`step_record`, and its trajectories."""
        step = line["step"]
        trajectories = recorded(groups)
        self.folder.add_trajectories(
            step, "train", trajectories, token_values=result.tokens, groups=groups
        )
        self._write(line)
        self.folder.finish_step(step)

    def show_step(self, line: dict[str, Any]) -> None:
        """Display the step that ``record`` now ends with, and pass its line to the observers."""
        record = self.record
        steps_left = self.runtime.config.trainer.steps - record.step
        seconds_left = steps_left * record.train_seconds / record.step
        shown_line = line | {"accuracy": record.latest_accuracy}
        self.progress.step(shown_line, seconds_left=seconds_left)
        record.latest_accuracy = None
        refused = describe_refused_calls(line, self.runtime.config.run_dir)
        if refused:
            self.progress.print_line(f"  {refused}")
        self._notify(line)

    def report_evaluation(self, groups: Sequence[Group], *, seconds: float) -> float:
        """Report an evaluation after the last step; return its accuracy."""
        step = self.record.step
        line = evaluation_record(step, groups, seconds=seconds)
        self.folder.add_trajectories(step, "heldout", recorded(groups))
        self._write(line)

        accuracy = line["accuracy"]
        self.record.latest_accuracy = accuracy
        self.record.evaluated = step

        text = f"  held-out accuracy after step {step}: {accuracy:.1%} of {len(groups)}"
        rewards = role_rewards(line)
        if rewards:
            text += f"; reward {rewards}"
        self.progress.print_line(f"{text} ({seconds:.0f} s)")
        self._notify(line)
        return accuracy

    def show_learning(
        self,
        selection: Selection,
        rollout_status: Callable[[], str],
    ) -> Callable[[int, int], None]:
        """Show the learner at work.

        If the weight of a token in the loss depends on trajectory lengths, explain it for the first
        batch.

        Returns:
            a function for the learner to call with the micro-batches done, and their total number.
        """
        algorithm = self.runtime.config.algorithm
        num_minibatches = self.runtime.config.learner.num_minibatches
        if not self._aggregation_described and depends_on_lengths(algorithm, num_minibatches):
            lengths = trained_lengths(
                selection.groups,
                num_minibatches,
                masked=selection.masked,
                segment_weight=algorithm.segment_weight,
            )
            aggregation = describe_batch(algorithm, lengths)
            if aggregation:
                self.progress.print_line(f"  {aggregation}")
        self._aggregation_described = True

        completed = 0
        total = 0  # unknown until the first call

        def tick(completed_now: int, total_now: int) -> None:
            nonlocal completed, total
            completed = completed_now
            total = total_now

        def micro_batches() -> str:
            if total == 0:
                return "before the first micro-batch"
            return f"{completed}/{counted(total, 'micro-batch')}"

        self.progress.phase(
            f"step {self.record.step + 1}: learner",
            lambda: f"{micro_batches()}{rollout_status()}",
        )
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
        sinks: metrics go there besides the run folder.
        each: all that take a line of metrics.
    """

    watch: Watch
    sinks: MetricSinks
    each: Sequence[Observer]

    def summary(self) -> dict[str, Any]:
        """Return for ``summary.json`` the warnings, and the records that sinks have lost."""
        return {
            "warnings": [asdict(warning) for warning in self.watch.warnings],
            "lost_by_logger": self.sinks.lost(),
        }


@contextmanager
def observers(
    config: Config,
    folder: RunDir,
    *,
    step: int,
    rows: Collection[Mapping[str, Any]],
    progress: Progress,
) -> Iterator[Observers]:
    """Open the observers of a run, and close them at its end.

    Args:
        config: as it is saved with the run.
        step: last finished step; earlier metrics are read silently.
        rows: to train on.
        progress: displays warnings.

    Raises:
        ConfigError: ``trainer.prometheus_port`` is in use.
    """
    facts = RunFacts(
        run_dir=folder.path,
        project=config.trainer.project_name,
        config=config.model_dump(mode="json"),
        step=step,
    )
    print_line = progress.print_line
    watch = Watch(rules(config, rows), print_line)

    def warn(record: Mapping[str, Any]) -> None:
        watch.update(record)
        progress.warn(watch.active)

    with ExitStack() as stack:
        sinks = stack.enter_context(
            open_sinks(config.trainer.logger, facts, print_line=print_line),
        )
        each: list[Observer] = [warn, sinks]

        port = config.trainer.prometheus_port
        if port is not None:
            each.append(stack.enter_context(serve_trainer(port, print_line=print_line)))

        warning = missing_agent_warning(config, rows)
        if warning is not None:
            watch.add(warning)
        for record in folder.recorded():
            watch.update(record, silent=True)

        yield Observers(watch=watch, sinks=sinks, each=each)


def missing_agent_warning(
    config: Config,
    rows: Collection[Mapping[str, Any]],
) -> RunWarning | None:
    """Return a warning if tools are configured, but rows name no agent.

    Such rows run as plain generation. The warning is printed when rows are loaded; this one is for
    the summary.
    """
    idle_tools = report_idle_tools(config, rows)
    if idle_tools is None:
        return None
    message, advice = idle_tools
    return RunWarning(
        name="agent_name_missing",
        message=message,
        advice=advice,
        first_step=0,
        last_step=0,
        steps=0,
    )


def format_warnings(warnings: Sequence[Mapping[str, Any]]) -> str:
    """Format the warnings of ``summary.json``, one a line; empty without any."""
    if not warnings:
        return ""
    lines = ["warnings:"]
    for warning in warnings:
        advice = f"What to do: {warning['advice']}"
        lines.append(f"  {warning['name']} ({_when(warning)}): {warning['message']}. {advice}")
    return "\n".join(lines)


def _when(warning: Mapping[str, Any]) -> str:
    """Return when a warning of ``summary.json`` held, for people."""
    if not warning["first_step"]:
        return "from the start"
    until = "the end" if warning["active"] else f"step {warning['last_step']}"
    return f"step {warning['first_step']} to {until}, {counted(warning['steps'], 'step')}"
