"""Resuming a run: which run goes on, from which checkpoint, and what may change.

::

    choose_run ─► nothing_to_do ─► Resumption ─► check: RunIdentity now against the checkpoint's
    the folder    it has ended     the step            │ the same, or accepted
                                                       ▼
                                                   restore: learner, data order, accounting
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from jax_agent_rl.config import Config
from jax_agent_rl.config.resume import Difference, is_named, require_known_keys, value_differences
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer, cut_off_steps, read_notes
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.observe.run_dir import RunDir, append_records
from jax_agent_rl.runtime.identity import RunIdentity, content_differences
from jax_agent_rl.trainer.components import RunComponents
from jax_agent_rl.trainer.record import RunRecord
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.files import is_in_use
from jax_agent_rl.utils.text import counted

logger = logging.getLogger(__name__)

CHANGES = "config_changes.jsonl"
"""File of a run folder: what was changed when the run was resumed."""

_ADVICE = (
    "set them back to resume it, start a new run (model.path=RUN starts from its weights), or"
    " resume with what is meant: --accept-change {keys}. docs/training.md lists the keys that may"
    " change"
)


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
    cut_off = ""
    for step in cut_off_steps(checkpoint_dir):
        cut_off += f"; that of step {step} was cut off while it was written"
    raise CheckpointError(
        f"--resume: no complete checkpoint in {checkpoint_dir}{cut_off}; start without --resume"
    )


def _folder_to_begin_in(config: Config) -> Path:
    """Return the latest run without a checkpoint, or else a free folder."""
    runs = runs_without_checkpoint(config)
    if runs:
        return runs[0]
    return free_folder(Path(config.run_dir))


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


def _runs(run_dir: Path) -> list[Path]:
    """Return ``run_dir``, and which of ``run_dir-2``, ``run_dir-3``, … exist."""
    prefix = f"{run_dir.name}-"
    runs = [run_dir]
    for path in run_dir.parent.glob(f"{prefix}*"):
        if path.name.removeprefix(prefix).isdigit():
            runs.append(path)
    return runs


def is_run(run: Path) -> bool:
    """Return whether a folder holds a run."""
    return (run / "config.json").is_file()


def _writes_to(run: Path, checkpoint_dir: str | None) -> bool:
    """Return whether a folder holds a run whose ``trainer.checkpoint_dir`` is this one."""
    if not is_run(run):
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


def free_folder(run_dir: Path) -> Path:
    """Return the first of ``run_dir``, ``run_dir-2``, ``run_dir-3``, … without a run."""
    path = run_dir
    number = 1
    while path.exists() and any(path.iterdir()):
        number += 1
        path = run_dir.with_name(f"{run_dir.name}-{number}")
    return path


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


class Resumption:
    """What a run resumes from, and what is changed with it.

    Args:
        model: class of the configuration's root section.
        folder: the run folder.
        checkpoints: the folder of its checkpoints.
        step: step of the checkpoint; None: the newest.
        accepted: keys that may differ although they define what is trained.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: there is no key of a name in ``accepted``.
    """

    def __init__(
        self,
        model: type[BaseModel],
        folder: RunDir,
        checkpoints: Path | str,
        *,
        step: int | None = None,
        accepted: Collection[str] = (),
    ) -> None:
        require_known_keys(model, accepted)
        self.accepted = accepted
        self.changes: list[Difference] = []
        self._model = model
        self._folder = folder

        notes = read_notes(checkpoints, step)
        self.step = notes.step
        self._checkpoint = f"checkpoint {self.step} in {checkpoints}"
        identity = notes.progress.get("identity")
        if identity:
            self._old = RunIdentity.from_json(identity)
        else:
            self._old = _recorded_identity(folder)

    def check(self, identity: RunIdentity) -> None:
        """Compare the run with its checkpoint, before anything is loaded.

        Raises:
            CheckpointError: something that defines what is trained differs.
        """
        if self._old is None:
            logger.warning(
                "%s is of an earlier version, which did not record what it was trained with",
                self._checkpoint,
            )
            return
        self.changes = check_resumed(
            self._model, self._old, identity, accepted=self.accepted, checkpoint=self._checkpoint
        )

    def record_changes(self) -> None:
        """Append to the run folder what is changed from this step on."""
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        records = []
        for change in self.changes:
            record = {
                "step": self.step,
                "time": now,
                "key": change.key,
                "old": change.old,
                "new": change.new,
            }
            if change.what:
                record["what"] = change.what
            records.append(record)
        if records:
            append_records(self._folder.path / CHANGES, records)


def _recorded_identity(folder: RunDir) -> RunIdentity | None:
    """Return the settings that a run of an earlier version wrote, which knew no fingerprints.

    None if their file is gone.
    """
    if not folder.config.exists():
        return None
    try:
        return RunIdentity(config=read_json_object(folder.config))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder.config} cannot be read ({error}), so nothing says what the checkpoint was"
            " trained with; put the file back, or start without --resume"
        ) from None


def check_resumed(
    model: type[BaseModel],
    old: RunIdentity,
    new: RunIdentity,
    *,
    accepted: Collection[str] = (),
    checkpoint: str,
    advice: str = _ADVICE,
) -> list[Difference]:
    """Return what a resumed run changes, for the record.

    Args:
        model: class of the configuration's root section.
        old: the checkpoint's.
        new: the resumed run's.
        accepted: keys, or sections of keys, that may differ although they define what is trained.
        checkpoint: its name in messages.
        advice: what to do, with ``{keys}`` for those that differ.

    Raises:
        CheckpointError: keys that define what is trained differ; names each with both values.
    """
    defining = content_differences(old, new)
    defining += value_differences(model, old.config, new.config, may_change=False)

    refused = []
    for difference in defining:
        if not is_named(difference.key, accepted):
            refused.append(difference)
    if refused:
        lines = "\n".join(f"  {difference}" for difference in refused)
        keys = ",".join(difference.key for difference in refused)
        raise CheckpointError(
            f"{checkpoint} is of other settings, which define what is"
            f" trained:\n{lines}\n{advice.format(keys=keys)}"
        )
    return defining + value_differences(model, old.config, new.config, may_change=True)


def restore(
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
