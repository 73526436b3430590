"""One training run from configuration to summary: run folder, resuming, interruptions, final report."""

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
from jax_agent_rl.learner.losses import describe_aggregation
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
from jax_agent_rl.utils.process import ExitWithin, Interruption
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
    continues = bool(resume)
    path, resume = choose_run(config, resume)
    if resume:
        place = config.trainer.checkpoint_dir or path / "checkpoints"
        steps = complete_steps(place)
        back = (
            f"; to go back, name one of the checkpoints {steps} with --step"
            if len(steps) > 1
            else ""
        )
        done = nothing_to_do(
            path,
            steps,
            config.trainer.steps,
            further=f"To go on, set trainer.steps={config.trainer.steps} to more than that{back}",
            from_step=from_step,
            target_accuracy=config.trainer.target_accuracy,
        )
        if done is not None:
            print_line(console, done.message)
            return done.summary
    begins_again = not resume and _is_run(path)
    folder = RunDir(path, keep_trajectories=config.trainer.keep_trajectories)
    config = config.model_copy(update={"run_dir": str(path)})
    print_line(console, f"run folder: {path}")
    if begins_again:
        print_line(
            console,
            "it ended before its first checkpoint: it begins again in this folder, and so do its"
            " records",
        )
    if continues:
        for other in runs_without_checkpoint(config):
            if other != path:
                print_line(
                    console,
                    f"{other} ended before its first checkpoint; it is not continued and stays as"
                    " it is",
                )
    place = config.trainer.checkpoint_dir or folder.checkpoints
    resumption = None
    if resume:
        resumption = Resumption(Config, folder, place, step=from_step, accepted=accept_changes)
    with mark_in_use(path), Progress(console, total_steps=config.trainer.steps) as progress:
        progress.phase("starting")
        check = (lambda identity: None) if resumption is None else resumption.check
        async with build(
            config, print_line=progress.phase, channel=channel, folder=folder, check_identity=check
        ) as runtime:
            cut_off = (
                cut_off_steps(place) if resume else []
            )  # before the next save clears them away
            checkpointer = open_checkpointer(
                place, keep=config.trainer.keep_checkpoints, channel=channel
            )
            if begins_again:
                folder.resume_after(-1)
            record = (
                RunRecord()
                if resumption is None
                else _restore(runtime, checkpointer, folder, resumption)
            )
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
            with contextlib.ExitStack() as last:
                last.enter_context(breakdown.watching())
                if channel is not None:
                    last.callback(channel.stop)
                last.callback(checkpointer.close)
                observed = last.enter_context(
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
                        await _publish_first(trainer, record.step)
                    if resume:
                        progress.resumed(record.step)
                        for step in (step for step in cut_off if step > record.step):
                            progress.print_line(
                                f"the checkpoint of step {step} was cut off while it was written:"
                                " it is lost"
                            )
                    aggregation = describe_aggregation(config)
                    if aggregation:
                        progress.print_line(aggregation)
                    interruption.training_begins()
                    breakdown.started()
                    await trainer.run()
                except asyncio.CancelledError:  # run() has saved
                    if channel is not None:
                        last.close()  # or the others would lose this process, which exits at once
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
    further: str,
    from_step: int | None = None,
    target_accuracy: float | None = None,
) -> NothingToDo | None:
    """Return why a run that was asked to resume has nothing to do; None if it has.

    Args:
        run: its folder.
        checkpoints: steps of its checkpoints, ascending.
        steps: how many it is to have.
        further: how to go on.
        from_step: the one to resume from; None: the newest.
        target_accuracy: held-out accuracy at which it ends earlier.
    """
    if not checkpoints:
        return None
    step = checkpoints[-1] if from_step is None else from_step
    summary = _read_summary(run)
    if step > steps:
        wanted = counted(steps, "step")
        message = (
            f"nothing to do: the checkpoint in {run} is of step {step}, and the run is to have only"
            f" {wanted}"
        )
        return NothingToDo(message=f"{message}. {further}", summary=summary)
    if summary.get("steps") != step or from_step not in (None, checkpoints[-1]):
        return None
    accuracy = summary.get("heldout_accuracy_after")
    if step < steps and not (
        target_accuracy and accuracy is not None and accuracy >= target_accuracy
    ):
        return None
    message = (
        f"nothing to do: the run in {run} has ended after {counted(step, 'step')}; its results are"
        " there, untouched"
    )
    if step < steps:
        further = (
            f"It reached trainer.target_accuracy={target_accuracy}; to go on, raise that, or set it"
            " to null"
        )
    return NothingToDo(message=f"{message}. {further}", summary=summary)


def _read_summary(run: Path) -> dict[str, Any]:
    """Return ``summary.json`` of a run; empty if there is none, or none that can be read."""
    try:
        return read_json_object(run / "summary.json")
    except (OSError, ValueError):
        return {}


def choose_run(config: Config, resume: bool | Literal["if_any"]) -> tuple[Path, bool]:
    """Return the run folder, and whether the run continues from a checkpoint.

    With ``if_any``, a run that was killed before its first checkpoint begins again in its own
    folder: the command that started it is given again and again, and would leave a folder behind
    each time.

    Raises:
        CheckpointError: there is no checkpoint to resume, or there are some of another run.
    """
    wanted, elsewhere = Path(config.run_dir), config.trainer.checkpoint_dir
    if elsewhere is None:
        try:
            return (newest_run(wanted), True) if resume else (free_folder(wanted), False)
        except CheckpointError:
            if resume != "if_any":
                raise
            return _folder_to_begin_in(config), False
    steps = complete_steps(elsewhere)
    if steps and not resume:
        raise CheckpointError(
            f"trainer.checkpoint_dir={elsewhere} has checkpoints already (of steps {steps}); go on"
            " from them with --resume, or choose another folder"
        )
    if resume is True and not steps:
        lost = "".join(
            f"; that of step {step} was cut off while it was written"
            for step in cut_off_steps(elsewhere)
        )
        raise CheckpointError(
            f"--resume: no complete checkpoint in {elsewhere}{lost}; start without --resume"
        )
    if steps:
        return _run_beside(wanted, elsewhere), True
    return (_folder_to_begin_in(config) if resume else free_folder(wanted)), False


def _folder_to_begin_in(config: Config) -> Path:
    """Return the latest run without a checkpoint, or else a free folder."""
    begun = runs_without_checkpoint(config)
    return begun[0] if begun else free_folder(Path(config.run_dir))


def runs_without_checkpoint(config: Config) -> list[Path]:
    """Return the runs ``run_dir``, ``run_dir-2``, … that ended before their first checkpoint, the latest first.

    Runs that a living process writes to have not ended.
    """
    elsewhere = config.trainer.checkpoint_dir
    found = []
    for run in _runs(Path(config.run_dir)):
        if not _writes_to(run, elsewhere) or (run / "summary.json").exists() or is_in_use(run):
            continue
        if not complete_steps(run / "checkpoints" if elsewhere is None else elsewhere):
            found.append(run)
    return sorted(found, key=_started, reverse=True)


def _run_beside(wanted: Path, checkpoint_dir: str) -> Path:
    """Return the latest of ``wanted``, ``wanted-2``, … with checkpoints in that folder, or a new one."""
    runs = [run for run in _runs(wanted) if _writes_to(run, checkpoint_dir)]
    return max(runs, key=_started) if runs else free_folder(wanted)


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


def _started(run: Path) -> float:
    return (run / "config.json").stat().st_mtime


def _runs(wanted: Path) -> list[Path]:
    numbered = [
        p
        for p in wanted.parent.glob(f"{wanted.name}-*")
        if p.name.removeprefix(f"{wanted.name}-").isdigit()
    ]
    return [wanted, *numbered]


def free_folder(wanted: Path) -> Path:
    """Return the first of ``wanted``, ``wanted-2``, ``wanted-3``, … without a run."""
    number, path = 1, wanted
    while path.exists() and any(path.iterdir()):
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def newest_run(wanted: Path) -> Path:
    """Return the latest of ``wanted``, ``wanted-2``, … with a checkpoint.

    Raises:
        CheckpointError: none has one.
    """
    runs = [run for run in _runs(wanted) if complete_steps(run / "checkpoints")]
    if not runs:
        raise CheckpointError(
            f"--resume: no run with a checkpoint at {wanted} (or {wanted.name}-N beside it); start"
            " without --resume"
        )
    return max(runs, key=lambda p: (p / "checkpoints").stat().st_mtime)


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
    summary: dict[str, Any] = (
        record.summary()
        | overlap_summary([line for line in metrics if line["kind"] == "step"])
        | observed
    )
    summary["seconds"] = stages = breakdown.stages(metrics)
    folder.write_json(folder.summary, summary)
    reward_plot(metrics, folder.plot, title=folder.path.name)
    decode = functools.partial(runtime.codec.decode, skip_special_tokens=False)
    report = write_report(folder.path, decode=decode)
    trained = (one for one in read_trajectories(folder.trajectories) if one["split"] == "train")
    for name, extreme in best_and_worst(trained).items():
        print_line(console, outline(extreme, title=name))
    print_line(console, describe_summary(summary))
    if warnings := format_warnings(observed["warnings"]):
        print_line(console, warnings)
    print_line(
        console,
        f"{format_breakdown(stages)}\nrun folder:   {folder.path}\nreward plot: "
        f" {folder.plot}\nHTML report:  {report}",
    )
    return summary


def describe_summary(summary: Mapping[str, Any]) -> str:
    """Return the main results of a run, in a few lines."""
    steps = (
        f"after {counted(summary['steps'], 'step')}, {duration(summary['train_seconds'])} of"
        " training"
    )
    heldout = _heldout(summary)
    dropped = ", ".join(f"{k} {v}" for k, v in summary["dropped"].items()) or "none"
    return (
        f"{f'{heldout} {steps}' if heldout else steps}\ntrajectories: {summary['started']} started"
        f" = {summary['trained']} trained + dropped ({dropped})\nlearner idle"
        f" {summary['learner_idle_share']:.0%} of the time, tokens on average"
        f" {summary['staleness_mean']:.2g} versions old, at most {summary['staleness_max']}\ntoken"
        f" drift {summary['token_drift']}, largest rollout/learner log-prob gap"
        f" {summary['max_logprob_gap']:.1e}, recompilations after warm-up"
        f" {summary['recompilations_after_warmup']}{_not_compared(summary)}"
    )


def _heldout(summary: Mapping[str, Any]) -> str:
    """Return how the accuracy on held-out rows changed; empty if there are none."""
    measured = [summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]]
    shares = [f"{value:.1%}" for value in measured if value is not None]
    return f"held-out accuracy: {' -> '.join(shares)}" if shares else ""


def _not_compared(summary: Mapping[str, Any]) -> str:
    """Return a line on steps that learned without a comparison of engine and learner; nothing without any."""
    missed = summary["steps_not_compared"]
    if not missed:
        return ""
    return (
        f"\nengine and learner were compared in {summary['steps_compared']} of"
        f" {summary['steps_compared'] + missed} steps: the others had only tokens of older weights"
        " (docs/agreement.md)"
    )
