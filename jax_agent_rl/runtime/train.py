"""One training run from configuration to summary: run folder, resuming, interruptions, report."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from jax_agent_rl.config import Config
from jax_agent_rl.errors import CheckpointError, WeightUpdateError
from jax_agent_rl.learner.checkpoint import Checkpointer, cut_off_steps
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.learner.losses.aggregation import describe_aggregation
from jax_agent_rl.observe.progress import Progress, duration, print_line
from jax_agent_rl.observe.report.charts import reward_plot
from jax_agent_rl.observe.report.command import write_report
from jax_agent_rl.observe.run_dir import RunDir, read_metrics, read_trajectories
from jax_agent_rl.observe.sinks.metrics import check_sinks
from jax_agent_rl.observe.view import best_and_worst, outline
from jax_agent_rl.runtime.build import build, open_checkpointer
from jax_agent_rl.runtime.identity import Resumption
from jax_agent_rl.runtime.multihost import ControlChannel, leading
from jax_agent_rl.runtime.placement import first_version
from jax_agent_rl.trainer import RunComponents
from jax_agent_rl.trainer.asynchronous import FullyAsyncTrainer, OneStepOffTrainer
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.observing import Breakdown, format_breakdown, format_warnings, observers
from jax_agent_rl.trainer.record import RunRecord, overlap_summary
from jax_agent_rl.trainer.sync import SyncTrainer
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.files import is_in_use, mark_in_use
from jax_agent_rl.utils.shutdown import ExitWithin, Interruption
from jax_agent_rl.utils.text import counted

TRAINERS: dict[str, type[Trainer]] = {
    "sync": SyncTrainer,
    "one_step_off": OneStepOffTrainer,
    "fully_async": FullyAsyncTrainer,
}
"""By ``trainer.mode``."""


async def train(
    config: Config,
    *,
    resume: bool | Literal["if_any"],
    console: Console,
    from_step: int | None = None,
    accept_changes: Collection[str] = (),
    exit_within: ExitWithin = lambda seconds: None,
) -> dict[str, Any]:
    """Run training to its end and return the summary, which is also written to ``summary.json``.

    Args:
        config: the configuration; a number is added to its ``run_dir`` if that folder exists,
            unless resuming.
        resume: continue from a checkpoint; ``if_any``: start a new run if there is none.
        console: where progress and results are printed.
        from_step: step of the checkpoint; None: the newest. Newer ones are deleted once the run has
            made its next step.
        accept_changes: keys that may differ from what the checkpoint was trained with, although
            they define it.
        exit_within: called once an interrupted run is saved, before everything is closed, with the
            seconds that closing may take; with 0 at the second interruption.

    Raises:
        asyncio.CancelledError: interrupted; a checkpoint of the last finished step exists.
    """
    with (
        leading() as channel,
        Interruption(console.print, exit_within, leads=channel is not None) as interruption,
    ):
        return await _train(
            config, resume, from_step, accept_changes, console, interruption, channel
        )


async def _train(
    config: Config,
    resume: bool | Literal["if_any"],
    from_step: int | None,
    accept_changes: Collection[str],
    console: Console,
    interruption: Interruption,
    channel: ControlChannel | None,
) -> dict[str, Any]:
    breakdown = Breakdown()
    check_sinks(config.trainer.logger)
    may_resume = bool(resume)
    path, resume = choose_run(config, resume)
    if resume:
        steps = complete_steps(config.trainer.checkpoint_dir or path / "checkpoints")
        advice = f"To go on, set trainer.steps={config.trainer.steps} to more than that"
        if len(steps) > 1:
            advice += f"; to go back, name one of the checkpoints {steps} with --step"
        ended = nothing_to_do(
            path,
            steps,
            config.trainer.steps,
            advice=advice,
            from_step=from_step,
            target_accuracy=config.trainer.target_accuracy,
        )
        if ended is not None:
            print_line(console, ended.message)
            return ended.summary

    restarts = not resume and _is_run(path)
    folder = RunDir(path, keep_trajectories=config.trainer.keep_trajectories)
    config = config.model_copy(update={"run_dir": str(path)})
    print_line(console, f"run folder: {path}")
    if restarts:
        print_line(
            console,
            "it ended before its first checkpoint: it begins again in this folder, and so do its"
            " records",
        )
    if may_resume:
        for run in runs_without_checkpoint(config):
            if run != path:
                print_line(
                    console,
                    f"{run} ended before its first checkpoint; it is not continued and stays as"
                    " it is",
                )

    checkpoints = config.trainer.checkpoint_dir or folder.checkpoints
    resumption = None
    if resume:
        resumption = Resumption(
            Config, folder, checkpoints, step=from_step, accepted=accept_changes
        )

    with mark_in_use(path), Progress(console, total_steps=config.trainer.steps) as progress:
        progress.phase("starting")
        async with build(
            config,
            print_line=progress.phase,
            channel=channel,
            folder=folder,
            check_identity=None if resumption is None else resumption.check,
        ) as runtime:
            lost_steps = []
            if resume:
                lost_steps = cut_off_steps(checkpoints)  # before the next save clears them away
            checkpointer = open_checkpointer(
                checkpoints, keep=config.trainer.keep_checkpoints, channel=channel
            )
            if restarts:
                folder.resume_after(-1)  # cuts the records of its first attempt off
            record = RunRecord()
            if resumption is not None:
                record = _restore(runtime, checkpointer, folder, resumption)
            record.identity = dict(runtime.identity)
            # Not before: a configuration that does not fit the checkpoint must not take the place
            # of the one that does.
            folder.write_json(folder.config, config.model_dump(mode="json"))
            record.cursor = record.cursor or runtime.cursor.state()

            trainer = TRAINERS[config.trainer.mode](
                runtime=runtime,
                folder=folder,
                checkpointer=checkpointer,
                record=record,
                progress=progress,
            )
            with contextlib.ExitStack() as stack:
                stack.enter_context(breakdown.watching())
                if channel is not None:
                    stack.callback(channel.stop)
                stack.callback(checkpointer.close)
                observed = stack.enter_context(
                    observers(
                        config,
                        folder,
                        step=record.step,
                        rows=runtime.training_rows,
                        progress=progress,
                    )
                )
                trainer.reporter.observers = observed.each
                try:
                    if record.step or first_version(config) < 0:
                        # The engines have the model's files, not the learner's weights.
                        await _publish_first(trainer, record.step)
                    if resume:
                        progress.resumed(record.step)
                        for step in lost_steps:
                            if step > record.step:
                                progress.print_line(
                                    f"the checkpoint of step {step} was cut off while it was"
                                    " written: it is lost"
                                )
                    aggregation = describe_aggregation(config)
                    if aggregation:
                        progress.print_line(aggregation)
                    interruption.training_begins()
                    breakdown.started()
                    await trainer.run()
                except asyncio.CancelledError:  # run() has saved
                    if channel is not None:
                        # Or other processes would lose this one, which exits at once.
                        stack.close()
                    interruption.saved(record.step)
                    raise

            interruption.training_ended()
            summary = _conclude(runtime, folder, record, breakdown, observed.summary(), console)
    return summary


@dataclass(frozen=True, kw_only=True)
class NothingToDo:
    """Why a resumed run has nothing to do.

    Attributes:
        message: says so, and how to go on.
        summary: ``summary.json`` of the run; empty if it has none.
    """

    message: str
    summary: dict[str, Any]


def nothing_to_do(
    run: Path,
    checkpoints: Sequence[int],
    steps: int,
    *,
    advice: str,
    from_step: int | None = None,
    target_accuracy: float | None = None,
) -> NothingToDo | None:
    """Return why a run that was asked to resume has nothing to do; None if it has.

    Args:
        checkpoints: steps of its checkpoints, ascending.
        steps: number of steps that it is to have.
        advice: how to go on.
        from_step: step of the checkpoint to resume from; None: the newest.
        target_accuracy: held-out accuracy at which the run ends earlier.
    """
    if not checkpoints:
        return None

    newest_step = checkpoints[-1]
    step = newest_step if from_step is None else from_step
    summary = _read_summary(run)
    if step > steps:
        return NothingToDo(
            message=(
                f"nothing to do: the checkpoint in {run} is of step {step}, and the run is to have"
                f" only {counted(steps, 'step')}. {advice}"
            ),
            summary=summary,
        )

    if summary.get("steps") != step or step != newest_step:
        return None  # it was interrupted, or goes back
    if step < steps:
        accuracy = summary.get("heldout_accuracy_after")
        if not target_accuracy or accuracy is None:
            return None
        if not accuracy >= target_accuracy:  # NaN reaches nothing
            return None
        advice = (
            f"It reached trainer.target_accuracy={target_accuracy}; to go on, raise that, or set it"
            " to null"
        )
    return NothingToDo(
        message=(
            f"nothing to do: the run in {run} has ended after {counted(step, 'step')}; its results"
            f" are there, untouched. {advice}"
        ),
        summary=summary,
    )


def _read_summary(run: Path) -> dict[str, Any]:
    """Return ``summary.json`` of a run; empty if there is none, or none that can be read."""
    try:
        return read_json_object(run / "summary.json")
    except (OSError, ValueError):
        return {}


def choose_run(config: Config, resume: bool | Literal["if_any"]) -> tuple[Path, bool]:
    """Return the run folder, and whether the run continues from a checkpoint.

    With ``if_any``, a run that was killed before its first checkpoint begins again in its own
    folder: a scheduler repeats the same command, which would leave a folder behind each time.

    Raises:
        CheckpointError: there is no checkpoint to resume, or there are some of another run.
    """
    run_dir = Path(config.run_dir)
    checkpoint_dir = config.trainer.checkpoint_dir
    if checkpoint_dir is not None:
        return _choose_run_of_folder(config, run_dir, checkpoint_dir, resume)

    if not resume:
        return free_folder(run_dir), False
    try:
        return newest_run(run_dir), True
    except CheckpointError:
        if resume != "if_any":
            raise
        return _folder_to_begin_in(config), False


def _choose_run_of_folder(
    config: Config, run_dir: Path, checkpoint_dir: str, resume: bool | Literal["if_any"]
) -> tuple[Path, bool]:
    """Choose the run of ``trainer.checkpoint_dir``, which holds the checkpoints of one run."""
    steps = complete_steps(checkpoint_dir)
    if not resume:
        if steps:
            raise CheckpointError(
                f"trainer.checkpoint_dir={checkpoint_dir} has checkpoints already (of steps"
                f" {steps}); go on from them with --resume, or choose another folder"
            )
        return free_folder(run_dir), False

    if steps:
        runs = [run for run in _runs(run_dir) if _writes_to(run, checkpoint_dir)]
        run = max(runs, key=_start_time) if runs else free_folder(run_dir)
        return run, True

    if resume == "if_any":
        return _folder_to_begin_in(config), False
    lost = ""
    for step in cut_off_steps(checkpoint_dir):
        lost += f"; that of step {step} was cut off while it was written"
    raise CheckpointError(
        f"--resume: no complete checkpoint in {checkpoint_dir}{lost}; start without --resume"
    )


def _folder_to_begin_in(config: Config) -> Path:
    """Return the latest run without a checkpoint, or else a free folder."""
    runs = runs_without_checkpoint(config)
    if runs:
        return runs[0]
    return free_folder(Path(config.run_dir))


def runs_without_checkpoint(config: Config) -> list[Path]:
    """Return the runs in ``run_dir``, ``run_dir-2``, … that ended before their first checkpoint.

    The latest comes first. Runs that a living process writes to have not ended.
    """
    checkpoint_dir = config.trainer.checkpoint_dir
    runs = []
    for run in _runs(Path(config.run_dir)):
        if not _writes_to(run, checkpoint_dir):
            continue
        if (run / "summary.json").exists() or is_in_use(run):
            continue
        checkpoints = run / "checkpoints" if checkpoint_dir is None else checkpoint_dir
        if not complete_steps(checkpoints):
            runs.append(run)
    return sorted(runs, key=_start_time, reverse=True)


def _is_run(run: Path) -> bool:
    return (run / "config.json").is_file()


def _writes_to(run: Path, checkpoint_dir: str | None) -> bool:
    """Return whether a folder holds a run whose ``trainer.checkpoint_dir`` is this one."""
    if not _is_run(run):
        return False
    try:
        config = read_json_object(run / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run / 'config.json'} cannot be read ({error}), so it is not known whether this run"
            " is to be continued; put the file back, or move the folder away"
        ) from None
    trainer = config.get("trainer")
    return isinstance(trainer, dict) and trainer.get("checkpoint_dir") == checkpoint_dir


def _start_time(run: Path) -> float:
    return (run / "config.json").stat().st_mtime


def _runs(run_dir: Path) -> list[Path]:
    """Return ``run_dir`` and those of ``run_dir-2``, ``run_dir-3``, … that exist."""
    prefix = f"{run_dir.name}-"
    runs = [run_dir]
    for path in run_dir.parent.glob(f"{prefix}*"):
        if path.name.removeprefix(prefix).isdigit():
            runs.append(path)
    return runs


def free_folder(run_dir: Path) -> Path:
    """Return the first of ``run_dir``, ``run_dir-2``, ``run_dir-3``, … without a run."""
    path = run_dir
    number = 1
    while path.exists() and any(path.iterdir()):
        number += 1
        path = run_dir.with_name(f"{run_dir.name}-{number}")
    return path


def newest_run(run_dir: Path) -> Path:
    """Return the latest of ``run_dir``, ``run_dir-2``, … with a checkpoint.

    Raises:
        CheckpointError: none has one.
    """
    runs = [run for run in _runs(run_dir) if complete_steps(run / "checkpoints")]
    if not runs:
        raise CheckpointError(
            f"--resume: no run with a checkpoint at {run_dir} (or {run_dir.name}-N beside it);"
            " start without --resume"
        )
    return max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime)


def _restore(
    runtime: RunComponents, checkpointer: Checkpointer, folder: RunDir, resumption: Resumption
) -> RunRecord:
    """Restore learner, data order and accounting from a checkpoint, and record what changes."""
    step, runtime.learner.state, saved = checkpointer.restore(
        runtime.learner.state, step=resumption.step
    )
    record = RunRecord.from_json(saved)
    runtime.cursor.restore(record.cursor, accepted=resumption.accepted)
    runtime.collector.accounting.restore(record.accounting)
    folder.resume_after(step)
    resumption.record_changes()
    return record


async def _publish_first(trainer: Trainer, version: int) -> None:
    """Publish the learner's first weights to the engines.

    Raises:
        WeightUpdateError: a server holds newer ones, of another or a later run.
    """
    try:
        await trainer.push_weights(version)
    except WeightUpdateError as error:
        raise WeightUpdateError(
            f"{error}; restart the rollout servers before a run starts or resumes"
        ) from error


def _conclude(
    runtime: RunComponents,
    folder: RunDir,
    record: RunRecord,
    breakdown: Breakdown,
    observed: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    """Write the summary, the plot and the report, and print the main results."""
    folder.finish_step(record.step)
    record.accounting = runtime.collector.accounting.state()
    metrics = list(read_metrics(folder.metrics))
    steps = [line for line in metrics if line["kind"] == "step"]
    stages = breakdown.stages(metrics)
    summary: dict[str, Any] = {
        **record.summary(),
        **overlap_summary(steps),
        **observed,
        "seconds": stages,
    }
    folder.write_json(folder.summary, summary)
    reward_plot(metrics, folder.plot, title=folder.path.name)
    decode = functools.partial(runtime.codec.decode, skip_special_tokens=False)
    report = write_report(folder.path, decode=decode)

    trajectories = read_trajectories(folder.trajectories)
    trained = (line for line in trajectories if line["split"] == "train")
    for name, trajectory in best_and_worst(trained).items():
        print_line(console, outline(trajectory, title=name))
    print_line(console, describe_summary(summary))
    warnings = format_warnings(observed["warnings"])
    if warnings:
        print_line(console, warnings)
    lines = [
        format_breakdown(stages),
        f"run folder:   {folder.path}",
        f"reward plot:  {folder.plot}",
        f"HTML report:  {report}",
    ]
    print_line(console, "\n".join(lines))
    return summary


def describe_summary(summary: Mapping[str, Any]) -> str:
    """Return the main results of a run, in a few lines."""
    first_line = (
        f"after {counted(summary['steps'], 'step')}, {duration(summary['train_seconds'])} of"
        " training"
    )
    accuracies = []
    for key in ("heldout_accuracy_before", "heldout_accuracy_after"):
        if summary[key] is not None:
            accuracies.append(f"{summary[key]:.1%}")
    if accuracies:
        first_line = f"held-out accuracy: {' -> '.join(accuracies)} {first_line}"

    dropped = ", ".join(f"{reason} {count}" for reason, count in summary["dropped"].items())
    lines = [
        first_line,
        (
            f"trajectories: {summary['started']} started = {summary['trained']} trained + dropped"
            f" ({dropped or 'none'})"
        ),
        (
            f"learner idle {summary['learner_idle_share']:.0%} of the time, tokens on average"
            f" {summary['staleness_mean']:.2g} versions old, at most {summary['staleness_max']}"
        ),
        (
            f"token drift {summary['token_drift']}, largest rollout/learner log-prob gap"
            f" {summary['max_logprob_gap']:.1e}, recompilations after warm-up"
            f" {summary['recompilations_after_warmup']}"
        ),
    ]

    not_compared = summary["steps_not_compared"]
    if not_compared:
        lines.append(
            f"engine and learner were compared in {summary['steps_compared']} of"
            f" {summary['steps_compared'] + not_compared} steps: the others had only tokens of"
            " older weights (docs/agreement.md)"
        )
    return "\n".join(lines)
