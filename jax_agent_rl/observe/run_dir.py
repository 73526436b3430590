"""The run folder, written and read.

Its JSON Lines files only grow. A resumed run makes steps again that an earlier process has
recorded. Nothing of them is removed before there is something in its place::

    resume_after(5)                 the files stay as they are                      1 2 3 4 5 6 7
    the new step 6 is recorded      behind the old lines                            1 2 3 4 5 6 7 6'
    finish_step()                   one move: what is of abandoned steps is gone    1 2 3 4 5 6'

Interrupted before, the folder holds what it held; the next process, which resumes from the same
checkpoint, takes the lines after it for abandoned ones, too.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jax_agent_rl.data.reader import MAX_LINE_BYTES
from jax_agent_rl.errors import DataError
from jax_agent_rl.observe.schema import is_trace_record, is_trajectory_record
from jax_agent_rl.observe.selection import sample
from jax_agent_rl.types import FinishReason, Fork, StopReason, TokenOutput, Trajectory, Turn
from jax_agent_rl.utils.files import make_folder, read_lines, replacing, write_atomically, writing
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

    ``config.json, metrics.jsonl, trajectories.jsonl, traces.jsonl, summary.json, reward.png,
    checkpoints/``, and ``disagreement.json`` if engine and learner disagreed.

    Args:
        path: created if it does not exist.
        keep_trajectories: maximum number written per step and split, see
            :func:`jax_agent_rl.observe.selection.sample`.
    """

    def __init__(self, path: Path, *, keep_trajectories: int | None = None) -> None:
        self.path = path
        self.keep_trajectories = keep_trajectories
        make_folder(self.path)
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories.jsonl"
        self.traces = path / "traces.jsonl"
        self.summary = path / "summary.json"
        self.disagreement = path / DISAGREEMENT
        self.plot = path / "reward.png"
        self.checkpoints = path / "checkpoints"
        self._lock = threading.Lock()
        self._resumed: _Resumed | None = None

    # Writing raises StorageError if the disk is full. The next resume removes a line written in
    # part.

    def append(self, file: Path, records: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to one of the folder's files, from any thread."""
        with self._lock:
            append_records(file, records)

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``."""
        self.append(self.metrics, [record])

    def add_trajectories(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        *,
        token_values: TokenValues = _NOTHING,
    ) -> None:
        """Append trajectories, or a sample of them.

        Args:
            step: the step they were trained in, or evaluated after.
            split: ``train`` or ``heldout``.
            trajectories: all of that step and split.
            token_values: ``UpdateResult.tokens``.
        """
        chosen = sample(
            trajectories,
            self.keep_trajectories,
            reward=lambda t: t.reward,
            group=lambda t: t.group_id,
            seed=step,
        )
        records = (
            trajectory_record(
                t, step=step, split=split, token_values=token_values.get(t.trajectory_id, {})
            )
            for t in chosen
        )
        self.append(self.trajectories, records)

    def resume_after(self, step: int) -> None:
        """Go on after a step: what is recorded from now on takes the place of what was recorded after it.

        What that replaces stays until :meth:`finish_step`. -1: the run begins again.
        """
        sizes = {}
        for file in (self.metrics, self.trajectories, self.traces):
            if file.exists():
                end_last_line(file)
                sizes[file] = file.stat().st_size
        old = self.disagreement.read_bytes() if self.disagreement.exists() else b""
        self._resumed = _Resumed(step=step, sizes=sizes, disagreement=old)

    def recorded(self) -> list[Record]:
        """Return the records of ``metrics.jsonl`` up to the step after which the run was resumed, if it was."""
        records = read_records(self.metrics)
        if self._resumed is None:
            return records
        return [record for record in records if record["step"] <= self._resumed.step]

    def finish_step(self, step: int) -> None:
        """Remove what the records of this process have replaced; call it when a step, or the end, is recorded.

        Args:
            step: the step that is recorded now.
        """
        if self._resumed is None:
            return
        found_in = _step_of(self._resumed.disagreement)
        if (
            found_in is not None and self._resumed.step < found_in <= step
        ):  # that step has been made again
            if (
                self.disagreement.exists()
                and self.disagreement.read_bytes() == self._resumed.disagreement
            ):
                self.disagreement.unlink()
        if self._resumed.sizes:
            with self._lock:
                self._remove_abandoned(self._resumed)
            self._resumed = replace(self._resumed, sizes={})

    def _remove_abandoned(self, resumed: _Resumed) -> None:
        """Write each file again without the old lines of abandoned steps and of evaluations that were made again."""
        made = {
            True: set[int](),
            False: set[int](),
        }  # evaluated steps, by whether this process made them
        for record, _, is_new in _with_places(self.metrics, resumed.sizes.get(self.metrics, 0)):
            if record.get("kind") == "evaluation":
                made[is_new].add(record["step"])

        def stays(record: Mapping[str, Any]) -> bool:
            step = record["step"]
            if step > resumed.step:
                return False
            held_out = (
                record.get("kind") == "evaluation"
                or record.get("split") == "heldout"
                or record.get("validate")
            )
            return not held_out or (step in made[False] and step not in made[True])

        for file, size in resumed.sizes.items():
            with replacing(file) as stream:
                for record, line, is_new in _with_places(file, size):
                    if is_new or stays(record):
                        stream.write(line)

    def write_json(self, file: Path, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_atomically(file, json.dumps(content, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class _Resumed:
    """Where a run was resumed.

    Attributes:
        step: after which step.
        sizes: how long its files were; empty once they have been cut back.
        disagreement: content of ``disagreement.json``; empty if there was none.
    """

    step: int
    sizes: Mapping[Path, int]
    disagreement: bytes


def _with_places(file: Path, size: int) -> Iterator[tuple[Record, bytes, bool]]:
    """Yield each record, its line, and whether the line begins after ``size`` bytes; skip lines that hold none."""
    if not file.exists():
        return
    for begin, line in read_lines(file, MAX_LINE_BYTES):
        record = _object(line)
        if line is not None and record is not None and has_step(record):
            yield record, line, begin >= size


def _step_of(disagreement: bytes) -> int | None:
    """Return the step in which engine and learner disagreed; None if a record does not say it."""
    record = _object(disagreement)
    step = None if record is None else record.get("step")
    return step if isinstance(step, int) else None


def end_last_line(file: Path) -> None:
    """Give a file's last line an end if it was cut off, so that what is appended begins a line of its own."""
    with writing(file), file.open("rb+") as stream:
        if stream.seek(0, 2) == 0:
            return
        stream.seek(-1, 2)
        if stream.read(1) != b"\n":
            stream.write(b"\n")


def trajectory_record(
    trajectory: Trajectory, *, step: int, split: str, token_values: Mapping[str, Numbers] = _NOTHING
) -> dict[str, Any]:
    """Return a trajectory as JSON: ids, mask, log-probs, versions, reward, messages.

    Turns omit derived arrays; images and videos are only counted.

    Args:
        trajectory: what is recorded.
        step: its training step.
        split: ``train`` or ``heldout``.
        token_values: ``advantages`` and ``old_logprobs`` of its tokens with loss; they are laid out
            along ``response_ids``, 0 at inserted ids without loss, null at constrained ids and
            where unknown.
    """
    record = {"step": step, "split": split}
    record |= {
        f.name: getattr(trajectory, f.name) for f in fields(trajectory)
    }  # not asdict(), which copies every id
    record["fork"] = asdict(trajectory.fork) if trajectory.fork else None
    record["prompt_media"] = {kind: len(items) for kind, items in trajectory.prompt_media.items()}
    at, record["segments"] = 0, []
    for segment in trajectory.segments:
        end = at + sum(segment.loss_mask)
        part = {name: values[at:end] for name, values in token_values.items()}
        record["segments"].append(
            trajectory_record(segment, step=step, split=split, token_values=part)
        )
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
                asdict(replace(call, media={}))
                | {"media": {kind: len(items) for kind, items in call.media.items()}}
                for call in turn.tool_calls
            ],
        }
        for turn in trajectory.turns
    ]
    record["row"] = {
        key: value for key, value in trajectory.row.items() if key != "prompt"
    }  # it is in messages
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
        raw_score=record.get("raw_score"),
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
        yield Turn(
            output=output,
            appended_ids=appended,
            number=turn.get("number"),
            note=turn.get("note", ""),
        )


def _expand(values: Numbers, trajectory: Trajectory) -> list[float | None]:
    """Spread one number per id with loss to one per response id."""
    rest = iter(values)
    masks = zip(trajectory.loss_mask, trajectory.response_mask, strict=True)
    placed = (
        float(next(rest)) if mine else math.nan if sampled else 0.0 for mine, sampled in masks
    )
    return [round(value, 6) if math.isfinite(value) else None for value in placed]


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return all records of a JSON Lines file that have a step; skip other lines, such as one cut off by a crash."""
    return list(Records(file=file, is_valid=has_step))


def append_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append lines of JSON; raises StorageError if the disk is full."""
    with writing(file), file.open("a", encoding="utf-8") as stream:
        for record in records:
            stream.write(json_line(record))


class RecordSource(Protocol):
    """Records that are read one at a time, however many there are: what ``view`` and ``report`` show.

    Every iteration reads the files again.
    """

    def __iter__(self) -> Iterator[Record]: ...

    def read(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield some of the records, in the order of ``numbers``: their places in the last iteration, from 0.

        Raises:
            DataError: the file has been replaced since.
        """
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Messages about what the last iteration skipped."""
        ...


@dataclass(kw_only=True)
class Records:
    """The records of a JSON Lines file, as far as they can be read: the file may be growing, truncated or damaged.

    A :class:`RecordSource`. Lines that are no record of its kind are skipped and counted;
    :attr:`notes` reports them.

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
    # where the records of the last iteration begin
    _begins: array[int] = field(default_factory=lambda: array("q"), init=False, repr=False)

    def __iter__(self) -> Iterator[Record]:
        """Yield every record; raises DataError if the file cannot be read."""
        self.damaged = self.invalid = 0
        self._begins = array("q")
        if not self.file.exists():
            return
        with self._reading():
            for begin, line in read_lines(self.file, MAX_LINE_BYTES):
                record = _object(line)
                if record is None:
                    self.damaged += 1
                elif not self.is_valid(record):
                    self.invalid += 1
                else:
                    self._begins.append(begin)
                    yield record

    def read(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield some of the records, see :class:`RecordSource`."""
        begins = [self._begins[number] for number in numbers]
        if not begins:  # perhaps there is no file
            return
        with self._reading(), self.file.open("rb") as stream:
            for begin in begins:
                stream.seek(begin)
                record = _object(stream.readline(MAX_LINE_BYTES))
                if record is None or not self.is_valid(record):
                    raise DataError(
                        f"{self.file} was replaced while it was read; run the command again"
                    )
                yield record

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self.file} cannot be read: {error.strerror or error}") from error

    @property
    def notes(self) -> list[str]:
        """The lines that the last iteration skipped, as messages."""
        reasons = {
            "cut off or damaged": self.damaged,
            "not as this version writes them": self.invalid,
        }
        return [
            f"lines left out of {self.file.name}: {n} ({reason})"
            for reason, n in reasons.items()
            if n
        ]


def read_metrics(file: Path) -> Records:
    """Return the records of ``metrics.jsonl``; each has its ``kind`` and ``step``."""
    return Records(
        file=file, is_valid=lambda record: isinstance(record.get("kind"), str) and has_step(record)
    )


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


def _object(line: bytes | None) -> Record | None:
    """Return the JSON object of a line; None if it has none, or was too long to be read."""
    if line is None:
        return None
    try:
        content = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
