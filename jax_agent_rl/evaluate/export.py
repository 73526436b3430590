"""The files of a collection: its journal while it runs, and the table into which that is exported, atomically.

The journal is a JSON Lines file that only grows, and from which a later process continues::

    {"settings": {…}}                                    of the collection; another one may not write here
    {"row": 3, "records": [{…}, …], "dropped": {…}}      a finished prompt, in order of completion
    {"lost": {"cancelled": 5}}                           started by an interrupted process, but not written

A last line cut off by a crash is removed. A prompt without any trajectory is tried again; its losses stay counted.
Halves of surrogate pairs become question marks, because no output format can hold them. The table is one of::

    FILE.parquet   one table                         FILE.parquet.summary.json
    FILE.jsonl     the same columns, a line a row    FILE.jsonl.summary.json
    FOLDER         data/train-00000-of-00002.parquet, …, README.md with the dataset's configuration, summary.json:
                   datasets.load_dataset("FOLDER") reads it

It has one row per sequence to train on, exact to the token. Most trajectories are one sequence; those sampled in
several contexts (an edited history, a history window) are several, numbered by ``sequence``, which repeat the reward
and everything else about the trajectory. Values of varying shape are JSON text: ``ground_truth``, ``extra_info``,
``reward_parts``, ``arguments``, ``media``.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.types import DropReason, Group, Trajectory
from jax_agent_rl.utils.files import write_atomically, writing
from jax_agent_rl.validation import replace_lone_surrogates

if TYPE_CHECKING:
    import pyarrow

SHARD_BYTES = 256 << 20  # journal bytes per file of a dataset folder, and in memory at a time
CALL_FIELDS = ("name", "arguments", "observation", "error", "reward", "seconds")
_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

Trajectories of `{policy}` on `{data}`, collected by `jax-agent-rl rollout`: {kept} of {started} that were started.
`summary.json` has the settings.
"""


class Journal:
    """The journal of a collection; a context manager.

    Args:
        file: created if it does not exist.
        settings: everything on which the trajectories depend.

    Attributes:
        kept: trajectories in it.
        dropped: trajectories that were started and lost, by reason.
        sizes: bytes of each finished prompt, by its number.

    Raises:
        ConfigError: it belongs to another collection, or another process writes it.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self.file = file
        self.kept = 0
        self.dropped: Counter[str] = Counter()
        self.sizes: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream = file.open("a+b")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(settings)
        except BlockingIOError:
            self._stream.close()
            raise ConfigError(f"{file}: another process writes to it; choose another --out") from None
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def started(self) -> int:
        """Trajectories started, in all processes that ended by themselves."""
        return self.kept + self.dropped.total()

    def add(self, number: int, records: Sequence[Mapping[str, Any]], dropped: Mapping[DropReason, int]) -> None:
        """Record a finished prompt.

        Args:
            number: number of the prompt.
            records: its rows; empty if every trajectory was lost.
            dropped: lost trajectories by reason.
        """
        line = {"row": number, "records": records, "dropped": {str(k): v for k, v in dropped.items()}}
        offset = self._stream.seek(0, 2)
        self._append(line)
        self._count(line, offset, self._stream.tell() - offset)

    def lose(self, lost: Mapping[DropReason, int]) -> None:
        """Record trajectories that were started, but will not be added."""
        counts = {str(reason): count for reason, count in lost.items() if count}
        if counts:
            self._append({"lost": counts})
            self.dropped.update(counts)

    def lines(self, numbers: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        """Yield the records of each of these prompts."""
        for number in numbers:
            self._stream.seek(self._offsets[number])
            yield json.loads(self._stream.readline())["records"]

    def _append(self, line: Mapping[str, Any]) -> None:
        with writing(self.file):
            self._stream.write(replace_lone_surrogates(json.dumps(line, ensure_ascii=False)).encode() + b"\n")
            self._stream.flush()

    def _read(self, settings: Mapping[str, Any]) -> None:
        self._stream.seek(0)
        offset, before = 0, None
        for raw in self._stream:
            if not raw.endswith(b"\n"):
                break
            line = json.loads(raw)
            if "settings" in line:
                before = line["settings"]
            elif "lost" in line:
                self.dropped.update(line["lost"])
            else:
                self._count(line, offset, len(raw))
            offset += len(raw)
        if before is not None and self.sizes:
            require_same(settings, before, self.file)
        elif before != json.loads(json.dumps(settings)):  # nothing was collected with the other settings: start over
            offset = 0
            self.dropped.clear()
        self._stream.truncate(offset)
        if not offset:
            self._append({"settings": settings})

    def _count(self, line: Mapping[str, Any], offset: int, size: int) -> None:
        self.dropped.update(line["dropped"])
        self.kept += len({record["trajectory_id"] for record in line["records"]})
        if line["records"]:
            self._offsets[line["row"]], self.sizes[line["row"]] = offset, size


def require_same(settings: Mapping[str, Any], before: Mapping[str, Any], where: Path) -> None:
    """Compare the settings of two collections as JSON, key by key.

    Args:
        settings: settings of this collection.
        before: recorded settings.
        where: file in which they are recorded.

    Raises:
        ConfigError: they differ; names the keys and both values.
    """
    now, then = _flat(json.loads(json.dumps(settings))), _flat(before)
    differing = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key))
    if differing:
        named = "; ".join(f"{key} was {then.get(key)!r}, is {now.get(key)!r}" for key in differing[:5])
        raise ConfigError(
            f"{where} contains trajectories collected with other settings ({named}); choose another --out, or use the "
            "same settings to continue"
        )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The output of a collection; ``path`` is as given by the user, a folder if it has no suffix."""

    path: Path

    @classmethod
    def from_path(cls, path: Path) -> Target:
        """Return the target of a path; raises ConfigError for an unknown suffix."""
        if path.suffix not in ("", ".parquet", ".jsonl"):
            raise ConfigError(f"--out {path}: write FILE.parquet, FILE.jsonl, or a FOLDER (a name without an ending)")
        return cls(path)

    @property
    def is_folder(self) -> bool:
        return not self.path.suffix

    @property
    def journal(self) -> Path:
        """The journal of an unfinished collection."""
        return self._beside(".partial.jsonl")

    @property
    def summary(self) -> Path:
        """The summary of a finished collection."""
        return self._beside("summary.json")

    @property
    def is_taken(self) -> bool:
        """True if something exists at the path."""
        if self.is_folder:
            return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        return self.path.exists()

    def _beside(self, name: str) -> Path:
        return self.path / name if self.is_folder else Path(f"{self.path}.{name.lstrip('.')}")


def write(target: Target, journal: Journal, summary: Mapping[str, Any]) -> None:
    """Write all prompts in their order, then the summary; remove the journal last.

    Args:
        target: where to write.
        journal: the finished journal.
        summary: content of the summary file.

    Raises:
        StorageError: the disk is full; nothing was replaced, and the journal remains.
    """
    numbers = sorted(journal.sizes)
    if target.is_folder:
        _write_dir(target.path, journal, numbers, summary)
    else:
        temporary = target.path.with_name(target.path.name + ".tmp")
        with writing(target.path):
            (_write_parquet if target.path.suffix == ".parquet" else _write_lines)(temporary, journal, numbers)
            os.replace(temporary, target.path)
    write_atomically(target.summary, json.dumps(summary, indent=2) + "\n")
    target.journal.unlink()


def _write_dir(path: Path, journal: Journal, numbers: Sequence[int], summary: Mapping[str, Any]) -> None:
    shards = list(_portions(numbers, journal.sizes)) or [[]]
    temporary, final = path / ".data", path / "data"
    with writing(path):
        shutil.rmtree(temporary, ignore_errors=True)  # from a process that was killed here
        temporary.mkdir()
        for index, shard in enumerate(shards):
            _write_parquet(temporary / f"train-{index:05}-of-{len(shards):05}.parquet", journal, shard)
        temporary.rename(final)
    write_atomically(path / "README.md", _CARD.format_map(summary))


def _write_parquet(file: Path, journal: Journal, numbers: Sequence[int]) -> None:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(file, schema()) as writer:
        for portion in _portions(numbers, journal.sizes):
            rows = [record for records in journal.lines(portion) for record in records]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema()))


def _write_lines(file: Path, journal: Journal, numbers: Sequence[int]) -> None:
    names = schema().names
    with file.open("w", encoding="utf-8") as stream:
        for records in journal.lines(numbers):
            for record in records:
                stream.write(json.dumps({name: record[name] for name in names}, ensure_ascii=False) + "\n")


def _portions(numbers: Sequence[int], sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Split prompts into portions of about :data:`SHARD_BYTES`."""
    portion: list[int] = []
    size = 0
    for number in numbers:
        portion.append(number)
        size += sizes[number]
        if size >= SHARD_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


@functools.cache
def _columns() -> list[tuple[str, pyarrow.DataType, Callable[[Trajectory, Trajectory], Any]]]:
    """Return name, type and content of the columns, which is a function of a trajectory and one of its sequences."""
    import pyarrow as pa

    text, integer, number, ids = pa.string(), pa.int32(), pa.float64(), pa.list_(pa.int32())
    message = pa.struct([("role", text), ("content", text)])
    call = pa.struct([(name, number if name in ("reward", "seconds") else text) for name in CALL_FIELDS])
    return [
        ("data_source", text, lambda t, s: str(t.row.get("data_source"))),
        ("agent_name", text, lambda t, s: t.agent_name),
        ("group_id", text, lambda t, s: t.group_id),
        ("trajectory_id", text, lambda t, s: t.trajectory_id),
        ("prompt_ids", ids, lambda t, s: list(s.prompt_ids)),
        ("response_ids", ids, lambda t, s: list(s.response_ids)),
        ("response_mask", pa.list_(pa.int8()), lambda t, s: list(s.response_mask)),  # 1: sampled by the policy
        # 1: carries loss; differs with agent.mask_observations=false, and where a grammar decided
        ("loss_mask", pa.list_(pa.int8()), lambda t, s: list(s.loss_mask)),
        ("rollout_logprobs", pa.list_(pa.float32()), lambda t, s: list(s.rollout_logprobs)),  # 0 where not sampled
        ("policy_versions", ids, lambda t, s: list(s.policy_versions)),  # -1 where not sampled
        ("num_turns", integer, lambda t, s: s.num_turns),
        ("stop_reasons", pa.list_(text), lambda t, s: [str(turn.output.stop_reason) for turn in s.turns]),
        ("finish_reason", text, lambda t, s: str(s.finish_reason)),
        ("no_loss", text, lambda t, s: t.no_loss and str(t.no_loss)),  # why none of it carries loss, or null
        ("reward", number, lambda t, s: t.reward),
        ("reward_parts", text, lambda t, s: _json(t.reward_parts)),
        ("ground_truth", text, lambda t, s: _json((t.row.get("reward_model") or {}).get("ground_truth"))),
        ("extra_info", text, lambda t, s: _json(t.row.get("extra_info") or {})),
        ("messages", pa.list_(message), lambda t, s: [_message(one) for one in t.messages]),
        ("tool_calls", pa.list_(call), lambda t, s: [_call(one) for one in t.tool_calls]),
        # numbers of images and videos in the prompt, by kind
        ("media", text, lambda t, s: _json({kind: len(items) for kind, items in s.prompt_media.items()})),
        ("fork_parent", text, lambda t, s: t.fork and t.fork.parent_id),  # branches: parent, and what they inherited
        ("fork_turns", integer, lambda t, s: t.fork and t.fork.turns),
        ("fork_tokens", integer, lambda t, s: t.fork and t.fork.tokens),
    ]


def schema() -> pyarrow.Schema:
    """Return names and types of the columns; ``row`` is the number of the prompt in its file, from 0."""
    import pyarrow as pa

    return pa.schema([("row", pa.int64()), ("sequence", pa.int32()), *((name, kind) for name, kind, _ in _columns())])


def records(group: Group, number: int) -> list[dict[str, Any]]:
    """Return the rows of a group; ``number`` is that of the prompt in its file."""
    return [
        {"row": number, "sequence": position, **{name: value(trajectory, part) for name, _, value in _columns()}}
        for trajectory in group.trajectories
        for position, part in enumerate(trajectory.sequences)
    ]


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    return {"role": str(message["role"]), "content": str(message.get("content") or "")}


def _call(call: Any) -> dict[str, Any]:
    return {name: _json(call.arguments) if name == "arguments" else getattr(call, name) for name in CALL_FIELDS}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
