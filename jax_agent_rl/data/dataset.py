"""A data set: the rows of JSON Lines and Parquet files, globs and Hub datasets, one after another.

::

    data.train ─► find_files ─► JsonLines, ParquetRows ─┬─► Dataset ─► DataCursor, agents
                  globs, Hub    read by ``reader``,     │
                                all rows checked once   └─► RowsWithoutPrompts ─► checks of a run
"""

from __future__ import annotations

import glob
import itertools
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from jax_agent_rl.config import Config, DataSource
from jax_agent_rl.data.reader import SUFFIXES, LocatedRow, ParquetFile, Row, read_row_file
from jax_agent_rl.data.rows import RowChecks, media_files, media_kinds
from jax_agent_rl.data.task_folder import task_folder
from jax_agent_rl.errors import ConfigError, DataError
from jax_agent_rl.utils.fingerprints import RowFingerprint
from jax_agent_rl.utils.hub import dataset_files, hub_name

if TYPE_CHECKING:
    import pyarrow

_HUB = re.compile(
    r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?"
    r"(?:/(?P<files>.+))?"
)
_CHUNK = 1024
"""Number of rows of a JSON Lines file that are shuffled as a unit, as row groups of Parquet are."""


def _add_to_fingerprint(fingerprint: RowFingerprint, row: Row, checked: Row, location: str) -> None:
    """Add a row as it was read, and the images, videos and task that it names."""
    task = task_folder(checked)
    if task is not None and not (task / "task.toml").is_file():
        task = None  # agents of other kinds may mean something else by it
    try:
        fingerprint.add(row, media_files(checked), task)
    except OSError as error:
        raise DataError(f"{location}: a file that the row names cannot be read: {error}") from None


class JsonLines:
    """The rows of a ``.jsonl`` file, in memory.

    Args:
        checks: applied to every row.
        fingerprint: takes the rows as they are read.
        limit: number of rows that are used from the start; None: all.

    Attributes:
        row_groups: number of rows of each part of the file that is shuffled as a unit.
        modalities: kinds of media in its prompts.

    Raises:
        DataError: the file or a row is invalid.
    """

    def __init__(
        self,
        file: Path,
        checks: RowChecks,
        fingerprint: RowFingerprint,
        *,
        limit: int | None = None,
    ) -> None:
        self._rows: list[LocatedRow] = []
        kinds: set[str] = set()
        for location, row in itertools.islice(read_row_file(file), limit):
            checked = checks.read(row, location, file.parent)
            _add_to_fingerprint(fingerprint, row, checked, location)
            self._rows.append(LocatedRow(location, checked))
            kinds |= media_kinds(checked)
        self.modalities = frozenset(kinds)

        count = len(self._rows)
        self.row_groups = [min(_CHUNK, count - begin) for begin in range(0, count, _CHUNK)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number].row

    def without_prompts(self) -> Iterator[LocatedRow]:
        """Yield every row without what only agents read."""
        for location, row in self._rows:
            columns = {name: value for name, value in row.items() if name not in _PROMPT_COLUMNS}
            yield LocatedRow(location, columns)


_PROMPT_COLUMNS = ("prompt", "images", "videos")
"""Large columns, which no check of a whole data set needs again."""


class RowGroups:
    """A cache of row groups as compact Arrow tables; the least recently used one is dropped first.

    Args:
        capacity: number of row groups.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tables: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def read(self, file: ParquetFile, group: int) -> pyarrow.Table:
        """Return a row group, from memory if it is there."""
        key = (file.path, group)
        if key not in self._tables:
            # Before the next is read, or there would be one more in memory.
            while len(self._tables) >= self._capacity:
                self._tables.popitem(last=False)
            self._tables[key] = file.read_group(group)
        self._tables.move_to_end(key)
        return self._tables[key]


class ParquetRows:
    """The rows of a Parquet file. All are checked once, when it is opened.

    Args:
        checks: applied to every row.
        groups: holds row groups of this file and of others.
        fingerprint: takes the rows as they are read.
        limit: number of rows that are used from the start; None: all.

    Attributes:
        row_groups: number of rows of each group.
        modalities: kinds of media in its prompts.

    Raises:
        DataError: the file or a row is invalid.
    """

    def __init__(
        self,
        file: Path,
        checks: RowChecks,
        groups: RowGroups,
        fingerprint: RowFingerprint,
        *,
        limit: int | None = None,
    ) -> None:
        self._file = ParquetFile(file)
        self._checks = checks
        self._groups = groups
        self._used_sizes = _limit_sizes(self._file.group_sizes, limit)
        self._length = sum(self._used_sizes)
        self.row_groups = [size for size in self._used_sizes if size]

        kinds: set[str] = set()
        for group, size in enumerate(self._used_sizes):
            for location, row in self._unchecked_rows(group, 0, size):
                checked = self._checks.read(row, location, file.parent)
                _add_to_fingerprint(fingerprint, row, checked, location)
                kinds |= media_kinds(checked)
        self.modalities = frozenset(kinds)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Row:
        begins = self._file.group_begins
        group = int(np.searchsorted(begins, number, side="right")) - 1
        ((location, row),) = self._unchecked_rows(group, number - begins[group], 1)
        return self._checks.read(row, location, self._file.path.parent)

    def without_prompts(self) -> Iterator[LocatedRow]:
        """Yield every row without what only agents read, a group at a time."""
        columns = [column for column in self._file.columns if column not in _PROMPT_COLUMNS]
        for group, size in enumerate(self._used_sizes):
            if size:
                rows = self._file.read_group(group, columns).slice(0, size)
                yield from self._file.rows(rows, self._file.group_begins[group])

    def _unchecked_rows(self, group: int, begin: int, count: int) -> Iterator[LocatedRow]:
        """Yield ``count`` rows of a group from the ``begin``-th on."""
        if not count:
            return
        rows = self._groups.read(self._file, group).slice(begin, count)
        yield from self._file.rows(rows, self._file.group_begins[group] + begin)


def _limit_sizes(sizes: Sequence[int], limit: int | None) -> list[int]:
    """Return how many rows of each row group are used if ``limit`` are used in all."""
    if limit is None:
        return list(sizes)
    used_sizes = []
    remaining = limit
    for size in sizes:
        used_size = min(size, remaining)
        used_sizes.append(used_size)
        remaining -= used_size
    return used_sizes


Part = JsonLines | ParquetRows


class Dataset(Sequence[Row]):
    """Rows in the order of their files; see :func:`open_dataset`.

    Args:
        parts: the rows of each file.
        max_groups: number of row groups that may be in memory at a time.
        fingerprint: of the rows, whatever files they are in.
    """

    def __init__(self, parts: Sequence[Part], max_groups: int, fingerprint: str) -> None:
        self.parts = tuple(parts)
        self.fingerprint = fingerprint

        self.row_groups: list[int] = []
        streamed_groups = 0
        for part in self.parts:
            self.row_groups += part.row_groups
            if isinstance(part, ParquetRows):
                streamed_groups += len(part.row_groups)
        # What fits into memory is shuffled as a whole.
        is_streamed = streamed_groups > max_groups
        self.max_groups = max_groups if is_streamed else len(self.row_groups)
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no row {number} of {len(self)}")

        number %= len(self)
        index = int(np.searchsorted(self._ends, number, side="right"))
        begin = int(self._ends[index - 1]) if index else 0
        return self.parts[index][number - begin]

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that prompts show."""
        return frozenset[str]().union(*(part.modalities for part in self.parts))


class RowsWithoutPrompts(Collection[Row]):
    """The rows of several data sets without prompts, images and videos, which only agents read.

    Iterating over them takes little memory, and less time than over the rows.
    """

    def __init__(self, *datasets: Dataset) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self._datasets)

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.located())

    def located(self) -> Iterator[LocatedRow]:
        """Yield the rows with their locations, for messages."""
        for dataset in self._datasets:
            for part in dataset.parts:
                yield from part.without_prompts()

    def __contains__(self, row: object) -> bool:
        return any(row == other_row for other_row in self)


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
        checks: names that rows may use; None: any.
        limit: number of rows that are used from the start; None: all.
        row_groups: number of Parquet row groups in memory at a time.

    Raises:
        DataError: a file is missing, unreadable or empty, or a row lacks a field or has an invalid
            one; names the file, the row and the fix.
    """
    checks = checks or RowChecks()
    sources = [
        source if isinstance(source, DataSource) else DataSource(path=str(source))
        for source in sources
    ]

    groups = RowGroups(row_groups)
    fingerprint = RowFingerprint()
    parts: list[Part] = []
    remaining = limit

    for file in _files_of(sources):
        if remaining == 0:
            break
        part = _open_file(file, checks, groups, fingerprint, remaining)
        if not part:
            raise DataError(f"{file} holds no rows")
        if remaining is not None:
            remaining -= len(part)
        parts.append(part)

    return Dataset(parts, row_groups, fingerprint.value())


def _files_of(sources: Iterable[DataSource]) -> Iterator[Path]:
    """Yield the files of sources. A source is looked for when its first file is needed."""
    for source in sources:
        yield from find_files(source)


def evaluation_sources(config: Config, data: str | None) -> tuple[DataSource, ...]:
    """Return the sources of an evaluation: ``--data``, or ``data.eval``.

    Raises:
        ConfigError: there are none.
    """
    sources = (DataSource(path=data),) if data else config.data.eval
    if sources is None:
        raise ConfigError(
            "no rows to evaluate: data.eval is not set; give --data FILE (.jsonl or .parquet)"
        )
    return sources


def collection_sources(config: Config, data: str | None) -> tuple[DataSource, ...]:
    """Return the sources of a collection: ``--data``, or ``data.train``.

    Raises:
        ConfigError: there are none.
    """
    sources = (DataSource(path=data),) if data else config.data.train
    if not all(source.path for source in sources):
        raise ConfigError(
            "no rows are named; give --data FILE (.jsonl or .parquet), or set data.train"
        )
    return sources


def is_downloaded(source: DataSource) -> bool:
    """Return whether the files of a source come from the Hub."""
    return _hub_dataset(source.path) is not None


def find_files(source: DataSource) -> list[Path]:
    """Return the files of a source, a glob's sorted by name; download a Hub dataset's.

    Raises:
        DataError: there is none, or the Hub cannot be reached.
    """
    hub_dataset = _hub_dataset(source.path)
    if hub_dataset:
        repository, revision, pattern = hub_dataset
        return dataset_files(
            repository,
            revision,
            pattern=pattern,
            name=source.name,
            split=source.split or "train",
            suffixes=SUFFIXES,
        )
    if source.name or source.split:
        raise DataError(
            f"data source {source}: name and split select files of Hub datasets; remove them"
        )

    file = Path(source.path).expanduser()
    if file.is_file():
        return [file]
    if file.is_dir():
        raise DataError(
            f"dataset {source.path!r} is a folder; name its files, e.g. {str(file / '*.parquet')!r}"
        )
    if glob.has_magic(source.path):
        paths = [Path(name) for name in glob.glob(str(file), recursive=True)]
        files = [path for path in paths if path.is_file()]
        if files:
            return sorted(files)
        raise DataError(f"no file matches {source.path!r}; correct data.train / data.eval")
    raise DataError(
        f"dataset file {source.path!r} does not exist; correct data.train / data.eval, or write a"
        " built-in task's with `jax-agent-rl prepare shop` (quickstart, recipes) or `prepare"
        " calculator` (its example)"
    )


def _hub_dataset(path: str) -> tuple[str, str | None, str | None] | None:
    """Return repository, revision and glob of a path that names a dataset of the Hub."""
    if path.startswith("hf://"):
        match = _HUB.fullmatch(path)
        if match is None:
            raise DataError(
                f"{path!r} names no dataset; write hf://datasets/owner/name[@revision][/GLOB]"
            )
        return match["id"], match["revision"], match["files"]

    if path.endswith(SUFFIXES) or glob.has_magic(path):
        return None
    name = hub_name(path)
    if name is None:
        return None
    repository, revision = name
    return repository, revision, None


def _open_file(
    file: Path, checks: RowChecks, groups: RowGroups, fingerprint: RowFingerprint, limit: int | None
) -> Part:
    if file.suffix == ".parquet":
        return ParquetRows(file, checks, groups, fingerprint, limit=limit)
    return JsonLines(file, checks, fingerprint, limit=limit)
