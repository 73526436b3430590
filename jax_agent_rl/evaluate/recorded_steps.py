"""The training steps of a run folder, as the learner got them: groups of exact trajectories."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.errors import DataError
from jax_agent_rl.observe.attachments import Attachments
from jax_agent_rl.observe.run_dir import (
    ATTACHMENTS,
    Record,
    Records,
    has_media,
    has_step,
    read_metrics,
    read_trajectories,
    restore_trajectory,
)
from jax_agent_rl.runtime.resume import CHANGES
from jax_agent_rl.types import Group
from jax_agent_rl.utils.text import counted


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """What a run folder holds of one training step.

    Attributes:
        number: of the step, from 1.
        metrics: its line of ``metrics.jsonl``.
        records: its trajectories, in the order in which the learner got them.
        groups: the same, restored, with the rewards that were learned from.
    """

    number: int
    metrics: Record
    records: Sequence[Record]
    groups: Sequence[Group]


def read_steps(run: Path, config: Config, first: int, last: int) -> list[RecordedStep]:
    """Return the recorded training steps from ``first`` to ``last``.

    Raises:
        DataError: a step is not on record, or not everything that was learned from.
    """
    _require_recordable(config)
    lines: dict[int, Record] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        if line["kind"] == "step":
            lines[line["step"]] = line
    if last not in lines:
        known = f"1 to {max(lines)}" if lines else "none"
        raise DataError(f"{run} has no step {last}; its recorded steps: {known}")

    records_of: dict[int, list[Record]] = {}
    trajectories = read_trajectories(run / "trajectories.jsonl")
    for record in trajectories:
        if record["split"] == "train" and first <= record["step"] <= last:
            records_of.setdefault(record["step"], []).append(record)

    steps = []
    for number in range(first, last + 1):
        if number not in lines:
            raise DataError(
                f"{run} has no record of step {number}, which comes between the checkpoint and"
                f" step {last}"
            )
        records = records_of.get(number, [])
        _require_complete(number, lines[number], records, trajectories.notes)
        step = RecordedStep(
            number=number,
            metrics=lines[number],
            records=records,
            groups=_groups(
                records,
                frozen=config.agent.role_models,
                attachments=Attachments(run / ATTACHMENTS),
            ),
        )
        steps.append(step)
    return steps


def later_changes(run: Path, step: int) -> list[str]:
    """Return notes about settings that a run was resumed with after a step.

    ``config.json`` holds the new ones, with which the step was not computed.
    """
    notes = []
    for change in Records(file=run / CHANGES, is_valid=has_step):
        if change["step"] >= step:
            notes.append(
                f"{change.get('key')} was {change.get('old')} in step {step}, and was changed after"
                f" step {change['step']}: the step is repeated with {change.get('new')}"
            )
    return notes


def _require_recordable(config: Config) -> None:
    """Refuse a run that learned from more than its trajectories."""
    if config.algorithm.adv_estimator == "remax":
        raise DataError(
            "algorithm.adv_estimator=remax compares with greedy rollouts, which a run folder does"
            " not hold: its steps cannot be repeated"
        )
    teachers = [] if config.distill is None else config.distill.teachers
    for teacher in teachers:
        if teacher.url is not None:
            raise DataError(
                f"the teacher at {teacher.url} gave log-probs, which a run folder does not hold:"
                " the run's steps cannot be repeated"
            )


def _require_complete(
    number: int, line: Record, records: Sequence[Record], notes: Sequence[str]
) -> None:
    """Refuse a step of which the folder does not hold just what was learned from.

    Args:
        notes: which lines of ``trajectories.jsonl`` were left out.
    """
    expected = line.get("trajectories")
    if expected is None:
        raise DataError(
            f"step {number} was recorded by an earlier version, which rounded log-probs"
        )
    if len(records) < expected:
        left_out = "".join(f"; {note}" for note in notes)
        raise DataError(
            f"{len(records)} of the {counted(expected, 'trajectory')} of step {number} are on"
            " record; set trainer.keep_trajectories=null in runs whose steps are to be repeated"
            f"{left_out}"
        )
    if len(records) > expected:
        raise DataError(
            f"{counted(len(records), 'trajectory')} of step {number} are on record, which learned"
            f" from {expected}: a resumed run is repeating it, or was interrupted then; wait, or"
            " resume it once more"
        )
    for record in records:
        for sequence in (*record["segments"], record):
            missing = _missing(sequence)
            if missing:
                raise DataError(
                    f"{record['trajectory_id']} of step {number} was learned from with {missing},"
                    " which a run folder does not hold"
                )


def _missing(record: Record) -> str:
    """Return what a sequence was learned from beside its record; empty if nothing."""
    if has_media(record, counted=True):
        return "images or videos, which an earlier version did not store"
    if any(turn.get("routed_positions") for turn in record["turns"]):
        return "the engine's choices of experts"
    return ""


def _groups(
    records: Sequence[Record], *, frozen: Collection[str], attachments: Attachments
) -> list[Group]:
    """Return the groups of a step.

    Args:
        frozen: names of roles that other models play.
        attachments: the images and videos of the run.

    Raises:
        DataError: an image or a video cannot be read.
    """
    group_records: dict[str, list[Record]] = {}
    for record in records:
        group_records.setdefault(record["group_id"], []).append(record)

    groups = []
    for group_id, of_group in group_records.items():
        members = []
        frozen_members = []
        for record in of_group:
            trajectory = restore_trajectory(record, attachments=attachments)
            if trajectory.role in frozen:
                frozen_members.append(trajectory)
            else:
                members.append(trajectory)
        groups.append(
            Group(group_id=group_id, trajectories=tuple(members), frozen=tuple(frozen_members))
        )
    return groups
