"""The training steps of a run folder, as the learner got them: groups of exact trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.errors import DataError
from jax_agent_rl.observe.attachments import Attachments
from jax_agent_rl.observe.run_dir import (
    ATTACHMENTS,
    LEARNER_INPUTS,
    Record,
    Records,
    has_media,
    has_step,
    read_metrics,
    read_trajectories,
    restore_trajectory,
)
from jax_agent_rl.runtime.resume import CHANGES
from jax_agent_rl.types import Group, Trajectory
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
            groups=_groups(records, config, Attachments(run / ATTACHMENTS)),
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
            if has_media(sequence, counted=True):
                raise DataError(
                    f"{record['trajectory_id']} of step {number} was learned from with images or"
                    " videos, which an earlier version did not store"
                )


def _groups(records: Sequence[Record], config: Config, attachments: Attachments) -> list[Group]:
    """Return the groups of a step, as the learner got them.

    Args:
        config: of the run.
        attachments: of the run.

    Raises:
        DataError: a file is missing or damaged, or an earlier version did not store it.
    """
    group_records: dict[str, list[Record]] = {}
    for record in records:
        group_records.setdefault(record["group_id"], []).append(record)

    groups = []
    for group_id, of_group in group_records.items():
        members = []
        member_records = []
        frozen_members = []
        for record in of_group:
            trajectory = restore_trajectory(record, attachments=attachments)
            if trajectory.role in config.agent.role_models:
                frozen_members.append(trajectory)
                continue
            members.append(_with_learner_inputs(trajectory, record, attachments))
            member_records.append(record)

        greedy_reward = None
        if config.algorithm.adv_estimator == "remax":
            greedy_reward = _greedy_reward(group_id, member_records)
        groups.append(
            Group(
                group_id=group_id,
                trajectories=tuple(members),
                frozen=tuple(frozen_members),
                greedy_reward=greedy_reward,
            )
        )
    return groups


def _with_learner_inputs(
    trajectory: Trajectory, record: Record, attachments: Attachments
) -> Trajectory:
    """Return a restored trajectory with what the learner read beside its record."""
    name = record.get(LEARNER_INPUTS)
    if name is not None:
        trajectory = attachments.read_learner_inputs(name, trajectory)

    recorded_sequences = (*record["segments"], record)
    sequences = (*trajectory.segments, trajectory)
    for recorded, sequence in zip(recorded_sequences, sequences, strict=True):
        for turn_record, turn in zip(recorded["turns"], sequence.turns, strict=True):
            expected = turn_record.get("routed_positions", 0)
            routed = turn.output.routed_experts
            positions = routed.shape[0] if routed else 0
            if positions != expected:
                raise DataError(
                    f"{trajectory.trajectory_id} was learned from with the experts that the engine"
                    f" chose at {counted(expected, 'position')} of a turn, and {positions} are on"
                    " record; earlier versions stored none"
                )
    return trajectory


def _greedy_reward(group_id: str, records: Sequence[Record]) -> float | None:
    """Return the reward of a prompt's greedy rollout (ReMax); None if that was lost."""
    rewards = set()
    for record in records:
        if "greedy_reward" not in record:
            raise DataError(
                f"algorithm.adv_estimator=remax compares group {group_id} with a greedy rollout,"
                " whose reward an earlier version did not store"
            )
        rewards.add(record["greedy_reward"])
    if len(rewards) > 1:
        raise DataError(
            f"the trajectories of group {group_id} have several greedy_reward on record: {rewards}"
        )
    return next(iter(rewards), None)
