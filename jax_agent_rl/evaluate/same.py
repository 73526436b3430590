"""``jax-agent-rl same``: the first thing in which two runs differ.

::

    what decides a run   provenance.jsonl, config.json              ─► all differences
    what came out of it  step by step: trajectories, metrics,       ─► the first difference
                         weights, where both have a checkpoint
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jax_agent_rl.learner.checkpoint import read_notes
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.observe.run_dir import (
    Record,
    Records,
    has_step,
    read_metrics,
    read_trajectories,
)
from jax_agent_rl.runtime.policy_choice import checkpoint_folder, recorded_tree
from jax_agent_rl.runtime.provenance import PROVENANCE

NOT_COMPARED = ("run_dir",)
"""Keys of the configuration that differ between any two runs."""

_TIMES = ("seconds", "per_second", "busy_share", "idle_share", "slot_occupancy")
"""Parts of names of metrics that say how fast something was."""

_SCHEDULING = ("prefill_tokens", "cached_tokens", "recomputed_tokens")
"""Metrics that depend on which requests arrived together."""

_OUTCOMES = ("prompt_ids", "response_ids", "rollout_logprobs", "old_logprobs", "reward")
"""Fields of a trajectory that are compared, in the order in which they come about."""

_MISSING = "not there"


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """Something that is not the same in two runs.

    Attributes:
        where: its place.
        first, second: what both runs have there.
    """

    where: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.where}: {_brief(self.first)} | {_brief(self.second)}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:70]} … {text[-20:]}"


@dataclass(kw_only=True)
class RunComparison:
    """The result of ``same``.

    Attributes:
        causes: everything that differs of what decides a run.
        outcome: the first difference of what came out of it; None if there is none.
        steps: number of steps that are the same.
        notes: what could not be compared, and why.
    """

    causes: list[RunDifference] = field(default_factory=list)
    outcome: RunDifference | None = None
    steps: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether the same came out of both, whatever decided them."""
        return self.outcome is None

    def summary(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"same": self.is_same, **asdict(self)}


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Compare two run folders.

    Raises:
        CheckpointError, ConfigError: one of them is not a run folder, or is damaged.
    """
    result = RunComparison()
    result.causes += _compare_provenance(first, second, result.notes)
    first_tree = recorded_tree(first)
    second_tree = recorded_tree(second)
    result.causes += differences(
        _without(first_tree, NOT_COMPARED), _without(second_tree, NOT_COMPARED), "config"
    )

    first_steps = _Steps(first, checkpoint_folder(first, first_tree))
    second_steps = _Steps(second, checkpoint_folder(second, second_tree))
    for pair in itertools.zip_longest(first_steps, second_steps):
        result.outcome = _compare_steps(*pair)
        if result.outcome is not None:
            break
        result.steps += 1
    return result


def _compare_provenance(first: Path, second: Path, notes: list[str]) -> list[RunDifference]:
    """Compare the first line of both files: a resumed run has one for each process."""
    lines = []
    for run in (first, second):
        records = list(Records(file=run / PROVENANCE, is_valid=has_step))
        if not records:
            notes.append(f"{run} has no {PROVENANCE}: packages and machines were not compared")
            return []
        if len(records) > 1:
            notes.append(
                f"{run} was resumed {len(records) - 1} times: the provenance of its first process"
                " was compared"
            )
        lines.append(records[0])
    first_line, second_line = lines
    return list(differences(first_line, second_line, "provenance"))


def _without(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


def differences(first: Any, second: Any, where: str) -> Iterator[RunDifference]:
    """Yield the leaves in which two JSON values differ; lists are leaves."""
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        if first != second:
            yield RunDifference(where=where, first=first, second=second)
        return
    for name in [*first, *(name for name in second if name not in first)]:
        yield from differences(
            first.get(name, _MISSING), second.get(name, _MISSING), f"{where}.{name}"
        )


# --- what came out --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What a run folder holds of a step.

    Attributes:
        trajectories: those that were recorded, of training, in the order of the file.
        arrays: of its checkpoint, by name, with their checksums; None: it has no checkpoint.
    """

    number: int
    metrics: Record
    trajectories: Sequence[Record]
    arrays: Mapping[str, Any] | None


class _Steps:
    """The steps of a run, one in memory at a time.

    Args:
        run: its folder.
        checkpoints: the folder of its checkpoints.
    """

    def __init__(self, run: Path, checkpoints: Path | str) -> None:
        self._run = run
        self._checkpoints = checkpoints

    def __iter__(self) -> Iterator[_Step]:
        saved_steps = complete_steps(self._checkpoints)
        trajectories = self._trajectories()
        by_step = itertools.groupby(trajectories, key=lambda record: record["step"])
        waiting = next(by_step, None)
        for line in read_metrics(self._run / "metrics.jsonl"):
            if line["kind"] != "step":
                continue
            number = line["step"]
            records: list[Record] = []
            if waiting is not None and waiting[0] == number:
                records = list(waiting[1])
                waiting = next(by_step, None)
            arrays = None
            if number in saved_steps:
                arrays = read_notes(self._checkpoints, number).arrays
            yield _Step(number=number, metrics=line, trajectories=records, arrays=arrays)

    def _trajectories(self) -> Iterator[Record]:
        for record in read_trajectories(self._run / "trajectories.jsonl"):
            if record["split"] == "train":
                yield record


def _compare_steps(first: _Step | None, second: _Step | None) -> RunDifference | None:
    """Return the first difference of two steps, in the order of what a step does."""
    if first is None or second is None:
        present = first or second
        assert present is not None
        return RunDifference(
            where=f"step {present.number}",
            first=_MISSING if first is None else "recorded",
            second=_MISSING if second is None else "recorded",
        )

    where = f"step {first.number}"
    for number, pair in enumerate(
        itertools.zip_longest(first.trajectories, second.trajectories), start=1
    ):
        difference = _compare_trajectories(*pair, f"{where}, trajectory {number}")
        if difference is not None:
            return difference

    difference = next(
        differences(_outcomes(first.metrics), _outcomes(second.metrics), f"{where}, metrics"), None
    )
    if difference is not None or first.arrays is None or second.arrays is None:
        return difference
    return next(differences(first.arrays, second.arrays, f"{where}, weights"), None)


def _compare_trajectories(
    first: Record | None, second: Record | None, where: str
) -> RunDifference | None:
    """Return the first difference of two recorded trajectories."""
    if first is None or second is None:
        return RunDifference(
            where=where,
            first=_MISSING if first is None else first["trajectory_id"],
            second=_MISSING if second is None else second["trajectory_id"],
        )

    where = f"{where} ({first['trajectory_id']})"
    for name in _OUTCOMES:
        old = first.get(name)
        new = second.get(name)
        if isinstance(old, list) and isinstance(new, list):
            for position, values in enumerate(itertools.zip_longest(old, new, fillvalue=_MISSING)):
                if values[0] != values[1]:
                    return RunDifference(
                        where=f"{where}, {name}[{position}]", first=values[0], second=values[1]
                    )
        elif old != new:
            return RunDifference(where=f"{where}, {name}", first=old, second=new)
    return None


def _outcomes(metrics: Record) -> dict[str, Any]:
    """Return the metrics of a step that do not depend on time."""
    outcomes = {}
    for name, value in metrics.items():
        depends_on_time = any(part in name for part in (*_TIMES, *_SCHEDULING))
        if not depends_on_time:
            outcomes[name] = value
    return outcomes
