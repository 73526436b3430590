"""A finished journal as the file a user asked for: written beside it and moved there, whole or not at all.

::

    FILE.parquet   one table                         FILE.parquet.summary.json
    FILE.jsonl     the same columns, a line a row    FILE.jsonl.summary.json
    FOLDER         data/train-00000-of-00002.parquet, …, README.md with the dataset's configuration, summary.json:
                   datasets.load_dataset("FOLDER") takes it as it is
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.evaluate.collection.columns import schema
from jax_agent_rl.evaluate.collection.journal import Journal
from jax_agent_rl.utils.files import write_atomically, writing

SHARD_BYTES = 256 << 20
"""Of the journal, per file of a dataset folder; and what is in memory at a time."""

_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

Trajectories of `{policy}` on `{data}`, collected by `jax-agent-rl rollout`: {kept} of {started} that were started.
`summary.json` says how.
"""


@dataclass(frozen=True)
class Target:
    """Where a collection goes.

    Attributes:
        path: as the user gave it.
        kind: by its ending; none is a folder.
    """

    path: Path
    kind: Literal["parquet", "jsonl", "folder"]

    @classmethod
    def of(cls, path: Path) -> Target:
        """ConfigError: an ending that means nothing here."""
        match path.suffix:
            case ".parquet":
                return cls(path, "parquet")
            case ".jsonl":
                return cls(path, "jsonl")
            case "":
                return cls(path, "folder")
        raise ConfigError(f"--out {path}: write FILE.parquet, FILE.jsonl, or a FOLDER (a name without an ending)")

    @property
    def journal(self) -> Path:
        """Of a collection that is not finished."""
        return self._beside(".partial.jsonl")

    @property
    def summary(self) -> Path:
        """Of a collection that is finished."""
        return self._beside("summary.json")

    @property
    def is_taken(self) -> bool:
        """Something else stands there."""
        if self.kind == "folder":
            return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        return self.path.exists()

    def _beside(self, name: str) -> Path:
        return self.path / name if self.kind == "folder" else Path(f"{self.path}.{name.lstrip('.')}")


def write(target: Target, journal: Journal, summary: Mapping[str, Any]) -> None:
    """Writes everything in the order of the prompts, then the summary; the journal is removed last.

    Raises:
        StorageError: there is no room; nothing was replaced, and the journal is there.
    """
    numbers = sorted(journal.sizes)
    if target.kind == "folder":
        _write_folder(target.path, journal, numbers, summary)
    else:
        temporary = target.path.with_name(target.path.name + ".tmp")
        with writing(target.path):
            (_write_parquet if target.kind == "parquet" else _write_lines)(temporary, journal, numbers)
            os.replace(temporary, target.path)
    write_atomically(target.summary, json.dumps(summary, indent=2) + "\n")
    target.journal.unlink()


def _write_folder(folder: Path, journal: Journal, numbers: Sequence[int], summary: Mapping[str, Any]) -> None:
    shards = list(_portions(numbers, journal.sizes)) or [[]]
    temporary, final = folder / ".data", folder / "data"
    with writing(folder):
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that died here
        temporary.mkdir()
        for index, shard in enumerate(shards):
            _write_parquet(temporary / f"train-{index:05}-of-{len(shards):05}.parquet", journal, shard)
        temporary.rename(final)
    write_atomically(folder / "README.md", _CARD.format_map(summary))


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
    """Cuts prompts into portions of about :data:`SHARD_BYTES`."""
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
