"""Parquet files as rows, of which a few row groups are in memory at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jax_agent_rl.data.media import media_kinds
from jax_agent_rl.data.rows import Row, RowChecks
from jax_agent_rl.errors import DataError

if TYPE_CHECKING:
    import pyarrow

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
