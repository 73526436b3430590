"""A data set: the rows of JSON Lines and Parquet files, globs and Hub datasets, one after another.

::

    data.train ──► find_files (globs, Hub) ──► JsonLines, ParquetRows ──► Dataset ──► DataCursor, agents
                                               all rows checked once         └─► RowOutlines ──► checks of a run
"""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from jax_agent_rl.config import DataSource
from jax_agent_rl.data.rows import Row, RowChecks, media_kinds
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.hub import dataset_files, hub_name

if TYPE_CHECKING:
    import pyarrow

_SUFFIXES = (".jsonl", ".parquet")
_HUB = re.compile(
    r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/\w+/[\w.-]+|[\w.-]+))?(?:/(?P<files>.+))?"
)
_CHUNK = 1024
"""Rows of a file in memory that are shuffled together with row groups of Parquet files."""


class JsonLines:
    """The rows of a ``.jsonl`` file, in memory.

    Args:
        file: the file.
        checks: applied to every row.
        limit: how many rows are used from the start; None: all.

    Attributes:
        row_groups: rows of each part of the file that is shuffled as a unit.
        modalities: kinds of media in its prompts.

    Raises:
        DataError: the file or a row is invalid.
    """

    def __init__(self, file: Path, checks: RowChecks, *, limit: int | None = None) -> None:
        read = (checks.read(row, file, where) for where, row in json_lines(file))
        self._rows = list(itertools.islice(read, limit))
        self.modalities = frozenset[str]().union(*map(media_kinds, self._rows))
        self.row_groups = [min(_CHUNK, len(self._rows) - at) for at in range(0, len(self._rows), _CHUNK)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]

    def without_prompts(self) -> Iterator[Row]:
        """Yield every row; these have their prompts, since they are in memory anyway."""
        return iter(self._rows)


def json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield what each line holds and where it stands; raise DataError for one that is no JSON."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"line {number}"
            try:
                yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 text ({error.reason} at byte {error.start}); convert it"
            except (ValueError, RecursionError) as error:
                problem = f"not valid JSON ({error}): {line[:80]!r}"
            else:
                continue
            raise DataError(f"{file}, {where}: {problem}")


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

    def read(self, file: ParquetRows, group: int) -> pyarrow.Table:
        """Return a row group, from memory if it is there."""
        key = file.path, group
        if key not in self._tables:
            while len(self._tables) >= self._held:  # before the next is read, or there would be one more
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
        limit: how many rows are used from the start; None: all.

    Attributes:
        path: the file.
        row_groups: rows of each group.
        modalities: kinds of media in its prompts.

    Raises:
        DataError: the file or a row is invalid.
    """

    def __init__(self, file: Path, checks: RowChecks, groups: RowGroups, *, limit: int | None = None) -> None:
        import pyarrow.parquet

        self.path, self._checks, self._groups = file, checks, groups
        with _reading(file):
            self._metadata = pyarrow.parquet.read_metadata(file)
        sizes = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        ends = np.minimum(np.cumsum(sizes), self._metadata.num_rows if limit is None else limit)
        self.row_groups: Sequence[int] = [n for n in np.diff(ends, prepend=0).tolist() if n]
        self._ends = ends[: len(self.row_groups)]
        self.modalities = frozenset[str]().union(*(media_kinds(self[number]) for number in range(len(self))))

    def __len__(self) -> int:
        return sum(self.row_groups)

    def __getitem__(self, number: int) -> Row:
        group = int(np.searchsorted(self._ends, number, side="right"))
        table = self._groups.read(self, group)
        row = table.slice(number - (int(self._ends[group - 1]) if group else 0), 1).to_pylist()[0]
        return self._checks.read(row, self.path, f"row {number + 1}")

    def without_prompts(self) -> Iterator[Row]:
        """Yield every row without what only agents read, a group at a time."""
        with _reading(self.path):
            columns = [field.name for field in self._metadata.schema.to_arrow_schema() if field.name not in _LARGE]
        for group, size in enumerate(self.row_groups):
            yield from self.read_group(group, columns).slice(0, size).to_pylist()

    def read_group(self, group: int, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """Read a row group from the file; raise DataError if it cannot be read."""
        import pyarrow.parquet

        with _reading(self.path), pyarrow.parquet.ParquetFile(self.path, metadata=self._metadata) as file:
            return file.read_row_group(group, columns=columns)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from None


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
