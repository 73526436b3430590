"""The run folder, written and read: JSON Lines files that only grow, but are cut back when a run resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_agent_rl.observe.schema import is_trace_record, is_trajectory_record
from jax_agent_rl.observe.selection import sample
from jax_agent_rl.types import FinishReason, Fork, StopReason, TokenOutput, Trajectory, Turn
from jax_agent_rl.utils.files import write_atomically, writing
from jax_agent_rl.validation import json_line

Numbers = Sequence[float] | np.ndarray
TokenValues = Mapping[str, Mapping[str, Numbers]]
"""By trajectory id, named numbers per token with loss."""
DISAGREEMENT = "disagreement.json"
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Record = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
"""Turns ids into text, special tokens included."""


class RunDir:
    """Names and writes the files of one run.

    ``config.json, metrics.jsonl, trajectories.jsonl, traces.jsonl, summary.json, reward.png, checkpoints/``, and
    ``disagreement.json`` if engine and learner disagreed.

    Args:
        path: created if it does not exist.
        keep_trajectories: maximum number written per step and split, see :func:`jax_agent_rl.observe.selection.sample`.
    """

    def __init__(self, path: Path, *, keep_trajectories: int | None = None) -> None:
        self.path = path
        self.keep_trajectories = keep_trajectories
        self.path.mkdir(parents=True, exist_ok=True)
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories.jsonl"
        self.traces = path / "traces.jsonl"
        self.summary = path / "summary.json"
        self.disagreement = path / DISAGREEMENT
        self.plot = path / "reward.png"
        self.checkpoints = path / "checkpoints"

    # Writing raises StorageError if the disk is full. The next resume removes a line written in part.

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``."""
        append_records(self.metrics, [record])

    def add_trajectories(
        self, step: int, split: str, trajectories: Sequence[Trajectory], *, token_values: TokenValues = _NOTHING
    ) -> None:
        """Append trajectories, or a sample of them.

        Args:
            step: the step they were trained in, or evaluated after.
            split: ``train`` or ``heldout``.
            trajectories: all of that step and split.
            token_values: ``UpdateResult.tokens``.
        """
        kept = sample(
            trajectories, self.keep_trajectories, reward=lambda t: t.reward, group=lambda t: t.group_id, seed=step
        )
        append_records(
            self.trajectories,
            (
                trajectory_record(t, step=step, split=split, token_values=token_values.get(t.trajectory_id, {}))
                for t in kept
            ),
        )

    def cut_back(self, step: int, *, evaluated: int) -> None:
        """Remove records after ``step``, and evaluations after step ``evaluated``: both are repeated.

        The summary and a recorded disagreement go, too: they are of a run that has not ended.
        """

        def stays(record: Mapping[str, Any]) -> bool:
            held_out = record.get("kind") == "evaluation" or record.get("split") == "heldout" or record.get("validate")
            return record["step"] <= (evaluated if held_out else step)

        self.summary.unlink(missing_ok=True)
        self.disagreement.unlink(missing_ok=True)
        for file in (self.metrics, self.trajectories, self.traces):
            if file.exists():
                write_atomically(file, "".join(json_line(record) for record in read_records(file) if stays(record)))

    def write_json(self, file: Path, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_atomically(file, json.dumps(content, indent=2) + "\n")


def trajectory_record(
    trajectory: Trajectory, *, step: int, split: str, token_values: Mapping[str, Numbers] = _NOTHING
) -> dict[str, Any]:
    """Return a trajectory as JSON: ids, mask, log-probs, versions, reward, messages.

    Turns omit derived arrays; images and videos are only counted.

    Args:
        trajectory: what is recorded.
        step: its training step.
        split: ``train`` or ``heldout``.
        token_values: ``advantages`` and ``old_logprobs`` of its tokens with loss; they are laid out along
            ``response_ids``, 0 at inserted ids without loss, null at constrained ids and where unknown.
    """
    record = {"step": step, "split": split}
    record |= {f.name: getattr(trajectory, f.name) for f in fields(trajectory)}  # not asdict(), which copies every id
    record["fork"] = asdict(trajectory.fork) if trajectory.fork else None
    record["prompt_media"] = {kind: len(items) for kind, items in trajectory.prompt_media.items()}
    at, record["segments"] = 0, []
    for segment in trajectory.segments:
        end = at + sum(segment.loss_mask)
        part = {name: values[at:end] for name, values in token_values.items()}
        record["segments"].append(trajectory_record(segment, step=step, split=split, token_values=part))
        at = end
    record |= {name: _expand(values[at:], trajectory) for name, values in token_values.items()}
    record["turns"] = [
        {
            "sampled": len(turn.output.token_ids),
            "appended": len(turn.appended_ids),
            "learn_appended": turn.learn_appended,
            "constrained": list(map(int, turn.output.constrained)),
            "supports": list(turn.output.supports),
            "stop_reason": turn.output.stop_reason,
            "cached_tokens": turn.output.cached_tokens,
            "score": turn.score,
            "number": turn.number,
            "note": turn.note,
            "tool_calls": [
                asdict(replace(call, media={})) | {"media": {kind: len(items) for kind, items in call.media.items()}}
                for call in turn.tool_calls
            ],
        }
        for turn in trajectory.turns
    ]
    record["row"] = {key: value for key, value in trajectory.row.items() if key != "prompt"}  # it is in messages
    record["rollout_logprobs"] = [round(x, 6) for x in trajectory.rollout_logprobs]
    return record


def restore_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Restore a trajectory from its record: ids, rewards, forks and when turns were sampled, as far as it says.

    Fields that are null may be missing, as in the rows of ``data.reader``.
    """
    fork = record.get("fork")
    return Trajectory.from_turns(
        prompt_ids=record["prompt_ids"],
        turns=list(_turns(record)),
        trajectory_id=record["trajectory_id"],
        group_id=record["group_id"],
        agent_name=record["agent_name"],
        finish_reason=FinishReason(record["finish_reason"]),
        reward=record["reward"],
        segments=tuple(restore_trajectory(segment) for segment in record["segments"]),
        fork=Fork(**fork) if fork else None,
        history_window=record.get("history_window"),
        role=record.get("role"),
        adapter=record.get("adapter"),
    )


def _turns(record: Mapping[str, Any]) -> Iterator[Turn]:
    at = 0
    for turn in record["turns"]:
        end = at + turn["sampled"]
        output = TokenOutput(
            token_ids=tuple(record["response_ids"][at:end]),
            log_probs=tuple(record["rollout_logprobs"][at:end]),
            policy_versions=tuple(record["policy_versions"][at:end]),
            stop_reason=StopReason(turn["stop_reason"]),
            context_digest="",
            # records of earlier versions omit both
            constrained=tuple(map(bool, turn.get("constrained", ()))),
            supports=tuple(turn.get("supports", ())),
        )
        at = end + turn["appended"]
        appended = tuple(record["response_ids"][end:at])
        # records of earlier versions have neither
        yield Turn(output=output, appended_ids=appended, number=turn.get("number"), note=turn.get("note", ""))


def _expand(values: Numbers, trajectory: Trajectory) -> list[float | None]:
    """Spread one number per id with loss to one per response id."""
    rest = iter(values)
    masks = zip(trajectory.loss_mask, trajectory.response_mask, strict=True)
    placed = (float(next(rest)) if mine else math.nan if sampled else 0.0 for mine, sampled in masks)
    return [round(value, 6) if math.isfinite(value) else None for value in placed]


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return all records of a JSON Lines file that have a step; skip other lines, such as one cut off by a crash."""
    return list(Records(file=file, is_valid=has_step))


def append_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append lines of JSON; raises StorageError if the disk is full."""
    with writing(file), file.open("a", encoding="utf-8") as stream:
        for record in records:
            stream.write(json_line(record))


@dataclass(kw_only=True)
class Records:
    """The records of a JSON Lines file, as far as they can be read: the file may be growing, truncated or damaged.

    Every iteration reads the file again and holds one record at a time. Lines that are no record of its kind are
    skipped and counted; :attr:`notes` reports them.

    Attributes:
        file: need not exist.
        is_valid: whether an object has the fields of a record.
        damaged: lines without a JSON object, skipped by the last iteration.
        invalid: objects it skipped, perhaps written by another version.
    """

    file: Path
    is_valid: Callable[[Record], bool]
    damaged: int = 0
    invalid: int = 0

    def __iter__(self) -> Iterator[Record]:
        self.damaged = self.invalid = 0
        if not self.file.exists():
            return
        with self.file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                if (record := _object(line)) is None:
                    self.damaged += 1
                elif not self.is_valid(record):
                    self.invalid += 1
                else:
                    yield record

    @property
    def notes(self) -> list[str]:
        """The lines that the last iteration skipped, as messages."""
        reasons = {"cut off or damaged": self.damaged, "not as this version writes them": self.invalid}
        return [f"lines left out of {self.file.name}: {n} ({reason})" for reason, n in reasons.items() if n]


def read_metrics(file: Path) -> Records:
    """Return the records of ``metrics.jsonl``; each has its ``kind`` and ``step``."""
    return Records(file=file, is_valid=lambda record: isinstance(record.get("kind"), str) and has_step(record))


def read_trajectories(file: Path) -> Records:
    """Return the records of ``trajectories.jsonl``, see :func:`trajectory_record`."""
    return Records(file=file, is_valid=_is_whole)


def read_traces(file: Path) -> Records:
    """Return the records of ``traces.jsonl``, see :class:`jax_agent_rl.observe.sinks.traces.TraceFileSink`."""
    return Records(file=file, is_valid=is_trace_record)


def _is_whole(record: Record) -> bool:
    """Return whether a record has all fields of a trajectory, and they fit together."""
    if not is_trajectory_record(record):
        return False
    try:
        restore_trajectory(record)
    except ValueError:
        return False
    return True


def has_step(record: Record) -> bool:
    """Return whether a record names its step."""
    return isinstance(record.get("step"), int)


def _object(line: str) -> Record | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
