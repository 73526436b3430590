"""A training step that was repeated, compared number by number with what was recorded of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_agent_rl.evaluate.recorded_steps import RecordedStep
from jax_agent_rl.learner.checkpoint import (
    Checkpointer,
    differing_arrays,
    named_arrays,
    read_notes,
)
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.observe.run_dir import Record, expand, split_token_values
from jax_agent_rl.types import Group, Trajectory

ROUNDING = 1e-3
"""Largest relative difference that another mesh or another machine explains, in float32."""

SMALLEST = 1e-3
"""Differences between smaller numbers are relative to this one."""

_TIME_PARTS = ("seconds", "per_second", "busy_share", "idle_share", "slot_occupancy")
"""Parts of names of metrics that say how fast something was."""

_SCHEDULING_PARTS = ("prefill_tokens", "cached_tokens", "recomputed_tokens")
"""Parts of names of metrics that depend on which requests arrived together."""


def depends_on_time(name: str) -> bool:
    """Return whether a metric, or a field of a record, may differ in a run that is repeated."""
    return any(part in name for part in (*_TIME_PARTS, *_SCHEDULING_PARTS))


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two recorded values are the same; NaN is the same as NaN."""
    if isinstance(first, float) and isinstance(second, float):
        if math.isnan(first) and math.isnan(second):
            return True
    return bool(first == second)


@dataclass(kw_only=True)
class StepComparison:
    """Recorded and repeated numbers of one kind.

    Attributes:
        what: what the numbers are.
        compared: how many there are.
        equal: how many of them are the same.
        largest: largest relative difference; infinite if one of two numbers is none.
        first: the first difference, with its place and both values; None if there is none.
    """

    what: str
    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    first: str | None = None

    @property
    def is_rounding(self) -> bool:
        """Whether no difference is larger than :data:`ROUNDING`."""
        return self.largest <= ROUNDING

    def add(self, where: str, recorded: float | None, repeated: float | None) -> None:
        """Compare two numbers; None is one that was not computed, or a token's that is not finite.

        Args:
            where: their place in the step.
        """
        self.compared += 1
        if is_equal(recorded, repeated):
            self.equal += 1
            return
        self.add_difference(
            f"{where} was {recorded}, is {repeated}", _relative_difference(recorded, repeated)
        )

    def add_difference(self, description: str, largest: float) -> None:
        """Note two numbers, or arrays, that differ."""
        self.largest = max(self.largest, largest)
        if self.first is None:
            self.first = description

    def summary(self) -> dict[str, Any]:
        """Return it as JSON, which has no infinite numbers: ``largest`` is null then."""
        largest = self.largest if math.isfinite(self.largest) else None
        return {**asdict(self), "largest": largest}


def _relative_difference(recorded: float | None, repeated: float | None) -> float:
    if recorded is None or repeated is None:
        return math.inf
    if not (math.isfinite(recorded) and math.isfinite(repeated)):
        return math.inf
    scale = max(abs(recorded), abs(repeated), SMALLEST)
    return abs(recorded - repeated) / scale


def compare_rewards(step: RecordedStep, scored_groups: Sequence[Group]) -> StepComparison:
    """Compare the rewards, penalties of ``algorithm.shaping`` included.

    Args:
        scored_groups: the trajectories that could be scored again.
    """
    comparison = StepComparison(what="rewards")
    scored = {t.trajectory_id: t for group in scored_groups for t in group.trajectories}
    for group in step.groups:
        for trajectory in group.trajectories:
            repeated = scored.get(trajectory.trajectory_id)
            if repeated is not None:
                comparison.add(trajectory.trajectory_id, trajectory.reward, repeated.reward)
    return comparison


def compare_token_values(step: RecordedStep, result: UpdateResult) -> list[StepComparison]:
    """Compare the advantages (recorded with six digits) and the learner's log-probs by token."""
    records = {record["trajectory_id"]: record for record in step.records}
    advantages = StepComparison(what="advantages")
    logprobs = StepComparison(what="log-probs of the learner")
    comparisons = {"advantages": advantages, "old_logprobs": logprobs}
    for group in step.groups:
        for trajectory in group.trajectories:
            record = records[trajectory.trajectory_id]
            values = result.tokens.get(trajectory.trajectory_id, {})
            sequences = (*trajectory.segments, trajectory)
            recorded_sequences = (*record["segments"], record)
            parts = split_token_values(trajectory, values)
            for sequence, recorded, part in zip(sequences, recorded_sequences, parts, strict=True):
                for name, comparison in comparisons.items():
                    _compare_sequence(comparison, sequence, recorded, part, name)
    return [comparison for comparison in comparisons.values() if comparison.compared]


def _compare_sequence(
    comparison: StepComparison,
    sequence: Trajectory,
    recorded: Record,
    repeated: Mapping[str, Any],
    name: str,
) -> None:
    """Compare the numbers of a name along the response ids of a sequence."""
    if name not in recorded and name not in repeated:
        return
    missing = [None] * len(sequence.response_ids)
    old_values = recorded.get(name, missing)
    new_values = missing
    if name in repeated:
        new_values = expand(repeated[name], sequence, exact=name == "old_logprobs")
    for position, (old, new) in enumerate(zip(old_values, new_values, strict=True)):
        comparison.add(f"{sequence.trajectory_id}, response id {position}", old, new)


def compare_metrics(step: RecordedStep, result: UpdateResult) -> StepComparison:
    """Compare what the learner reports: loss, gradient norm, ratios, KL, entropy and more."""
    comparison = StepComparison(what="metrics")
    for name, repeated in result.metrics.items():
        if not depends_on_time(name):
            comparison.add(name, step.metrics.get(name), repeated)
    return comparison


def compare_weights(
    checkpointer: Checkpointer, folder: Path | str, step: int, state: Any
) -> StepComparison:
    """Compare weights and optimizer after a step with its checkpoint, array by array.

    Args:
        folder: of the checkpoints.
        step: one that has a checkpoint.
        state: of the learner after it.
    """
    notes = read_notes(folder, step)
    comparison = StepComparison(what="weights and optimizer", compared=len(notes.arrays))
    differing = differing_arrays(state, notes)
    comparison.equal = comparison.compared - len(differing)
    if not differing:
        return comparison

    _, saved_state, _ = checkpointer.restore(state, step=step)
    saved_arrays = named_arrays(saved_state)
    repeated_arrays = named_arrays(state)
    for name in differing:
        difference = _array_difference(saved_arrays[name], repeated_arrays[name])
        comparison.add_difference(f"{name} differs by {difference:.1e} of its maximum", difference)
    return comparison


def _array_difference(saved: jax.Array, repeated: jax.Array) -> float:
    """Return the largest difference between two arrays, relative to the largest saved element.

    It is infinite if one of them holds what is not finite.
    """
    old = np.asarray(saved, np.float64)
    new = np.asarray(repeated, np.float64)
    if not (np.isfinite(old).all() and np.isfinite(new).all()):
        return math.inf
    largest = float(np.max(np.abs(old), initial=0.0))
    difference = float(np.max(np.abs(old - new), initial=0.0))
    return difference / largest if largest else difference


def first_difference(comparisons: Sequence[StepComparison]) -> str | None:
    """Return what differs first, in the order in which a step computes it."""
    for comparison in comparisons:
        if comparison.first is not None:
            return f"{comparison.what}: {comparison.first}"
    return None
