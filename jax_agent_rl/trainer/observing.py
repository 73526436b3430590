"""What a run reports: the lines of ``metrics.jsonl``, trajectories, the display, and the observers of the lines.

Where its time goes is reported, too: phases for the timeline of ``jax-agent-rl report``, totals for the end of
``train``.

::

    Trainer ─► RunReporter ─► run folder: metrics.jsonl, trajectories
                        ─► display
                        ─► observers, of each line ─► Watch: warnings
                                                   ─► Sinks: TensorBoard, W&B, Trackio
                                                   ─► TrainerMetrics: GET /metrics
"""

from __future__ import annotations

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
from jax_agent_rl.config.run import report_idle_tools
from jax_agent_rl.learner.batch import trained_lengths
from jax_agent_rl.learner.losses import depends_on_lengths, describe_batch
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.observe.progress import Progress, duration, role_rewards
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.observe.sinks.metrics import MetricSinks, RunFacts, open_sinks, serve_trainer
from jax_agent_rl.observe.warnings import rules
from jax_agent_rl.observe.watch import RunWarning, Watch
from jax_agent_rl.trainer import RunComponents
from jax_agent_rl.trainer.record import RunRecord, evaluation_record
from jax_agent_rl.trainer.step import recorded
from jax_agent_rl.types import Group
from jax_agent_rl.utils.text import counted


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


Observer = Callable[[Mapping[str, Any]], None]
"""Takes a line of metrics once it is recorded; never fails."""


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
        f"{count} of {counted(calls, 'tool call')} could not be run ({count / calls:.0%}), most of them {kind}: "
        f"jax-agent-rl view {run} --step {line['step']} --tool-error {kind}"
    )


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
        self.folder.add_trajectories(line["step"], "train", recorded(groups), token_values=result.tokens)
        self._write(line)
        self.folder.finish_step(line["step"])

    def show_step(self, line: dict[str, Any]) -> None:
        """Display the step that ``record`` now ends with, and pass its line to the observers."""
        record = self.record
        left = (self.runtime.config.trainer.steps - record.step) * record.train_seconds / record.step
        self.progress.step(line | {"accuracy": record.latest_accuracy}, seconds_left=left)
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
        if not self._aggregation_described and depends_on_lengths(config.algorithm, minis):
            lengths = trained_lengths(
                selection.groups, minis, masked=selection.masked, segment_weight=config.algorithm.segment_weight
            )
            aggregation = describe_batch(config.algorithm, lengths)
            if aggregation:
                self.progress.print_line(f"  {aggregation}")
        self._aggregation_described = True
        self.progress.phase(
            f"step {self.record.step + 1}: learner",
            lambda: f"{micro_batches()}{rollout_status()}",
        )

        def micro_batches() -> str:
            return f"{done[0]}/{done[1]} micro-batches" if done[1] else "before the first micro-batch"

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
            each.append(
                stack.enter_context(serve_trainer(config.trainer.prometheus_port, print_line=progress.print_line))
            )
        watch = Watch(rules(config, rows), progress.print_line)
        if warning := missing_agent_warning(config, rows):
            watch.add(warning)
        for record in folder.recorded():
            watch.update(record, silent=True)

        def look(record: Mapping[str, Any]) -> None:
            watch.update(record)
            progress.warn(watch.active)

        yield Observers(watch=watch, sinks=sinks, each=[look, *each])


def missing_agent_warning(config: Config, rows: Collection[Mapping[str, Any]]) -> RunWarning | None:
    """Return a warning if rows name no agent and run as plain generation, though tools are configured.

    It is printed when rows are loaded; this is for the summary.
    """
    idle = report_idle_tools(config, rows)
    if idle is None:
        return None
    message, advice = idle
    return RunWarning(name="agent_name_missing", message=message, advice=advice, first_step=0, last_step=0, steps=0)


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
    return f"step {warned['first_step']} to {until}, {counted(warned['steps'], 'step')}"
