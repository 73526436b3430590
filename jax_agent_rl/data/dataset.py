"""A data set: the rows of JSON Lines and Parquet files, globs and Hub datasets, one after another.

::

    data.train ──► find_files (globs, Hub) ──► JsonLines, ParquetRows ──► Dataset ──► DataCursor, agents
                                               read by ``reader``,           └─► RowsWithoutPrompts ──► checks of a run
                                               all rows checked once
"""

from __future__ import annotations

import glob
import itertools
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
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
    r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?(?:/(?P<files>.+))?"
)
_CHUNK = 1024
"""Rows of a file in memory that are shuffled together with row groups of Parquet files."""


def _add(content: RowFingerprint, row: Row, checked: Row, place: str) -> None:
    """Add a row as it was read to a fingerprint, and the images, videos and task that it names."""
    task = task_folder(checked)
    is_task = (
        task is not None and (task / "task.toml").is_file()
    )  # other agents may mean something else by it
    try:
        content.add(row, media_files(checked), task if is_task else None)
    except OSError as error:
        raise DataError(f"{place}: a file that the row names cannot be read: {error}") from None


class JsonLines:
    """The rows of a ``.jsonl`` file, in memory.

    Args:
        file: the file.
        checks: applied to every row.
        content: takes the rows as they are read.
        limit: how many rows are used from the start; None: all.

    Attributes:
        row_groups: rows of each part of the file that is shuffled as a unit.
        modalities: kinds of media in its prompts.

    Raises:
        DataError: the file or a row is invalid.
    """

    def __init__(
        self, file: Path, checks: RowChecks, content: RowFingerprint, *, limit: int | None = None
    ) -> None:
        self._rows: list[LocatedRow] = []
        for place, row in itertools.islice(read_row_file(file), limit):
            checked = checks.read(row, place, file.parent)
            _add(content, row, checked, place)
            self._rows.append(LocatedRow(place, checked))
        self.modalities = frozenset[str]().union(*(media_kinds(row) for _, row in self._rows))
        self.row_groups = [
            min(_CHUNK, len(self._rows) - at) for at in range(0, len(self._rows), _CHUNK)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number].row

    def without_prompts(self) -> Iterator[LocatedRow]:
        """Yield every row without what only agents read."""
        for place, row in self._rows:
            yield LocatedRow(
                place, {column: value for column, value in row.items() if column not in _LARGE}
            )


_LARGE = ("prompt", "images", "videos")
"""Columns that no check of a whole data set needs again."""


class RowGroups:
    """The row groups in memory, as compact Arrow tables; the one used longest ago makes room for the next.

    Args:
        held: how many there may be.
    """

    def __init__(self, held: int) -> None:
        self._held = held
        self._tables: OrderedDict[tuple[Path, int], pyarrow.Table] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def read(self, file: ParquetFile, group: int) -> pyarrow.Table:
        """Return a row group, from memory if it is there."""
        key = file.path, group
        if key not in self._tables:
            while (
                len(self._tables) >= self._held
            ):  # before the next is read, or there would be one more
                self._tables.popitem(last=False)
            self._tables[key] = file.read_group(group)
        self._tables.move_to_end(key)
        return self._tables[key]


class ParquetRows:
    """The rows of a Parquet file. All are checked once, when it is opened.

    Args:
        file: the file.
        checks: applied to every row.
        groups: holds its row groups, and those of other files.
        content: takes the rows as they are read.
        limit: how many rows are used from the start; None: all.

    Attributes:
        row_groups: rows of each group.
        modalities: kinds of media in its prompts.

    Raises:
        DataError: the file or a row is invalid.
    """

    def __init__(
        self,
        file: Path,
        checks: RowChecks,
        groups: RowGroups,
        content: RowFingerprint,
        *,
        limit: int | None = None,
    ) -> None:
        self._file = ParquetFile(file)
        self._checks = checks
        self._groups = groups
        self._used = _used_of(self._file.group_sizes, limit)
        self._length = sum(self._used)
        self.row_groups = [used for used in self._used if used]
        kinds: set[str] = set()
        for group, used in enumerate(self._used):
            for place, row in self._placed(group, 0, used):
                checked = self._checks.read(row, place, file.parent)
                _add(content, row, checked, place)
                kinds |= media_kinds(checked)
        self.modalities = frozenset(kinds)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Row:
        begins = self._file.group_begins
        group = int(np.searchsorted(begins, number, side="right")) - 1
        ((place, row),) = self._placed(group, number - begins[group], 1)
        return self._checks.read(row, place, self._file.path.parent)

    def without_prompts(self) -> Iterator[LocatedRow]:
        """Yield every row without what only agents read, a group at a time."""
        columns = [column for column in self._file.columns if column not in _LARGE]
        for group, used in enumerate(self._used):
            if used:
                table = self._file.read_group(group, columns).slice(0, used)
                yield from self._file.rows(table, self._file.group_begins[group])

    def _placed(self, group: int, begin: int, count: int) -> Iterator[LocatedRow]:
        """Yield ``count`` rows of a group from the ``begin``-th on, unchecked."""
        if not count:
            return
        table = self._groups.read(self._file, group).slice(begin, count)
        yield from self._file.rows(table, self._file.group_begins[group] + begin)


def _used_of(sizes: Sequence[int], limit: int | None) -> list[int]:
    """Return how many rows of each row group are used if ``limit`` are in all."""
    used = []
    left = sum(sizes) if limit is None else limit
    for size in sizes:
        used.append(min(size, left))
        left -= used[-1]
    return used


Part = JsonLines | ParquetRows


class Dataset(Sequence[Row]):
    """Rows in the order of their files; see :func:`open_dataset`.

    Args:
        parts: the files.
        held: number of row groups that may be in memory at a time.
        fingerprint: of the rows, whatever files they are in.
    """

    def __init__(self, parts: Sequence[Part], held: int, fingerprint: str) -> None:
        self.parts = tuple(parts)
        self.fingerprint = fingerprint
        self.row_groups: list[int] = [size for part in self.parts for size in part.row_groups]
        streamed = sum(len(part.row_groups) for part in self.parts if isinstance(part, ParquetRows))
        self.held = (
            held if streamed > held else len(self.row_groups)
        )  # what fits is shuffled as a whole
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


class RowsWithoutPrompts(Collection[Row]):
    """The rows of several data sets, without the columns that only agents read (prompts, images, videos).

    Iterating over them takes little memory, and less time than over the rows.

    Args:
        datasets: the data sets.
    """

    def __init__(self, *datasets: Dataset) -> None:
        self._datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self._datasets))

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.located())

    def located(self) -> Iterator[LocatedRow]:
        """Yield the rows with their places, for messages."""
        for dataset in self._datasets:
            for part in dataset.parts:
                yield from part.without_prompts()

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
        DataError: a file is missing, unreadable or empty, or a row lacks a field or has an invalid
            one; names the file, the row and the fix.
    """
    groups, left, parts, content = RowGroups(row_groups), limit, [], RowFingerprint()
    sources = [
        source if isinstance(source, DataSource) else DataSource(path=str(source))
        for source in sources
    ]
    for file in (file for source in sources for file in find_files(source)):
        if left == 0:
            break
        part = _open(file, checks or RowChecks(), groups, content, left)
        if not part:
            raise DataError(f"{file} holds no rows")
        left = left and left - len(part)
        parts.append(part)
    return Dataset(parts, row_groups, content.value())


def evaluation_sources(config: Config, data: str | None) -> tuple[DataSource, ...]:
    """Return the sources of an evaluation: ``--data``, or ``data.eval``; raise ConfigError if there are none."""
    named = (DataSource(path=data),) if data else config.data.eval
    if named is None:
        raise ConfigError(
            "no rows to evaluate: data.eval is not set; give --data FILE (.jsonl or .parquet)"
        )
    return named


def collection_sources(config: Config, data: str | None) -> tuple[DataSource, ...]:
    """Return the sources of a collection: ``--data``, or ``data.train``; raise ConfigError if there are none."""
    named = (DataSource(path=data),) if data else config.data.train
    if not all(source.path for source in named):
        raise ConfigError(
            "no rows are named; give --data FILE (.jsonl or .parquet), or set data.train"
        )
    return named


def is_downloaded(source: DataSource) -> bool:
    """Return whether the files of a source come from the Hub."""
    return _hub_dataset(source.path) is not None


def find_files(source: DataSource) -> list[Path]:
    """Return the files of a source, those of a glob sorted by name; download a Hub dataset's.

    Raises:
        DataError: there is none, or the Hub cannot be reached.
    """
    file = Path(source.path).expanduser()
    if hub := _hub_dataset(source.path):
        repository, revision, pattern = hub
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
    if file.is_file():
        return [file]
    if file.is_dir():
        raise DataError(
            f"dataset {source.path!r} is a folder; name its files, e.g. {str(file / '*.parquet')!r}"
        )
    if glob.has_magic(source.path):
        if found := sorted(
            Path(name) for name in glob.glob(str(file), recursive=True) if Path(name).is_file()
        ):
            return found
        raise DataError(f"no file matches {source.path!r}; correct data.train / data.eval")
    raise DataError(
        f"dataset file {source.path!r} does not exist; correct data.train / data.eval, or write a"
        " built-in task's with `jax-agent-rl prepare shop` (quickstart, recipes) or `prepare"
        " calculator` (its example)"
    )


def _hub_dataset(path: str) -> tuple[str, str | None, str | None] | None:
    """Return repository, revision and glob of a path that names a dataset of the Hub."""
    if path.startswith("hf://"):
        if found := _HUB.fullmatch(path):
            return found["id"], found["revision"], found["files"]
        raise DataError(
            f"{path!r} names no dataset; write hf://datasets/owner/name[@revision][/GLOB]"
        )
    named = None if path.endswith(SUFFIXES) or glob.has_magic(path) else hub_name(path)
    return named and (*named, None)


def _open(
    file: Path, checks: RowChecks, groups: RowGroups, content: RowFingerprint, limit: int | None
) -> Part:
    if file.suffix == ".parquet":
        return ParquetRows(file, checks, groups, content, limit=limit)
    return JsonLines(file, checks, content, limit=limit)
