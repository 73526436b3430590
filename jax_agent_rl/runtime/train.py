"""One training run from configuration to summary: run folder, interruptions, report."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection, Mapping
from typing import Any, Literal

from rich.console import Console

from jax_agent_rl.config import Config
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.learner.checkpoint import cut_off_steps
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.learner.losses.aggregation import describe_aggregation
from jax_agent_rl.models.hf import load_config
from jax_agent_rl.models.lora import describe_adapters
from jax_agent_rl.observe.progress import Progress, duration, print_line
from jax_agent_rl.observe.report.charts import reward_plot
from jax_agent_rl.observe.report.command import write_report
from jax_agent_rl.observe.run_dir import (
    RunDir,
    read_metrics,
    read_trajectories,
)
from jax_agent_rl.observe.sinks.metrics import check_sinks
from jax_agent_rl.observe.view import best_and_worst, outline
from jax_agent_rl.runtime.build import build, open_checkpointer
from jax_agent_rl.runtime.multihost import ControlChannel, leading
from jax_agent_rl.runtime.placement import first_version
from jax_agent_rl.runtime.provenance import append_provenance
from jax_agent_rl.runtime.resume import (
    Resumption,
    choose_run,
    is_run,
    nothing_to_do,
    restore,
    runs_without_checkpoint,
)
from jax_agent_rl.trainer.asynchronous import FullyAsyncTrainer, OneStepOffTrainer
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.observing import Breakdown, format_breakdown, format_warnings, observers
from jax_agent_rl.trainer.record import RunRecord, overlap_summary
from jax_agent_rl.trainer.sync import SyncTrainer
from jax_agent_rl.utils.files import mark_in_use
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

    restarts = not resume and is_run(path)
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
                record = restore(runtime, checkpointer, folder, resumption)
            record.identity = dict(runtime.identity)
            # Not before: a configuration that does not fit the checkpoint must not take the place
            # of the one that does.
            folder.write_json(folder.config, config.model_dump(mode="json"))
            append_provenance(folder.path, runtime.identity["content"], step=record.step)
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
                    for line in _describe_update(config):
                        progress.print_line(line)
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


def _describe_update(config: Config) -> list[str]:
    """Return lines on what an update weighs, where that is unusual, and on what it changes."""
    lines = []
    aggregation = describe_aggregation(config)
    if aggregation:
        lines.append(aggregation)
    if config.learner.lora is not None:
        model = load_config(config.model.path)
        lines.append(describe_adapters(config.learner.lora, model))
    return lines


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
            f" {counted(summary['steps_compared'] + not_compared, 'step')}: the others had only"
            " tokens of older weights (docs/agreement.md)"
        )
    return "\n".join(lines)
