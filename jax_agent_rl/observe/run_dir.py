"""The run folder, written and read.

Its JSON Lines files only grow. A resumed run repeats steps that an earlier process has recorded.
Nothing of these steps is removed before there is something in its place::

    resume_after(5)               the files stay as they are               1 2 3 4 5 6 7
    the new step 6 is recorded    behind the old lines                     1 2 3 4 5 6 7 6'
    finish_step()                 one move: the abandoned steps are gone   1 2 3 4 5 6'

If the process is interrupted before the move, the folder holds what it held. The next process,
which resumes from the same checkpoint, takes all lines after it for abandoned ones.
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
from jax_agent_rl.observe.attachments import Attachments
from jax_agent_rl.observe.learner_inputs import has_learner_inputs
from jax_agent_rl.observe.schema import is_trace_record, is_trajectory_record
from jax_agent_rl.observe.selection import sample
from jax_agent_rl.types import (
    DropReason,
    FinishReason,
    Fork,
    Group,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from jax_agent_rl.utils.files import make_folder, read_lines, replacing, write_atomically, writing
from jax_agent_rl.utils.surrogates import json_line

Numbers = Sequence[float] | np.ndarray
TokenValues = Mapping[str, Mapping[str, Numbers]]
"""Named numbers of each trajectory, by its id: one for each token with loss."""
DISAGREEMENT = "disagreement.json"
ATTACHMENTS = "attachments"
"""The folder of images, videos and what the learner read beside records, in a run folder."""
LEARNER_INPUTS = "learner_inputs"
"""The field of a record that names what the learner read beside it, in the attachments."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Record = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, special tokens included."""


class RunDir:
    """Names and writes the files of one run.

    ``config.json, metrics.jsonl, trajectories.jsonl, traces.jsonl, summary.json, reward.png,
    checkpoints/``, ``attachments/`` if trajectories show images or videos, or were learned from
    with more than a record holds, and ``disagreement.json`` if engine and learner disagreed.

    Args:
        path: the folder; it is created if it does not exist.
        keep_trajectories: largest number of trajectories written per step and split, see
            :func:`jax_agent_rl.observe.selection.sample`; None writes all.
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
        self.attachments = Attachments(path / ATTACHMENTS)
        self._lock = threading.Lock()
        self._resumed: _Resumed | None = None

    # Writing raises StorageError if the disk is full. The next resume removes a partial line.

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
        groups: Sequence[Group] = (),
    ) -> None:
        """Append trajectories, or a sample of them.

        Args:
            step: the step in which they were trained on, or after which they were evaluated.
            split: ``train`` or ``heldout``.
            trajectories: all trajectories of that step and split.
            token_values: ``UpdateResult.tokens``.
            groups: of a training step. The records of their members then hold all that the learner
                reads, unless only a sample of the step is written: it cannot be repeated.
        """
        chosen = self._chosen(step, trajectories)
        group_of_member: dict[str, Group] = {}
        if len(chosen) == len(trajectories):
            group_of_member = _groups_of_members(groups)

        def records() -> Iterator[Record]:  # one in memory at a time
            for trajectory in chosen:
                values = token_values.get(trajectory.trajectory_id, {})
                record = trajectory_record(
                    trajectory,
                    step=step,
                    split=split,
                    token_values=values,
                    attachments=self.attachments,
                )
                group = group_of_member.get(trajectory.trajectory_id)
                if group is not None:
                    record["greedy_reward"] = group.greedy_reward
                    record[LEARNER_INPUTS] = self.attachments.add_learner_inputs(trajectory)
                yield record

        self.append(self.trajectories, records())
        self.attachments.forget()

    def store_attachments(
        self, step: int, trajectories: Sequence[Trajectory], groups: Sequence[Group] = ()
    ) -> None:
        """Store the attachments of what :meth:`add_trajectories` will write.

        It may run in another thread: encoding many images takes seconds.

        Args:
            step, trajectories, groups: as they will be given then.
        """
        chosen = self._chosen(step, trajectories)
        for trajectory in chosen:
            for media in _shown_media(trajectory):
                self.attachments.add(media)
        if len(chosen) == len(trajectories):
            for group in groups:
                for trajectory in group.trajectories:
                    self.attachments.add_learner_inputs(trajectory)

    def _chosen(self, step: int, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the trajectories of a step that are written."""
        return sample(
            trajectories,
            self.keep_trajectories,
            reward=lambda trajectory: trajectory.reward,
            group=lambda trajectory: trajectory.group_id,
            seed=step,
        )

    def resume_after(self, step: int) -> None:
        """Continue after a step: new records take the place of those after it.

        The old records stay until :meth:`finish_step`.

        Args:
            step: the last step that counts; -1 means that the run begins again.
        """
        sizes = {}
        for file in (self.metrics, self.trajectories, self.traces):
            if file.exists():
                end_last_line(file)
                sizes[file] = file.stat().st_size

        disagreement = b""
        if self.disagreement.exists():
            disagreement = self.disagreement.read_bytes()
        self._resumed = _Resumed(step=step, sizes=sizes, disagreement=disagreement)

    def recorded(self) -> list[Record]:
        """Return the records of ``metrics.jsonl`` that count.

        In a resumed run they are those up to the step after which it was resumed.
        """
        records = read_records(self.metrics)
        if self._resumed is None:
            return records
        return [record for record in records if record["step"] <= self._resumed.step]

    def finish_step(self, step: int) -> None:
        """Remove what the records of this process have replaced.

        It is called when a step, or the run's end, is recorded.

        Args:
            step: the step that is recorded now.
        """
        if self._resumed is None:
            return

        # A disagreement of a step that has been repeated since, unless this process has written
        # another one.
        old = self._resumed.disagreement
        disagreement_step = _step_of(old)
        if disagreement_step is not None and self._resumed.step < disagreement_step <= step:
            if self.disagreement.exists() and self.disagreement.read_bytes() == old:
                self.disagreement.unlink()

        if self._resumed.sizes:
            with self._lock:
                self._remove_abandoned(self._resumed)
            self._resumed = replace(self._resumed, sizes={})

    def _remove_abandoned(self, resumed: _Resumed) -> None:
        """Write each file without the old lines of abandoned steps and of repeated evaluations."""
        old_evaluations: set[int] = set()
        new_evaluations: set[int] = set()
        for record, _, is_new in _with_age(self.metrics, resumed.sizes.get(self.metrics, 0)):
            if record.get("kind") == "evaluation":
                evaluations = new_evaluations if is_new else old_evaluations
                evaluations.add(record["step"])

        def stays(record: Mapping[str, Any]) -> bool:
            """Return whether an old record stays."""
            step = record["step"]
            if step > resumed.step:
                return False
            is_heldout = (
                record.get("kind") == "evaluation"
                or record.get("split") == "heldout"
                or record.get("validate")
            )
            if not is_heldout:
                return True
            # An evaluation stays if it was completed and is not repeated.
            return step in old_evaluations and step not in new_evaluations

        for file, size in resumed.sizes.items():
            with replacing(file) as stream:
                for record, line, is_new in _with_age(file, size):
                    if is_new or stays(record):
                        stream.write(line)

    def write_json(self, file: Path, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_atomically(file, json.dumps(content, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class _Resumed:
    """Where a run was resumed.

    Attributes:
        step: the last step that counts.
        sizes: sizes of its files in bytes; empty once the abandoned lines are removed.
        disagreement: content of ``disagreement.json``; empty if there was none.
    """

    step: int
    sizes: Mapping[Path, int]
    disagreement: bytes


def _with_age(file: Path, size: int) -> Iterator[tuple[Record, bytes, bool]]:
    """Yield each record, its line, and whether it is new; skip lines that hold no record.

    Args:
        size: the size of the file in bytes when the run was resumed; later lines are new.
    """
    if not file.exists():
        return
    for begin, line in read_lines(file, MAX_LINE_BYTES):
        record = _object(line)
        if line is not None and record is not None and has_step(record):
            yield record, line, begin >= size


def _step_of(disagreement: bytes) -> int | None:
    """Return the step in which engine and learner disagreed; None if a record does not say it."""
    record = _object(disagreement)
    if record is None:
        return None
    step = record.get("step")
    return step if isinstance(step, int) else None


def _groups_of_members(groups: Sequence[Group]) -> dict[str, Group]:
    """Return the group of each member that is trained, by its trajectory's id."""
    group_of_member = {}
    for group in groups:
        for trajectory in group.trajectories:
            group_of_member[trajectory.trajectory_id] = group
    return group_of_member


def end_last_line(file: Path) -> None:
    """End a file's last line if it was cut off, so that what is appended begins a new line."""
    with writing(file), file.open("rb+") as stream:
        if stream.seek(0, 2) == 0:
            return
        stream.seek(-1, 2)
        if stream.read(1) != b"\n":
            stream.write(b"\n")


def trajectory_record(
    trajectory: Trajectory,
    *,
    step: int,
    split: str,
    token_values: Mapping[str, Numbers] = _NOTHING,
    attachments: Attachments | None = None,
) -> dict[str, Any]:
    """Return a trajectory as JSON: token ids, mask, log-probs, versions, reward, messages.

    Turns omit derived arrays.

    Args:
        step: the step in which it was trained on, or after which it was evaluated.
        split: ``train`` or ``heldout``.
        token_values: ``advantages`` and ``old_logprobs`` of its tokens with loss. The record has
            them along ``response_ids``: 0 at inserted ids without loss, null at constrained ids and
            where unknown.
        attachments: where its images and videos are stored; None: they are only counted.
    """
    record: dict[str, Any] = {"step": step, "split": split}
    for attribute in fields(trajectory):  # not asdict(), which copies every id
        record[attribute.name] = getattr(trajectory, attribute.name)
    del record["teacher_scores"]  # see learner_inputs
    record["fork"] = asdict(trajectory.fork) if trajectory.fork else None
    record["prompt_media"] = _media_record(trajectory.prompt_media, attachments)

    *of_segments, own_values = split_token_values(trajectory, token_values)
    record["segments"] = []
    for segment, values in zip(trajectory.segments, of_segments, strict=True):
        record["segments"].append(
            trajectory_record(
                segment, step=step, split=split, token_values=values, attachments=attachments
            )
        )
    for name, numbers in own_values.items():
        record[name] = expand(numbers, trajectory, exact=name == "old_logprobs")

    record["turns"] = [_turn_record(turn, attachments) for turn in trajectory.turns]
    # The prompt is in ``messages``.
    record["row"] = {key: value for key, value in trajectory.row.items() if key != "prompt"}
    record["rollout_logprobs"] = [short_float32(value) for value in trajectory.rollout_logprobs]
    return record


def short_float32(value: float) -> float:
    """Return the number with the fewest digits that is the same as ``value`` in float32.

    Engines compute log-probs in float32. A record has all their bits, in about half the digits.

    >>> short_float32(-0.6931471824645996)
    -0.6931472
    """
    return float(str(np.float32(value)))


def split_token_values(
    trajectory: Trajectory, token_values: Mapping[str, Numbers]
) -> list[dict[str, Numbers]]:
    """Return the numbers of each segment's tokens with loss, then those of the trajectory's own."""
    parts = []
    start = 0
    for segment in trajectory.segments:
        end = start + sum(segment.loss_mask)
        parts.append({name: numbers[start:end] for name, numbers in token_values.items()})
        start = end
    parts.append({name: numbers[start:] for name, numbers in token_values.items()})
    return parts


def _turn_record(turn: Turn, attachments: Attachments | None) -> dict[str, Any]:
    tool_calls = []
    for call in turn.tool_calls:
        call_record = asdict(replace(call, media={}))
        call_record["media"] = _media_record(call.media, attachments)
        tool_calls.append(call_record)

    routed_experts = turn.output.routed_experts
    return {
        "sampled": len(turn.output.token_ids),
        "appended": len(turn.appended_ids),
        "appended_media": _media_record(turn.appended_media, attachments),
        "learn_appended": turn.learn_appended,
        "constrained": [int(is_constrained) for is_constrained in turn.output.constrained],
        "supports": list(turn.output.supports),
        "routed_positions": routed_experts.shape[0] if routed_experts else 0,
        "stop_reason": turn.output.stop_reason,
        "cached_tokens": turn.output.cached_tokens,
        "score": turn.score,
        "number": turn.number,
        "note": turn.note,
        "tool_calls": tool_calls,
    }


def _media_record(
    media: Mapping[str, Sequence[Any]], attachments: Attachments | None
) -> Mapping[str, Any]:
    if attachments is not None:
        return attachments.add(media)
    return {kind: len(items) for kind, items in media.items()}


def shows_media(trajectory: Trajectory) -> bool:
    """Return whether a trajectory shows images or videos."""
    return any(any(media.values()) for media in _shown_media(trajectory))


def _shown_media(trajectory: Trajectory) -> Iterator[Mapping[str, Sequence[Any]]]:
    for sequence in (*trajectory.segments, trajectory):
        yield sequence.multi_modal
    for call in trajectory.tool_calls:
        yield call.media


def has_attachments(trajectory: Trajectory) -> bool:
    """Return whether a trajectory has something to store beside its record."""
    return shows_media(trajectory) or has_learner_inputs(trajectory)


def has_media(record: Mapping[str, Any], *, counted: bool = False) -> bool:
    """Return whether the prompt or a tool's answer has images or videos.

    Args:
        counted: ask for those that the record only counts: they are stored nowhere.
    """
    shown = list(record.get("prompt_media", {}).values())
    for turn in record["turns"]:
        shown += turn.get("appended_media", {}).values()
        for call in turn["tool_calls"]:
            shown += call.get("media", {}).values()

    if counted:
        shown = [items for items in shown if isinstance(items, int)]
    return any(shown)


def restore_trajectory(
    record: Mapping[str, Any], *, attachments: Attachments | None = None
) -> Trajectory:
    """Restore a trajectory from its record: its ids, and all that a reward function reads of it.

    Fields that are null may be missing, as in the rows of ``data.reader``.

    Args:
        attachments: where its images and videos are; None leaves them out.

    Raises:
        DataError: an image or a video cannot be read.
    """
    fork = record.get("fork")
    no_loss = record.get("no_loss")
    return Trajectory.from_turns(
        prompt_ids=record["prompt_ids"],
        turns=list(_turns(record, attachments)),
        trajectory_id=record["trajectory_id"],
        group_id=record["group_id"],
        agent_name=record["agent_name"],
        finish_reason=FinishReason(record["finish_reason"]),
        no_loss=DropReason(no_loss) if no_loss else None,
        reward=record["reward"],
        raw_score=record.get("raw_score"),
        reward_parts=record.get("reward_parts", {}),
        metrics=record.get("metrics", {}),
        row=record.get("row", {}),
        messages=tuple(record.get("messages", ())),
        tool_scores=record.get("tool_scores", {}),
        segments=tuple(
            restore_trajectory(segment, attachments=attachments) for segment in record["segments"]
        ),
        fork=Fork(**fork) if fork else None,
        history_window=record.get("history_window"),
        prompt_media=_restore_media(record.get("prompt_media"), attachments),
        role=record.get("role"),
        adapter=record.get("adapter"),
        feedback=record.get("feedback", ""),
        teacher_prompt_ids=tuple(record.get("teacher_prompt_ids", ())),
    )


def _turns(record: Mapping[str, Any], attachments: Attachments | None) -> Iterator[Turn]:
    """Yield the turns of a record; records of earlier versions lack some fields."""
    # As the engine gave them: float32, see short_float32.
    logprobs = np.asarray(record["rollout_logprobs"], np.float32).astype(float).tolist()
    start = 0
    for turn in record["turns"]:
        sampled_end = start + turn["sampled"]
        end = sampled_end + turn["appended"]
        output = TokenOutput(
            token_ids=tuple(record["response_ids"][start:sampled_end]),
            log_probs=tuple(logprobs[start:sampled_end]),
            policy_versions=tuple(record["policy_versions"][start:sampled_end]),
            stop_reason=StopReason(turn["stop_reason"]),
            context_digest="",
            constrained=tuple(bool(mark) for mark in turn.get("constrained", ())),
            supports=tuple(turn.get("supports", ())),
        )
        appended_ids = tuple(record["response_ids"][sampled_end:end])
        start = end
        yield Turn(
            output=output,
            appended_ids=appended_ids,
            appended_media=_restore_media(turn.get("appended_media"), attachments),
            tool_calls=tuple(
                _restore_call(call, attachments) for call in turn.get("tool_calls", ())
            ),
            score=turn.get("score"),
            learn_appended=turn.get("learn_appended", False),
            number=turn.get("number"),
            note=turn.get("note", ""),
        )


def _restore_media(
    recorded: Mapping[str, Any] | None, attachments: Attachments | None
) -> Mapping[str, tuple[Any, ...]]:
    if attachments is None or not recorded:
        return {}
    references = {}
    for kind, names in recorded.items():
        if not isinstance(names, int):  # a number: an earlier version stored nothing
            references[kind] = names
    return attachments.read(references)


def _restore_call(call: Mapping[str, Any], attachments: Attachments | None) -> ToolCallRecord:
    return ToolCallRecord(
        name=call["name"],
        arguments=call.get("arguments"),
        observation=call.get("observation", ""),
        error=call.get("error"),
        reward=call.get("reward", 0.0),
        seconds=call["seconds"],
        call_id=call.get("call_id"),
        media=_restore_media(call.get("media"), attachments),
    )


def expand(values: Numbers, trajectory: Trajectory, *, exact: bool) -> list[float | None]:
    """Spread one number per id with loss to one per response id, as a record has them.

    Args:
        exact: they are float32, and all their bits count; else six digits are enough.
    """
    values_left = iter(values)
    expanded: list[float | None] = []
    for has_loss, is_sampled in zip(trajectory.loss_mask, trajectory.response_mask, strict=True):
        if has_loss:
            value = float(next(values_left))
            if not math.isfinite(value):
                expanded.append(None)
            elif exact:
                expanded.append(short_float32(value))
            else:
                expanded.append(round(value, 6))
        elif is_sampled:  # a constrained id
            expanded.append(None)
        else:
            expanded.append(0.0)
    return expanded


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return all records of a JSON Lines file that have a step.

    Other lines are skipped, such as one that was cut off by a crash.
    """
    return list(Records(file=file, is_valid=has_step))


def append_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append lines of JSON.

    Raises:
        StorageError: the disk is full.
    """
    with writing(file), file.open("a", encoding="utf-8") as stream:
        for record in records:
            stream.write(json_line(record))


class RecordSource(Protocol):
    """The records that ``view`` and ``report`` show, read one at a time, however many there are.

    Every iteration reads the files again.
    """

    def __iter__(self) -> Iterator[Record]: ...

    def read(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield some of the records, in the order of ``numbers``.

        Args:
            numbers: positions of records in the last iteration, from 0.

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
    """The records of a JSON Lines file: a :class:`RecordSource`.

    The file may be growing, truncated or damaged. Lines that are not records of its kind are
    skipped and counted; :attr:`notes` reports them.

    Attributes:
        file: the file; it need not exist.
        is_valid: returns whether an object has the fields of a record.
        damaged: number of lines without a JSON object, skipped by the last iteration.
        invalid: number of other objects that it skipped, perhaps written by another version.
    """

    file: Path
    is_valid: Callable[[Record], bool]
    damaged: int = 0
    invalid: int = 0
    # Where the records of the last iteration begin in the file.
    _offsets: array[int] = field(default_factory=lambda: array("q"), init=False, repr=False)

    def __iter__(self) -> Iterator[Record]:
        """Yield every record.

        Raises:
            DataError: the file cannot be read.
        """
        self.damaged = 0
        self.invalid = 0
        self._offsets = array("q")
        if not self.file.exists():
            return
        with self._reading():
            for offset, line in read_lines(self.file, MAX_LINE_BYTES):
                record = _object(line)
                if record is None:
                    self.damaged += 1
                elif not self.is_valid(record):
                    self.invalid += 1
                else:
                    self._offsets.append(offset)
                    yield record

    def read(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield some of the records, see :class:`RecordSource`."""
        offsets = [self._offsets[number] for number in numbers]
        if not offsets:  # perhaps there is no file
            return
        with self._reading(), self.file.open("rb") as stream:
            for offset in offsets:
                stream.seek(offset)
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
        counts = {
            "cut off or damaged": self.damaged,
            "not as this version writes them": self.invalid,
        }
        notes = []
        for reason, count in counts.items():
            if count:
                notes.append(f"lines left out of {self.file.name}: {count} ({reason})")
        return notes


def read_metrics(file: Path) -> Records:
    """Return the records of ``metrics.jsonl``; each has its ``kind`` and ``step``."""

    def is_valid(record: Record) -> bool:
        return isinstance(record.get("kind"), str) and has_step(record)

    return Records(file=file, is_valid=is_valid)


def read_trajectories(file: Path) -> Records:
    """Return the records of ``trajectories.jsonl``, see :func:`trajectory_record`."""
    return Records(file=file, is_valid=_is_trajectory)


def read_traces(file: Path) -> Records:
    """Return the records of ``traces.jsonl``.

    :class:`~jax_agent_rl.observe.sinks.traces.TraceFileSink` writes them.
    """
    return Records(file=file, is_valid=is_trace_record)


def _is_trajectory(record: Record) -> bool:
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
    """Return the JSON object of a line; None if the line has none, or was too long to be read."""
    if line is None:
        return None
    try:
        content = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return content
