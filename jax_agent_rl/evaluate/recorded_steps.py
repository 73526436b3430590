"""The training steps of a run folder, as the learner got them: groups of exact trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.errors import DataError
from jax_agent_rl.observe.run_dir import (
    Record,
    read_metrics,
    read_trajectories,
    restore_trajectory,
)
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
    if trajectories.notes:
        raise DataError("; ".join(trajectories.notes) + ": a step may lack trajectories")

    steps = []
    for number in range(first, last + 1):
        if number not in lines:
            raise DataError(
                f"{run} has no record of step {number}, which comes between the checkpoint and"
                f" step {last}"
            )
        records = records_of.get(number, [])
        _require_complete(number, lines[number], records)
        step = RecordedStep(
            number=number,
            metrics=lines[number],
            records=records,
            groups=_groups(records, frozen=config.agent.role_models),
        )
        steps.append(step)
    return steps


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


def _require_complete(number: int, line: Record, records: Sequence[Record]) -> None:
    """Refuse a step of which the folder does not hold everything that was learned from."""
    expected = line.get("trajectories")
    if expected is None:
        raise DataError(
            f"step {number} was recorded by an earlier version, which rounded log-probs"
        )
    if len(records) < expected:
        raise DataError(
            f"{len(records)} of the {counted(expected, 'trajectory')} of step {number} are on"
            " record; set trainer.keep_trajectories=null in runs whose steps are to be repeated"
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
    if any(record["prompt_media"].values()):
        return "images or videos of its prompt"
    for turn in record["turns"]:
        if turn.get("routed_positions"):
            return "the engine's choices of experts"
        for call in turn["tool_calls"]:
            if any(call.get("media", {}).values()):
                return "images or videos of a tool"
    return ""


def _groups(records: Sequence[Record], *, frozen: Collection[str]) -> list[Group]:
    """Return the groups of a step.

    Args:
        frozen: names of roles that other models play.
    """
    groups = []
    for group_id, of_group in itertools.groupby(records, key=lambda record: record["group_id"]):
        members = []
        frozen_members = []
        for record in of_group:
            trajectory = restore_trajectory(record)
            if trajectory.role in frozen:
                frozen_members.append(trajectory)
            else:
                members.append(trajectory)
        groups.append(
            Group(group_id=group_id, trajectories=tuple(members), frozen=tuple(frozen_members))
        )
    return groups
