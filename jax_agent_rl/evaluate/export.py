"""The table of a collection: exported from its journal, and read back as trajectories.

It is one of::

    FILE.parquet   one table                         FILE.parquet.summary.json
    FILE.jsonl     the same columns, a line a row    FILE.jsonl.summary.json
    FOLDER         data/train-00000-of-00002.parquet, …, README.md with the dataset's
                   configuration, summary.json: datasets.load_dataset("FOLDER") reads it

The table has one row per sequence to train on, exact to the token. Most trajectories are one
sequence. A trajectory sampled in several contexts (an edited history, a history window) is several,
numbered by ``sequence``, which repeat the reward and everything else about the trajectory. Values
of varying shape are JSON text: ``ground_truth``, ``extra_info``, ``row_fields``, ``reward_parts``,
``tool_scores``, ``arguments``, ``media``.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from jax_agent_rl.checks import as_score, brief_repr
from jax_agent_rl.data.reader import Row, read_row_file
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.evaluate.atif import is_atif, read_atif
from jax_agent_rl.evaluate.journal import Journal
from jax_agent_rl.observe.report.command import RunData, read_run
from jax_agent_rl.observe.run_dir import Record, trajectory_record
from jax_agent_rl.types import (
    FinishReason,
    Fork,
    Group,
    StopReason,
    TokenOutput,
    ToolCallRecord,
    Trajectory,
    Turn,
)
from jax_agent_rl.utils.bounded_json import read_json_object
from jax_agent_rl.utils.files import make_folder, replacing, write_atomically, writing

if TYPE_CHECKING:
    import pyarrow

SHARD_BYTES = 256 << 20
"""Journal bytes per file of a dataset folder, and in memory at a time."""
ROW_GROUP_SIZE = 1024
"""Rows in a row group of a Parquet file; whoever reads one of them reads the whole group."""
_RECORDS_AT_ONCE = 64
"""Records that are looked for in one reading of a file."""
_FIELDS_WITH_COLUMNS = ("data_source", "extra_info", "reward_model")
_FIELDS_LEFT_OUT = ("prompt", "images", "videos")
"""Fields of rows that only the messages show."""
CALL_FIELDS = ("name", "arguments", "observation", "error", "reward", "seconds")
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

Trajectories of `{policy}` on `{data}`, collected by `jax-agent-rl rollout`: \
{kept} of {started} that were started.
`summary.json` has the settings.
"""


@dataclass(frozen=True)
class Target:
    """The output of a collection: a file, or a folder if the path has no suffix."""

    path: Path

    @classmethod
    def from_path(cls, path: Path) -> Target:
        """Return the target of a path.

        Raises:
            ConfigError: the suffix is unknown.
        """
        if path.suffix not in ("", ".parquet", ".jsonl"):
            raise ConfigError(
                f"--out {path}: write FILE.parquet, FILE.jsonl, or a FOLDER (a name without an"
                " ending)"
            )
        return cls(path)

    @property
    def is_folder(self) -> bool:
        return not self.path.suffix

    @property
    def journal(self) -> Path:
        """The journal of an unfinished collection."""
        return self._companion(".partial.jsonl")

    @property
    def summary(self) -> Path:
        """The summary of a finished collection."""
        return self._companion("summary.json")

    @property
    def is_taken(self) -> bool:
        """True if something exists at the path; an empty folder is nothing."""
        if self.is_folder and self.path.is_dir():
            return any(self.path.iterdir())
        return self.path.exists()

    def _companion(self, name: str) -> Path:
        """Return a file in the folder, or next to the file."""
        if self.is_folder:
            return self.path / name
        return Path(f"{self.path}.{name.lstrip('.')}")


def write(target: Target, journal: Journal, summary: Mapping[str, Any]) -> None:
    """Write all prompts in their order, then the summary; remove the journal last.

    Raises:
        StorageError: the disk is full; nothing was replaced, and the journal remains.
    """
    numbers = sorted(journal.sizes)
    if target.is_folder:
        _write_dir(target.path, journal, numbers, summary)
    else:
        with replacing(target.path) as stream:
            if target.path.suffix == ".parquet":
                _write_parquet(stream, journal, numbers)
            else:
                _write_lines(stream, journal, numbers)
    write_atomically(target.summary, json.dumps(summary, indent=2) + "\n")
    journal.file.unlink()


def _write_dir(
    path: Path, journal: Journal, numbers: Sequence[int], summary: Mapping[str, Any]
) -> None:
    shards = list(_portions(numbers, journal.sizes)) or [[]]
    final = path / "data"
    temporary = path / ".data"
    replaced = path / ".data.old"
    make_folder(path)
    with writing(path):
        # They exist if a process was killed in here.
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)

        temporary.mkdir()
        for index, shard in enumerate(shards):
            with replacing(temporary / f"train-{index:05}-of-{len(shards):05}.parquet") as stream:
                _write_parquet(stream, journal, shard)

        # It exists if a process was killed after the renaming below. The journal was not removed,
        # and has all of it.
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    write_atomically(path / "README.md", _CARD.format_map(summary))


def _write_parquet(file: IO[bytes], journal: Journal, numbers: Sequence[int]) -> None:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(file, schema()) as writer:
        for portion in _portions(numbers, journal.sizes):
            rows: list[dict[str, Any]] = []
            for records in journal.lines(portion):
                rows += records
            table = pyarrow.Table.from_pylist(rows, schema=schema())
            writer.write_table(table, row_group_size=ROW_GROUP_SIZE)


def _write_lines(file: IO[bytes], journal: Journal, numbers: Sequence[int]) -> None:
    names = schema().names
    for records in journal.lines(numbers):
        for record in records:
            line = json.dumps({name: record[name] for name in names}, ensure_ascii=False)
            file.write(line.encode() + b"\n")


def _portions(numbers: Sequence[int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Split prompts into portions of about :data:`SHARD_BYTES`."""
    portion: list[int] = []
    size = 0
    for number in numbers:
        portion.append(number)
        size += sizes[number]
        if size >= SHARD_BYTES:
            yield portion
            portion = []
            size = 0
    if portion:
        yield portion


@functools.cache
def _columns() -> list[tuple[str, pyarrow.DataType, Callable[[Trajectory, Trajectory], Any]]]:
    """Return name, type and value of the columns; a value is of a trajectory and its sequence."""
    import pyarrow as pa

    text = pa.string()
    integer = pa.int32()
    number = pa.float64()
    ids = pa.list_(pa.int32())
    mask = pa.list_(pa.int8())
    message = pa.struct([("role", text), ("content", text)])
    call = pa.struct(
        [
            ("name", text),
            ("arguments", text),
            ("observation", text),
            ("error", text),
            ("reward", number),
            ("seconds", number),
        ]
    )
    return [
        ("data_source", text, lambda t, s: str(t.row.get("data_source"))),
        ("agent_name", text, lambda t, s: t.agent_name),
        ("group_id", text, lambda t, s: t.group_id),
        ("trajectory_id", text, lambda t, s: t.trajectory_id),
        ("prompt_ids", ids, lambda t, s: list(s.prompt_ids)),
        ("response_ids", ids, lambda t, s: list(s.response_ids)),
        # 1: sampled by the policy
        ("response_mask", mask, lambda t, s: list(s.response_mask)),
        # 1: carries loss; differs with agent.mask_observations=false, and where a grammar decided
        ("loss_mask", mask, lambda t, s: list(s.loss_mask)),
        # 0 where not sampled
        ("rollout_logprobs", pa.list_(pa.float32()), lambda t, s: _float32(s.rollout_logprobs)),
        # -1 where not sampled
        ("policy_versions", ids, lambda t, s: list(s.policy_versions)),
        ("num_turns", integer, lambda t, s: s.num_turns),
        # sampled tokens of each turn, and its score by an environment or a simulated user, or null
        ("turn_lengths", ids, lambda t, s: [len(turn.output.token_ids) for turn in s.turns]),
        ("turn_scores", pa.list_(number), lambda t, s: [turn.score for turn in s.turns]),
        ("stop_reasons", pa.list_(text), lambda t, s: _stop_reasons(s)),
        ("finish_reason", text, lambda t, s: str(s.finish_reason)),
        # why none of it carries loss, or null
        ("no_loss", text, lambda t, s: t.no_loss and str(t.no_loss)),
        ("reward", number, lambda t, s: t.reward),
        ("reward_parts", text, lambda t, s: _json(t.reward_parts)),
        ("ground_truth", text, lambda t, s: _json(_ground_truth(t))),
        ("extra_info", text, lambda t, s: _json(t.row.get("extra_info") or {})),
        # the row's other fields, which a reward function may ask for
        ("row_fields", text, lambda t, s: _json(_other_fields(t))),
        ("role", text, lambda t, s: t.role),
        ("messages", pa.list_(message), lambda t, s: list(map(_message, t.messages))),
        ("tool_calls", pa.list_(call), lambda t, s: list(map(_call, t.tool_calls))),
        ("tool_scores", text, lambda t, s: _json(t.tool_scores)),
        # numbers of images and videos in the prompt, by kind
        ("media", text, lambda t, s: _json(_media_counts(s))),
        # branches: their parent, and what they share with it
        ("fork_parent", text, lambda t, s: t.fork and t.fork.parent_id),
        ("fork_turns", integer, lambda t, s: t.fork and t.fork.turns),
        ("fork_tokens", integer, lambda t, s: t.fork and t.fork.tokens),
        # sequences that are windows of one conversation: how many earlier turns each one shows
        ("history_window", integer, lambda t, s: t.history_window),
    ]


def schema() -> pyarrow.Schema:
    """Return names and types of the columns.

    ``row`` is the number of the prompt in its file, from 0.
    """
    import pyarrow as pa

    columns = [("row", pa.int64()), ("sequence", pa.int32())]
    columns += [(name, dtype) for name, dtype, _ in _columns()]
    return pa.schema(columns)


def records(group: Group, number: int) -> list[dict[str, Any]]:
    """Return the rows of a group, whose prompt has this ``number`` in its file."""
    rows = []
    for trajectory in group.trajectories:
        for position, sequence in enumerate(trajectory.sequences):
            row: dict[str, Any] = {"row": number, "sequence": position}
            for name, _, value_of in _columns():
                row[name] = value_of(trajectory, sequence)
            rows.append(row)
    return rows


def _float32(values: Sequence[float]) -> list[float]:
    """Round as Parquet does, so that a file of text has the same numbers."""
    return np.asarray(values, np.float32).tolist()


def _stop_reasons(sequence: Trajectory) -> list[str]:
    return [str(turn.output.stop_reason) for turn in sequence.turns]


def _ground_truth(trajectory: Trajectory) -> Any:
    reward_model = trajectory.row.get("reward_model") or {}
    return reward_model.get("ground_truth")


def _other_fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a trajectory's row that have no column."""
    fields = {}
    for name, value in trajectory.row.items():
        if name not in _FIELDS_WITH_COLUMNS and name not in _FIELDS_LEFT_OUT:
            fields[name] = value

    reward_model = dict(trajectory.row.get("reward_model") or {})
    reward_model.pop("ground_truth", None)
    if reward_model:
        fields["reward_model"] = reward_model
    return fields


def _media_counts(sequence: Trajectory) -> dict[str, int]:
    return {kind: len(items) for kind, items in sequence.prompt_media.items()}


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    return {"role": str(message["role"]), "content": str(message.get("content") or "")}


def _call(call: ToolCallRecord) -> dict[str, Any]:
    values = {name: getattr(call, name) for name in CALL_FIELDS}
    values["arguments"] = _json(call.arguments)
    return values


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


# --- back to trajectories -------------------------------------------------------------------------


def is_table(path: Path) -> bool:
    """Return whether a path is a table's, not a run folder's."""
    return path.suffix in (".parquet", ".jsonl") or (path / "data").is_dir()


def read_recorded(path: Path) -> RunData:
    """Read what ``view`` and ``report`` show: a run folder, a table, or ATIF documents.

    Raises:
        ConfigError: the package ``atif`` is needed and not installed.
        DataError: it is none of them.
    """
    if is_table(path):
        return read_table(path)
    if is_atif(path):
        return read_atif(path)
    return read_run(path)


def read_table(path: Path) -> RunData:
    """Read a table with its summary as if it were a run, except for its trajectories.

    Raises:
        DataError: the file is missing, or the summary damaged.
    """
    target = Target.from_path(path)
    files = [path]
    if target.is_folder:
        files = sorted((path / "data").glob("*.parquet"))
    trajectories = TableRecords(path, files)
    for file in files:
        if not file.is_file():
            raise trajectories.unreadable(f"there is no file {file}")

    summary: dict[str, Any] = {}
    try:
        if target.summary.is_file():
            summary = read_json_object(target.summary)
    except (OSError, ValueError) as error:
        raise trajectories.unreadable(error) from None
    return RunData(
        name=path.name,
        trajectories=trajectories,
        config={"model": {"path": summary.get("model")}},
        summary=summary,
    )


class TableRecords:
    """The trajectories of a table as records of a run.

    It is a :class:`~jax_agent_rl.observe.run_dir.RecordSource`.

    Args:
        path: the table, for messages.
        files: its files, in order.
    """

    notes: Sequence[str] = ()  # a damaged table is an error

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        self._path = path
        self._files = files
        # Of the last iteration, indices through all files:
        self._file_begins: list[int] = []
        self._begins = array("q", [0])  # first row of each trajectory, and the end of the last one
        self._group_begins = array("q")  # first trajectory of each trajectory's group

    def __iter__(self) -> Iterator[Record]:
        """Yield every record.

        Raises:
            DataError: the table is damaged, or was not written by ``rollout``.
        """
        self._begins = array("q", [0])
        self._group_begins = array("q")
        group_id: str | None = None
        group_begin = 0
        with self._restoring():
            for number, trajectory in enumerate(restore(self._all_rows())):
                if trajectory.group_id != group_id:
                    group_id = trajectory.group_id
                    group_begin = number
                self._group_begins.append(group_begin)
                self._begins.append(self._begins[-1] + len(trajectory.sequences))
                yield _record(trajectory)

    def read(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield some of the records, see :class:`~jax_agent_rl.observe.run_dir.RecordSource`."""
        remaining = iter(numbers)
        while portion := list(itertools.islice(remaining, _RECORDS_AT_ONCE)):
            with self._restoring():
                records = self._read_portion(set(portion))
            for number in portion:
                yield records[number]

    def prompts(self) -> Iterator[tuple[list[Row], list[Trajectory]]]:
        """Yield the rows of each prompt, and their trajectories.

        Raises:
            DataError: the table is damaged, or was not written by ``rollout``.
        """
        with self._restoring():
            for _, prompt_rows in itertools.groupby(self._all_rows(), key=_prompt_number):
                rows = list(prompt_rows)
                yield rows, list(restore(rows))

    def _read_portion(self, numbers: Collection[int]) -> dict[int, Record]:
        # The tree of a branch is known from its parents, which precede it in its group.
        with_parents: set[int] = set()
        for number in numbers:
            with_parents.update(range(self._group_begins[number], number + 1))
        trajectory_numbers = sorted(with_parents)
        row_numbers: set[int] = set()
        for number in trajectory_numbers:
            row_numbers.update(range(self._begins[number], self._begins[number + 1]))

        trajectories = restore(self._rows(row_numbers))
        records = {}
        for number, trajectory in zip(trajectory_numbers, trajectories, strict=True):
            if number in numbers:
                records[number] = _record(trajectory)
        return records

    def _all_rows(self) -> Iterator[Row]:
        self._file_begins = []
        count = 0
        for file in self._files:
            self._file_begins.append(count)
            for _, row in read_row_file(file):
                count += 1
                yield row

    def _rows(self, numbers: Collection[int]) -> Iterator[Row]:
        for file, begin in zip(self._files, self._file_begins, strict=True):
            # Numbers beyond the end of the file are ignored.
            in_file = {number - begin for number in numbers if number >= begin}
            for _, row in read_row_file(file, in_file):
                yield row

    def unreadable(self, reason: object) -> DataError:
        """Return the error that the table cannot be read."""
        return DataError(
            f"{self._path} cannot be read as a table of jax-agent-rl rollout: {reason}"
        )

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise self.unreadable(f"a row has no {brief_repr(error.args[0])}") from None
        except (DataError, OSError, LookupError, TypeError, ValueError) as error:
            raise self.unreadable(error) from None


def _prompt_number(row: Row) -> int:
    return row["row"]


def _record(trajectory: Trajectory) -> Record:
    return trajectory_record(trajectory, step=table_step(trajectory), split="train")


def table_step(trajectory: Trajectory) -> int:
    """Return the step of a trajectory in a table: the policy version that sampled it last."""
    return max(trajectory.policy_versions)


def restore(rows: Iterable[Mapping[str, Any]]) -> Iterator[Trajectory]:
    """Yield the trajectories of rows, exact to the token.

    Of several sequences, all but the last are segments. A row does not say which turn made a call:
    all calls are the last turn's. In tables of earlier versions, which lack ``turn_lengths``, turns
    with nothing between them are one.

    Args:
        rows: as ``data.reader`` yields them, without columns that are null.
    """
    tree_ids: dict[str, str] = {}  # of the branches of one prompt, which follow their parents
    prompt_number: int | None = None
    by_trajectory = itertools.groupby(rows, key=lambda row: (row["row"], row["trajectory_id"]))
    for (number, trajectory_id), sequences in by_trajectory:
        if number != prompt_number:
            prompt_number = number
            tree_ids = {}
        *segments, row = sequences

        fork = None
        parent_id: str | None = row.get("fork_parent")
        if parent_id:
            tree_ids[trajectory_id] = tree_ids.get(parent_id, parent_id)
            fork = Fork(
                tree_id=tree_ids[trajectory_id],
                parent_id=parent_id,
                turns=row["fork_turns"],
                tokens=row["fork_tokens"],
            )

        trajectory = _sequence(row)
        *turns, last_turn = trajectory.turns
        calls = tuple(map(_restore_call, row["tool_calls"]))
        reward_parts = json.loads(row["reward_parts"])
        tool_scores = json.loads(row.get("tool_scores", "{}"))
        yield replace(
            trajectory,
            turns=(*turns, replace(last_turn, tool_calls=calls)),
            segments=tuple(map(_sequence, segments)),
            fork=fork,
            reward=as_score(row["reward"], "a reward"),
            reward_parts={name: as_score(part, name) for name, part in reward_parts.items()},
            messages=tuple(row["messages"]),
            tool_scores={name: as_score(value, name) for name, value in tool_scores.items()},
            role=row.get("role"),
            row=_restore_row(row),
        )


def _restore_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the data from which a trajectory was sampled, without its prompt."""
    fields = json.loads(row.get("row_fields", "{}"))
    reward_model = fields.pop("reward_model", {})
    return {
        "data_source": row["data_source"],
        "reward_model": {**reward_model, "ground_truth": json.loads(row["ground_truth"])},
        "extra_info": json.loads(row["extra_info"]),
        **fields,
    }


def _restore_call(call: Mapping[str, Any]) -> ToolCallRecord:
    return ToolCallRecord(**{**call, "arguments": json.loads(call["arguments"])})


def _sequence(row: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of one row, without what it shares with other sequences."""
    mask = row["response_mask"]
    turns: list[Turn] = []
    stop_reasons = iter(row["stop_reasons"])
    scores = iter(row.get("turn_scores", ()))
    end = 0
    for length in row.get("turn_lengths") or _sampled_spans(mask):
        begin = end
        sampled_end = begin + length
        if not all(mask[begin:sampled_end]) or not begin <= sampled_end <= len(mask):
            raise ValueError("turn_lengths are not those of response_mask")
        end = sampled_end
        while end < len(mask) and not mask[end]:
            end += 1
        output = TokenOutput(
            token_ids=tuple(row["response_ids"][begin:sampled_end]),
            log_probs=tuple(row["rollout_logprobs"][begin:sampled_end]),
            policy_versions=tuple(row["policy_versions"][begin:sampled_end]),
            stop_reason=StopReason(next(stop_reasons, "missing")),
            context_digest="",
        )
        appended_ids = tuple(row["response_ids"][sampled_end:end])
        turns.append(Turn(output=output, appended_ids=appended_ids, score=next(scores, None)))
    if end < len(mask):
        raise ValueError("turn_lengths are not those of response_mask")
    return Trajectory.from_turns(
        prompt_ids=row["prompt_ids"],
        turns=turns,
        trajectory_id=row["trajectory_id"],
        group_id=row["group_id"],
        agent_name=row["agent_name"],
        finish_reason=FinishReason(row["finish_reason"]),
    )


def _sampled_spans(mask: Sequence[int]) -> list[int]:
    """Return the lengths of the spans that were sampled.

    >>> _sampled_spans([1, 1, 0, 1])
    [2, 1]
    """
    spans = []
    for is_sampled, span in itertools.groupby(mask):
        if is_sampled:
            spans.append(len(list(span)))
    return spans
