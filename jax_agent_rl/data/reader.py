"""The one reader of row files: JSON Lines and Parquet files of the same rows give equal rows.

::

    FILE.jsonl ───► a line ─────► json ───────────┐
                                                  ├──► plain_row ──► LocatedRow ──► data sets,
    FILE.parquet ─► a few rows ─► Arrow values ───┘                                 sft, dpo, view

Parquet has one type per column, so it writes a null wherever a row lacks what another row has. JSON
has objects, lists, text, numbers, true and false, and Parquet has more. A row holds what JSON can
hold, by these rules:

====================================  =========================================================
in the file                           in the row
====================================  =========================================================
null as a column or as a value of an  absent: nobody can tell it from Parquet's padding. To pass
object, written or padded             a null on purpose, write the object as JSON text
null in a list                        None: lists are not padded
a number without a fraction           int, up to 2**53: Parquet makes 1 of ``[1, 2.5]`` a 1.0
decimal                               int, or the nearest float
map                                   object, its keys as text
date, time, timestamp                 text, as ISO 8601 writes it
duration                              number of seconds
UUID                                  text
bytes                                 text if they are UTF-8; images and videos of the prompt
                                      stay bytes
====================================  =========================================================

What a row cannot hold is an error that names the file, the row, the path in the row and the value:
NaN and infinity, halves of surrogate pairs, other bytes, a key twice in one object.
"""

from __future__ import annotations

import codecs
import json
import math
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.bounded_json import TooDeepError, decode_json
from jax_agent_rl.utils.files import read_lines
from jax_agent_rl.utils.surrogates import has_lone_surrogate

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".parquet")
"""Endings of the files that are read."""
MAX_LINE_BYTES = 256 << 20
"""Limit of one line of JSON."""
MAX_DEPTH = 100
"""Limit of objects and lists inside each other."""
_BATCH_ROWS = 64
"""Rows of a Parquet file that are in memory at a time."""
_BUFFER_BYTES = 1 << 20
_LARGEST_INT = 2**53
"""Up to here, a float without a fraction is exactly one integer."""
_MEDIA_COLUMNS = ("images", "videos")
_MEDIA_KEYS = frozenset({"bytes", "image", "video", "image_url", "video_url", "url"})
"""Keys of a prompt's parts under which images and videos are bytes."""
_NO_KEYS: frozenset[str] = frozenset()
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


class LocatedRow(NamedTuple):
    """A row and its location for messages, such as ``rows.jsonl, line 3``."""

    location: str
    row: Row


def read_row_file(file: Path, row_indices: Collection[int] | None = None) -> Iterator[LocatedRow]:
    """Yield every row of a file, in order.

    A few rows are in memory at a time, however many the file has.

    Args:
        row_indices: the rows to yield, from 0; other rows are neither converted nor checked.
            None: all.

    Raises:
        DataError: the file cannot be read, or a row cannot be held; names the location and the
            value.
    """
    match file.suffix:
        case ".jsonl":
            yield from read_json_lines(file, row_indices)
        case ".parquet":
            yield from ParquetFile(file).read_rows(row_indices)
        case suffix:
            raise DataError(
                f"{file}: files ending in {suffix!r} are not read; use {' or '.join(SUFFIXES)}"
            )


@contextmanager
def located(location: str) -> Iterator[None]:
    """Put the location of a row in front of a DataError about it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{location}: {error}") from error.__cause__


# --- JSON Lines -----------------------------------------------------------------------------------


def read_json_lines(file: Path, row_indices: Collection[int] | None = None) -> Iterator[LocatedRow]:
    """Yield rows of a file of JSON Lines, whatever its name; see :func:`read_row_file`."""
    index = 0
    try:
        for number, (_, line) in enumerate(read_lines(file, MAX_LINE_BYTES), 1):
            location = f"{file}, line {number}"
            if line is None:
                raise DataError(
                    f"{location}: has more than {MAX_LINE_BYTES} bytes; write one row per line"
                )

            if not line.strip():
                continue
            if row_indices is None or index in row_indices:
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield LocatedRow(location, plain_row(_parse(line, location), location))
            index += 1
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from None


def _parse(line: bytes, location: str) -> Any:
    """Return the JSON value of a line."""
    try:
        return decode_json(
            line,
            max_values=MAX_LINE_BYTES,
            max_nesting=MAX_DEPTH + 2,
            # plain_row refuses them with their path in the row, as it does in Parquet files.
            non_finite=True,
            lone_surrogates=True,
            unique_keys=True,
        )
    except TooDeepError:
        raise DataError(
            f"{location}: not valid JSON: inside more than {MAX_DEPTH} objects and lists; write it"
            " as JSON text"
        ) from None
    except ValueError as error:
        raise DataError(f"{location}: {error}: {line[:80]!r}") from None


# --- Parquet --------------------------------------------------------------------------------------


class ParquetFile:
    """A Parquet file, read by row groups.

    Attributes:
        columns: names of the columns.
        group_sizes: number of rows of each row group.
        group_begins: index of each group's first row.

    Raises:
        DataError: it cannot be read, or two columns have one name.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.path = path
        with self._reading():
            self._metadata = pyarrow.parquet.read_metadata(path)
            self.columns: list[str] = self._metadata.schema.to_arrow_schema().names
        repeated = _first_repeated(self.columns)
        if repeated is not None:
            raise DataError(f"{path}: two columns are called {repeated!r}; rename one")

        self.group_sizes = [
            self._metadata.row_group(number).num_rows
            for number in range(self._metadata.num_row_groups)
        ]
        self.group_begins: list[int] = np.cumsum([0, *self.group_sizes])[:-1].tolist()

    def read_group(self, group: int, columns: Collection[str] | None = None) -> pyarrow.Table:
        """Return a row group, or some of its columns, as the file holds them.

        Raises:
            DataError: it cannot be read.
        """
        import pyarrow.parquet

        names = None if columns is None else list(columns)
        with (
            self._reading(),
            pyarrow.parquet.ParquetFile(self.path, metadata=self._metadata) as file,
        ):
            return file.read_row_group(group, columns=names)

    def read_rows(self, row_indices: Collection[int] | None = None) -> Iterator[LocatedRow]:
        """Yield rows of the file, see :func:`read_row_file`.

        Row groups may be as large as the file.
        """
        for begin, table in self._batches(row_indices):
            if row_indices is None:
                yield from self.rows(table, begin)
                continue
            indices = [index for index in range(table.num_rows) if begin + index in row_indices]
            if indices:
                yield from self.rows(table, begin, indices)

    def _batches(self, row_indices: Collection[int] | None) -> Iterator[tuple[int, pyarrow.Table]]:
        """Yield a few rows at a time, with the index of the first.

        Groups without a wanted row are left out.
        """
        import pyarrow.parquet

        # Buffered, a column is read page by page; otherwise all of it that is in a row group is in
        # memory.
        with (
            self._reading(),
            pyarrow.parquet.ParquetFile(
                self.path, metadata=self._metadata, buffer_size=_BUFFER_BYTES
            ) as file,
        ):
            for group, begin in enumerate(self.group_begins):
                end = begin + self.group_sizes[group]
                if row_indices is not None and not any(
                    begin <= index < end for index in row_indices
                ):
                    continue
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                    yield begin, pyarrow.Table.from_batches([batch])
                    begin += batch.num_rows

    def rows(
        self, table: pyarrow.Table, begin: int, indices: Iterable[int] | None = None
    ) -> Iterator[LocatedRow]:
        """Yield the rows of a part of the file.

        Args:
            table: a part of the file, from :meth:`read_group`.
            begin: index in the file of the table's first row.
            indices: rows of the table to yield; None: all.

        Raises:
            DataError: a row cannot be held.
        """
        columns = {
            name: _Column(values)
            for name, values in zip(table.column_names, table.columns, strict=True)
        }
        if indices is None:
            indices = range(table.num_rows)
        for index in indices:
            location = f"{self.path}, row {begin + index + 1}"
            raw: Row = {}
            for name, column in columns.items():
                try:
                    raw[name] = column.value(index)
                except _UnusableError as error:
                    raise error.inside(name).at(location) from None
            yield LocatedRow(location, plain_row(raw, location))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.path} cannot be read as Parquet: {error}") from None


class _Column:
    """The Python values of a column: all at once if pyarrow converts its type, else one by one."""

    def __init__(self, values: pyarrow.ChunkedArray) -> None:
        self._values = values
        self._converted: list[Any] | None = None
        if _is_converted(values.type):
            # A ValueError is text that is not UTF-8: values are then converted one by one, so that
            # the row with it is named.
            with suppress(ValueError):
                self._converted = values.to_pylist()

    def value(self, index: int) -> Any:
        """Return the value of a row; raise :class:`_UnusableError` if it has none."""
        if self._converted is not None:
            return self._converted[index]
        return _python_value(self._values[index])


def _is_converted(kind: pyarrow.DataType) -> bool:
    """Return whether pyarrow's Python values of a type lose nothing."""
    from pyarrow import types

    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        if _first_repeated([field.name for field in fields]) is not None:
            return False
        return all(_is_converted(field.type) for field in fields)
    if _is_list(kind) or types.is_dictionary(kind):
        return _is_converted(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return _is_text(kind) or is_number or types.is_null(kind)


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_list(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _python_value(scalar: pyarrow.Scalar) -> Any:
    """Return the Python value of a scalar; raise :class:`_UnusableError` if it has none."""
    from pyarrow import types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_dictionary(kind):
        return _python_value(scalar.value)
    if _is_list(kind):
        return _python_list(scalar.values)
    if types.is_struct(kind):
        fields = ((kind.field(index).name, scalar[index]) for index in range(kind.num_fields))
        return _python_object(fields)
    if types.is_map(kind):
        return _python_object((_map_key(entry[0]), entry[1]) for entry in scalar.values)
    if _is_text(kind):
        return _decoded(scalar.as_buffer().to_pybytes())
    if types.is_duration(kind):
        return Decimal(scalar.value * _NANOSECONDS[kind.unit]) / 10**9
    if types.is_temporal(kind):
        return _time_text(scalar)
    return scalar.as_py()


def _python_list(scalars: Iterable[pyarrow.Scalar]) -> list[Any]:
    values = []
    for index, scalar in enumerate(scalars):
        try:
            values.append(_python_value(scalar))
        except _UnusableError as error:
            raise error.inside(index) from None
    return values


def _python_object(fields: Iterable[tuple[str, pyarrow.Scalar]]) -> Row:
    values: Row = {}
    for key, scalar in fields:
        if key in values:
            raise _UnusableError(f"an object with the key {key!r} twice; rename one", values)
        try:
            values[key] = _python_value(scalar)
        except _UnusableError as error:
            raise error.inside(key) from None
    return values


def _map_key(scalar: pyarrow.Scalar) -> str:
    key = _plain(_python_value(scalar), 0, keeps_bytes=False, media_keys=_NO_KEYS)
    return key if isinstance(key, str) else json.dumps(key)


def _time_text(scalar: pyarrow.Scalar) -> str:
    """Return a date, a time or both as ISO 8601 writes them.

    The nanoseconds are included, which Python's types leave out.
    """
    import pyarrow
    from pyarrow import types

    kind = scalar.type
    nanoseconds = 0
    if not types.is_date(kind) and kind.unit == "ns":
        if types.is_timestamp(kind):
            coarser_kind = pyarrow.timestamp("us", tz=kind.tz)
        else:
            coarser_kind = pyarrow.time64("us")
        microseconds, nanoseconds = divmod(scalar.value, 1000)
        scalar = pyarrow.scalar(microseconds, pyarrow.int64()).cast(coarser_kind)

    try:
        time = scalar.as_py()
    except (ValueError, OverflowError, LookupError) as error:
        # A year or a time zone that Python does not have.
        raise _UnusableError(
            f"no {kind} that can be read ({error}); correct it", scalar.value
        ) from None
    if not nanoseconds:
        return time.isoformat()
    text = time.isoformat(timespec="microseconds")
    end = text.index(".") + 7
    return f"{text[:end]}{nanoseconds:03}{text[end:]}"


# --- what a row holds -----------------------------------------------------------------------------


class _UnusableError(Exception):
    """A value that no row can hold.

    Args:
        problem: what the value is, to follow "is", and what to do.

    Attributes:
        path: keys and indices that lead to it.
    """

    def __init__(self, problem: str, value: Any) -> None:
        super().__init__(problem)
        self.problem = problem
        self.value = value
        self.path: list[str | int] = []

    def inside(self, key: str | int) -> _UnusableError:
        """Return this error of a value that is under a key or an index."""
        self.path.insert(0, key)
        return self

    def at(self, location: str) -> DataError:
        """Return the error of the row at a location."""
        path = "".join(_path_step(key) for key in self.path).removeprefix(".")
        return DataError(f"{location}: {path} = {self.value!r:.80} is {self.problem}")


def _path_step(key: str | int) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def plain_row(raw: Any, location: str) -> Row:
    """Return a row as every reader sees it, by the rules of this module.

    Args:
        raw: as json or pyarrow read it.

    Raises:
        DataError: it is not an object, or holds something that a row cannot hold.
    """
    if not isinstance(raw, dict):
        raise DataError(f"{location}: must be an object, got {type(raw).__name__}")
    row: Row = {}
    for column, value in raw.items():
        if value is None:
            continue
        is_media = column in _MEDIA_COLUMNS
        media_keys = _MEDIA_KEYS if column == "prompt" else _NO_KEYS
        try:
            row[_text(column)] = _plain(value, 1, keeps_bytes=is_media, media_keys=media_keys)
        except _UnusableError as error:
            raise error.inside(column).at(location) from None
    return row


def _plain(value: Any, depth: int, *, keeps_bytes: bool, media_keys: frozenset[str]) -> Any:
    """Return a value by the rules of this module.

    Args:
        value: as json or pyarrow read it.
        depth: number of objects and lists around it.
        keeps_bytes: whether bytes are an image or a video.
        media_keys: keys whose bytes are images or videos.

    Raises:
        _UnusableError: there is no rule for it.
    """
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return _number(value)
    if depth > MAX_DEPTH:
        raise _UnusableError(
            f"inside more than {MAX_DEPTH} objects and lists; write it as JSON text", "…"
        )
    if isinstance(value, bytes):
        return value if keeps_bytes else _decoded(value)
    if isinstance(value, list):
        return _plain_list(value, depth, keeps_bytes=keeps_bytes, media_keys=media_keys)
    if isinstance(value, dict):
        return _plain_object(value, depth, keeps_bytes=keeps_bytes, media_keys=media_keys)
    return _plain(_in_json(value), depth, keeps_bytes=keeps_bytes, media_keys=media_keys)


def _plain_list(
    value: list[Any], depth: int, *, keeps_bytes: bool, media_keys: frozenset[str]
) -> list[Any]:
    if {int}.issuperset(map(type, value)):
        return value  # token ids, of which there are many
    items = []
    for index, item in enumerate(value):
        try:
            items.append(_plain(item, depth + 1, keeps_bytes=keeps_bytes, media_keys=media_keys))
        except _UnusableError as error:
            raise error.inside(index) from None
    return items


def _plain_object(value: Row, depth: int, *, keeps_bytes: bool, media_keys: frozenset[str]) -> Row:
    items: Row = {}
    for key, item in value.items():
        if item is None:
            continue
        is_media = keeps_bytes or key in media_keys
        try:
            items[_text(key)] = _plain(item, depth + 1, keeps_bytes=is_media, media_keys=media_keys)
        except _UnusableError as error:
            raise error.inside(key) from None
    return items


def _text(value: str) -> str:
    if not value.isascii() and has_lone_surrogate(value):
        raise _UnusableError(
            "text with half of a surrogate pair, which is not a character; remove it", value
        )
    return value


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise _UnusableError("no number that JSON has; leave it out, or write null", value)
    return int(value) if value.is_integer() and abs(value) <= _LARGEST_INT else value


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        problem = (
            "no UTF-8 text; leave the column out, or put images and videos into the columns"
            " 'images' and 'videos'"
        )
        raise _UnusableError(problem, value[:20]) from None


def _in_json(value: Any) -> Any:
    """Return a value of a type that JSON lacks in one that it has."""
    match value:
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case uuid.UUID():
            return str(value)
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case tuple():
            return list(value)
    raise _UnusableError(
        f"of type {type(value).__name__}, which a row cannot hold; write it as text", value
    )


def _first_repeated(names: Sequence[str]) -> str | None:
    """Return the first name that occurs twice; None if there is none."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
