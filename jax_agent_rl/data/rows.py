"""Dataset rows: their checks, JSON Lines files, and Parquet files, of which a few row groups are in memory at a time.

A row, in verl's schema::

    {"data_source": "calculator", "agent_name": "tool_agent",
     "prompt": [{"role": "user", "content": "What is 12 times 34?"}],
     "reward_model": {"ground_truth": "408"}, "extra_info": {}}
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_agent_rl.data.media import media_kinds, prompt_with_media
from jax_agent_rl.errors import DataError
from jax_agent_rl.utils.files import write_atomically
from jax_agent_rl.utils.text import did_you_mean

if TYPE_CHECKING:
    import pyarrow


Row = dict[str, Any]
_TOOLS_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_CHUNK = 1024
"""Rows of a file in memory that are shuffled together with row groups of Parquet files."""


@dataclass(frozen=True, kw_only=True)
class RowChecks:
    """The names that rows may use; None: any.

    Attributes:
        agents: values of ``agent_name``.
        tools: names in ``extra_info.tool_selection`` and ``extra_info.tools_kwargs``.
        adapters: values of ``adapter``.
    """

    agents: Collection[str] | None = None
    tools: Collection[str] | None = None
    adapters: Collection[str] | None = None

    def read(self, row: Any, file: Path, where: str) -> Row:
        """Return a row with its images and videos as parts of the prompt (:mod:`jax_agent_rl.data.media`).

        Args:
            row: as it is stored.
            file: where it is stored, from whose folder it names other files.
            where: its place in the file, for messages.

        Raises:
            DataError: a field is missing or invalid; names the row and the fix.
        """
        try:
            checked = _checked(row, self.agents, self.tools, self.adapters)
            prompt = prompt_with_media(checked, file.parent)
            return {key: checked[key] for key in checked if key not in ("images", "videos")} | {"prompt": prompt}
        except DataError as error:
            raise DataError(f"{file}, {where}: {error}") from None


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


def _checked(
    row: Any,
    agents: Collection[str] | None,
    tools: Collection[str] | None,
    adapters: Collection[str] | None,
) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"must be an object, got {type(row).__name__}")
    prompt = row.get("prompt")
    extra_info = row.get("extra_info")
    has_environment = isinstance(extra_info, Mapping) and extra_info.get("environment_kwargs")  # it provides a prompt
    if not isinstance(prompt, list) or not (prompt or has_environment):
        raise DataError(f"'prompt' must be a non-empty list of messages, got {prompt!r:.80}")
    for message in prompt:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"every message of 'prompt' needs a 'role', got {message!r:.80}")
        if not isinstance(message.get("content"), str | list):
            raise DataError(f"every message of 'prompt' needs a 'content' of text or of parts, got {message!r:.80}")
    if not isinstance(row.get("data_source"), str):
        raise DataError(f"'data_source' must name the task (it selects the reward), got {row.get('data_source')!r}")
    for field, known in (("agent_name", agents), ("adapter", adapters)):
        name = row.get(field)
        if name is not None and not isinstance(name, str):
            raise DataError(f"{field!r} must be a name or absent, got {name!r:.80}")
        if name:
            _check_known(field, name, known)
    for section in ("reward_model", "extra_info"):
        _check_object(row, section)
    _check_tools(extra_info or {}, tools)
    _check_object(extra_info or {}, "interaction_kwargs")
    return dict(row)


def _check_tools(extra_info: Mapping[str, Any], tools: Collection[str] | None) -> None:
    _check_object(extra_info, "tools_kwargs")
    for name, kinds in (extra_info.get("tools_kwargs") or {}).items():
        _check_object(extra_info["tools_kwargs"], name)
        if kinds and tools:  # a run without tools may read the same rows
            _check_known("extra_info.tools_kwargs", name, tools)
        for kind in kinds or {}:
            _check_known(f"extra_info.tools_kwargs.{name}", kind, _TOOLS_KWARGS)
            _check_object(kinds, kind)
    selection = extra_info.get("tool_selection")
    if selection is None:
        return
    if not isinstance(selection, list) or not all(isinstance(name, str) for name in selection):
        raise DataError(f"'extra_info.tool_selection' must be a list of tool names, got {selection!r:.80}")
    for name in selection:
        _check_known("extra_info.tool_selection", name, tools)


def _check_object(holder: Mapping[str, Any], name: str) -> None:
    value = holder.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{name!r} must be an object or absent, got {value!r:.80}")


def _check_known(field: str, name: str, known: Collection[str] | None) -> None:
    if known is None or name in known:
        return
    raise DataError(f"{field} {name!r} is not known; {did_you_mean(name, known)}there are {sorted(known)}")


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, all or none."""
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


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
