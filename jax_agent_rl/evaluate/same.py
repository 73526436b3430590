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

from jax_agent_rl.evaluate.step_comparison import depends_on_time, is_equal
from jax_agent_rl.learner.checkpoint import read_notes
from jax_agent_rl.learner.checkpoint_steps import complete_steps
from jax_agent_rl.observe.run_dir import (
    LEARNER_INPUTS,
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

_OUTCOMES = (
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "reward",
    "greedy_reward",
    LEARNER_INPUTS,
    "old_logprobs",
)
"""Fields of a sequence that are compared, in the order in which they come about.

Files of the learner's inputs are named by their content: equal names are equal arrays.
"""

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
        """Whether the same came out of both, whatever decided them; nothing is not the same."""
        return self.outcome is None and self.steps > 0

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

    for steps in (first_steps, second_steps):
        result.notes += steps.notes()
    if result.outcome is None and not result.steps:
        result.notes.append("neither run has a recorded step: nothing that came out was compared")
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
        if not is_equal(first, second):
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
        self._metrics = read_metrics(run / "metrics.jsonl")
        self._trajectories = read_trajectories(run / "trajectories.jsonl")

    def notes(self) -> list[str]:
        """Return which lines the last iteration left out."""
        notes = []
        for note in (*self._metrics.notes, *self._trajectories.notes):
            notes.append(f"{self._run}: {note}")
        return notes

    def __iter__(self) -> Iterator[_Step]:
        saved_steps = complete_steps(self._checkpoints)
        trained = self._trained()
        by_step = itertools.groupby(trained, key=lambda record: record["step"])
        waiting = next(by_step, None)
        for line in self._metrics:
            if line["kind"] != "step":
                continue
            number = line["step"]
            while waiting is not None and waiting[0] < number:
                waiting = next(by_step, None)  # its line of metrics is missing
            records: list[Record] = []
            if waiting is not None and waiting[0] == number:
                records = list(waiting[1])
                waiting = next(by_step, None)
            arrays = None
            if number in saved_steps:
                arrays = read_notes(self._checkpoints, number).arrays
            yield _Step(number=number, metrics=line, trajectories=records, arrays=arrays)

    def _trained(self) -> Iterator[Record]:
        for record in self._trajectories:
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

    if first.number != second.number:  # one of them lacks a line
        return RunDifference(where="next step", first=first.number, second=second.number)

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
    first_segments = first["segments"]
    second_segments = second["segments"]
    if len(first_segments) != len(second_segments):
        return RunDifference(
            where=f"{where}, number of segments",
            first=len(first_segments),
            second=len(second_segments),
        )

    segments = zip(first_segments, second_segments, strict=True)
    for number, (old, new) in enumerate(segments, start=1):
        difference = _compare_sequences(old, new, f"{where}, segment {number}")
        if difference is not None:
            return difference
    return _compare_sequences(first, second, where)


def _compare_sequences(first: Record, second: Record, where: str) -> RunDifference | None:
    """Return the first difference of two segments, or of trajectories but for their segments."""
    for name in _OUTCOMES:
        old = first.get(name)
        new = second.get(name)
        if name == LEARNER_INPUTS and None in (old, new):
            continue  # one of them was recorded in part, or by an earlier version
        if name == "greedy_reward" and not (name in first and name in second):
            continue  # likewise; null is a greedy rollout that was lost
        if isinstance(old, list) and isinstance(new, list):
            for position, values in enumerate(itertools.zip_longest(old, new, fillvalue=_MISSING)):
                if not is_equal(*values):
                    return RunDifference(
                        where=f"{where}, {name}[{position}]", first=values[0], second=values[1]
                    )
        elif not is_equal(old, new):
            return RunDifference(where=f"{where}, {name}", first=old, second=new)
    return None


def _outcomes(metrics: Record) -> dict[str, Any]:
    """Return the metrics of a step that do not depend on time."""
    outcomes = {}
    for name, value in metrics.items():
        if not depends_on_time(name):
            outcomes[name] = value
    return outcomes
