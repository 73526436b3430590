"""A data set: the rows of files, globs and Hub datasets, one after another.

::

    data.train ──► find_files (globs, Hub) ──► JsonLines, ParquetRows ──► Dataset ──► DataCursor, agents
                                               all rows checked once         └─► RowOutlines ──► checks of a run
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from jax_agent_rl.config import DataSource
from jax_agent_rl.data.rows import JsonLines, ParquetRows, Row, RowChecks, RowGroups
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.hub import dataset_files, hub_name

_SUFFIXES = (".jsonl", ".parquet")
_HUB = re.compile(
    r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?(?:/(?P<files>.+))?"
)
Part = JsonLines | ParquetRows


class Dataset(Sequence[Row]):
    """Rows in the order of their files; see :func:`open_dataset`.

    Args:
        parts: the files.
        held: number of row groups that may be in memory at a time.
    """

    def __init__(self, parts: Sequence[Part], held: int) -> None:
        self.parts = tuple(parts)
        self.row_groups: list[int] = [size for part in self.parts for size in part.row_groups]
        streamed = sum(len(part.row_groups) for part in self.parts if isinstance(part, ParquetRows))
        self.held = held if streamed > held else len(self.row_groups)  # what fits is shuffled as a whole
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no row {number} of {len(self)}")
        number %= len(self)
        at = int(np.searchsorted(self._ends, number, side="right"))
        return self.parts[at][number - (int(self._ends[at - 1]) if at else 0)]

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that prompts show."""
        return frozenset[str]().union(*(part.modalities for part in self.parts))


class RowOutlines(Collection[Row]):
    """The rows of several data sets, without the columns that only agents read (prompts, images, videos).

    Iterating over them takes little memory, and less time than over the rows.
    """

    def __init__(self, *datasets: Dataset) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self._datasets))

    def __iter__(self) -> Iterator[Row]:
        return (row for dataset in self._datasets for part in dataset.parts for row in part.without_prompts())

    def __contains__(self, row: object) -> bool:
        return any(row == each for each in self)


def open_dataset(
    sources: Sequence[DataSource | str | Path],
    checks: RowChecks | None = None,
    *,
    limit: int | None = None,
    row_groups: int = 8,
) -> Dataset:
    """Find the files of sources, and check their rows.

    JSON Lines are kept in memory; of Parquet files, a few row groups are.

    Args:
        sources: as in ``data.train``.
        checks: names that rows may use; default any.
        limit: how many rows are used from the start; None: all.
        row_groups: number of Parquet row groups in memory at a time.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row lacks a field or has an invalid one; names the
            file, the row and the fix.
    """
    groups, left, parts = RowGroups(row_groups), limit, []
    sources = [source if isinstance(source, DataSource) else DataSource(path=str(source)) for source in sources]
    for file in (file for source in sources for file in find_files(source)):
        if left == 0:
            break
        part = _open(file, checks or RowChecks(), groups, left)
        if not part:
            raise DataError(f"{file} holds no rows")
        left = left and left - len(part)
        parts.append(part)
    return Dataset(parts, row_groups)


def load_rows(path: str | Path, **names: Collection[str] | None) -> list[Row]:
    """Read all rows of a source into memory; ``names`` are those of :class:`~jax_agent_rl.data.rows.RowChecks`."""
    return list(open_dataset([path], RowChecks(**names)))


def find_files(source: DataSource) -> list[Path]:
    """Return the files of a source, those of a glob sorted by name; download a Hub dataset's.

    Raises:
        DataError: there is none, or the Hub cannot be reached.
    """
    file = Path(source.path).expanduser()
    if hub := _hub_dataset(source.path):
        repository, revision, pattern = hub
        return dataset_files(
            repository, revision, pattern=pattern, name=source.name, split=source.split or "train", suffixes=_SUFFIXES
        )
    if source.name or source.split:
        raise DataError(f"data source {source}: name and split select files of Hub datasets; remove them")
    if file.is_file():
        return [file]
    if file.is_dir():
        raise DataError(f"dataset {source.path!r} is a folder; name its files, e.g. {str(file / '*.parquet')!r}")
    if glob.has_magic(source.path):
        if found := sorted(Path(name) for name in glob.glob(str(file), recursive=True) if Path(name).is_file()):
            return found
        raise DataError(f"no file matches {source.path!r}; correct data.train / data.eval")
    raise DataError(
        f"dataset file {source.path!r} does not exist; correct data.train / data.eval, or write a "
        "built-in task's with `jax-agent-rl prepare shop` (quickstart, recipes) or `prepare calculator` (its example)"
    )


def _hub_dataset(path: str) -> tuple[str, str | None, str | None] | None:
    """Return repository, revision and glob of a path that names a dataset of the Hub."""
    if path.startswith("hf://"):
        if found := _HUB.fullmatch(path):
            return found["id"], found["revision"], found["files"]
        raise DataError(f"{path!r} names no dataset; write hf://datasets/owner/name[@revision][/GLOB]")
    named = None if path.endswith(_SUFFIXES) or glob.has_magic(path) else hub_name(path)
    return named and (*named, None)


def _open(file: Path, checks: RowChecks, groups: RowGroups, limit: int | None) -> Part:
    match file.suffix:
        case ".jsonl":
            return JsonLines(file, checks, limit=limit)
        case ".parquet":
            return ParquetRows(file, checks, groups, limit=limit)
        case other:
            raise DataError(f"{file}: files ending in {other!r} are not read; use .jsonl or .parquet")
