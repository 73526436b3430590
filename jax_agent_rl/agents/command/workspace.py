"""What a program starts with and what it leaves: folders, files and links, each of them checked.

A program decides what its working folder holds, and a process in its sandbox could try to print in
the runner's name. So nothing of what comes back is handed on as it came: each entry is made anew
from a checked name, type, mode and size, and all of them together are bounded. There are no headers
that could say something else.

::

    working folder ──► runner: entries, contents ──► read_result ──► Entry …
    Entry … ──► pack_tree ──► runner of the tests, or a snapshot ──► read_tree ──► Entry …

The format is described in :mod:`jax_agent_rl.agents.command.runner`. Reading and packing take time
and memory in proportion to the limits; call them in a thread.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jax_agent_rl.agents.command.runner import (
    ENTRY_BYTES,
    FILE_BYTES,
    OUTPUT_CHARACTERS,
    SHOWN_NAMES,
    is_inner_link,
    is_plain_name,
)
from jax_agent_rl.utils.bounded_json import decode_json

MAX_HEADER_BYTES = 4 << 20
"""Size of the first line of a result: two outputs, and names of the working folder's entries."""
_FILE_MODE = 0o755
_FOLDER_MODE = 0o755


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceLimits:
    """Bounds of a working folder that is read back.

    Attributes:
        max_bytes: of contents and names together; an entry counts half a kibibyte besides.
        max_entries: number of files, folders and links.
    """

    max_bytes: int
    max_entries: int

    @property
    def result_bytes(self) -> int:
        """Size of the result that holds such a folder."""
        return MAX_HEADER_BYTES + self.max_bytes * 4 // 3 + 8

    def check(self, entries: Sequence[Entry]) -> None:
        """Check that a folder is within the limits.

        Raises:
            ValueError: it is not.
        """
        if len(entries) > self.max_entries:
            raise ValueError(f"it has {len(entries)} entries, more than {self.max_entries}")
        num_bytes = sum(entry.num_bytes for entry in entries)
        if num_bytes > self.max_bytes:
            raise ValueError(f"it has {num_bytes} bytes, more than {self.max_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A folder, a regular file, or a symbolic link.

    ``Entry(kind="file", name="src/main.py", data=b"print(1)")`` is a file of 8 bytes.

    Attributes:
        name: relative path, without ``..``.
        mode: permissions; none that change a user or a group.
        target: the path in a link.
    """

    kind: Literal["folder", "file", "link"]
    name: str
    mode: int = _FILE_MODE
    data: bytes = field(default=b"", repr=False)
    target: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("folder", "file", "link"):
            raise ValueError(f"{self.name!a} is a {self.kind!a}, not a folder, file or link")
        if not is_plain_name(self.name):
            raise ValueError(f"{self.name[:200]!a} is not a plain relative path")
        if self.mode & ~0o777:
            raise ValueError(f"{self.name!a} has mode {self.mode:o}, more than permissions")
        has_wrong_data = bool(self.data) and self.kind != "file"
        has_wrong_target = bool(self.target) != (self.kind == "link")
        if has_wrong_data or has_wrong_target:
            raise ValueError(f"{self.name!a} is a {self.kind} with what belongs to another kind")

    @property
    def num_bytes(self) -> int:
        """What it counts in the size of a working folder."""
        return ENTRY_BYTES + len(os.fsencode(self.name)) + len(self.data) + len(self.target)


def file_entries(files: Mapping[str, bytes], *, folders: Sequence[str] = ()) -> list[Entry]:
    """Return the entries of files, of the folders that they are in, and of further ``folders``.

    Raises:
        ValueError: a path is not a plain relative one, or one of them is a file and a folder.
    """
    entries: dict[str, Entry] = {}

    def add_folder(name: str) -> None:
        if name not in entries:
            entries[name] = Entry(kind="folder", name=name, mode=_FOLDER_MODE)
        elif entries[name].kind != "folder":
            raise ValueError(f"{name!a} is a file, and a folder of others")

    for folder in folders:
        for parent in _parents(folder):
            add_folder(parent)
        add_folder(folder)

    for path, data in files.items():
        name = str(PurePosixPath(path))
        for parent in _parents(name):
            add_folder(parent)
        if name in entries:
            raise ValueError(f"{name!a} is there twice")
        entries[name] = Entry(kind="file", name=name, data=data)
    return list(entries.values())


def _parents(name: str) -> list[str]:
    """Return the folders that a relative path is in, the outermost first."""
    parents = PurePosixPath(name).parents[:-1]
    return [str(parent) for parent in reversed(parents)]


def pack_tree(entries: Sequence[Entry]) -> bytes:
    """Return a tree that the runner writes; folders come before what is in them."""
    listed: list[list[Any]] = []
    contents: list[bytes] = []
    for entry in entries:
        if entry.kind == "link":
            listed.append(["link", entry.name, entry.target])
        elif entry.kind == "folder":
            listed.append(["folder", entry.name, entry.mode])
        else:
            listed.append(["file", entry.name, entry.mode, len(entry.data)])
            contents.append(entry.data)
    return b"".join([json.dumps(listed).encode(), b"\n", *contents])


def read_tree(packed: bytes, limits: WorkspaceLimits, path_inside: str) -> tuple[Entry, ...]:
    """Return the entries of a working folder that :func:`pack_tree` packed, perhaps into a file.

    Args:
        path_inside: absolute path by which programs know the folder.

    Raises:
        ValueError: it is no such tree, or holds more than a working folder may.
    """
    line, _, contents = packed.partition(b"\n")
    if len(line) > MAX_HEADER_BYTES:
        raise ValueError(f"its list of entries has {len(line)} bytes")
    listed = decode_json(line, lone_surrogates=True)  # in names that are not UTF-8
    if not isinstance(listed, list):
        raise ValueError("its first line is not a list of entries")
    return _entries(listed, contents, limits, path_inside)


# --- what comes back ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """Result of the runner.

    Attributes:
        exit_code: exit status of the command; None: it did not end in time, or the runner did not.
        stopped: what ended the runner before it printed a result.
        stdout, stderr: the last characters of each.
        file: text of the file that was asked for; None: there is none.
        file_problem: why that file cannot be read.
        workspace: the working folder; None: it was not asked for, or there is a problem.
        pack_problem: why there is no working folder.
        left_out: number of entries that ``workspace`` does not hold: devices, links that lead
            elsewhere.
        left_out_names: names of some of these entries.
    """

    exit_code: int | None = None
    stopped: str | None = None
    stdout: str = ""
    stderr: str = ""
    file: str | None = None
    file_problem: str | None = None
    workspace: tuple[Entry, ...] | None = field(default=None, repr=False)
    pack_problem: str | None = None
    left_out: int = 0
    left_out_names: tuple[str, ...] = ()


class ResultHeader(BaseModel):
    """What the runner says of a result, besides the contents of files."""

    model_config = ConfigDict(strict=True, extra="forbid")

    exit_code: Annotated[int, Field(ge=-255, le=255)] | None = None
    stdout: Annotated[str, Field(max_length=OUTPUT_CHARACTERS)] = ""
    stderr: Annotated[str, Field(max_length=OUTPUT_CHARACTERS)] = ""
    file: Annotated[str, Field(max_length=FILE_BYTES)] | None = None
    file_problem: Annotated[str, Field(max_length=2000)] | None = None
    pack_problem: Annotated[str, Field(max_length=5000)] | None = None
    left_out: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    left_out_names: Annotated[
        list[Annotated[str, Field(max_length=200)]], Field(max_length=SHOWN_NAMES)
    ] = []
    entries: list[list[Any]] | None = None


def read_result(
    printed: str,
    token: str,
    *,
    stopped: str,
    stderr: str,
    limits: WorkspaceLimits,
    path_inside: str,
) -> JobResult:
    """Return the result that the runner printed, or one that says what ``stopped`` it.

    Args:
        printed: standard output, in which others may have printed as well.
        token: begins the runner's line.
        stopped: how a runner ended that printed no result.
        path_inside: absolute path by which the program knew its working folder.
    """
    _, separator, result = printed.rpartition(token)
    if not separator:
        return JobResult(stopped=stopped, stderr=stderr[-OUTPUT_CHARACTERS:])

    line, _, contents = result.partition("\n")
    if len(line) > MAX_HEADER_BYTES:
        return JobResult(
            stopped=f"the runner's result has {len(line)} characters, more than {MAX_HEADER_BYTES}"
        )
    try:
        header = ResultHeader.model_validate(json.loads(line))
    except (ValueError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
        return JobResult(stopped=f"the runner's result cannot be read: {str(error)[:500]}")

    try:
        decoded = base64.b64decode(contents.strip(), validate=True)
    except ValueError as error:
        problem = f"the working folder is refused: {error}"
        header = header.model_copy(update={"entries": None, "pack_problem": problem})
        decoded = b""
    return make_result(header, decoded, limits=limits, path_inside=path_inside)


def make_result(
    header: ResultHeader, contents: bytes, *, limits: WorkspaceLimits, path_inside: str
) -> JobResult:
    """Return a result of the runner; its entries are made anew.

    Args:
        contents: of the files among the entries, one after another.
        path_inside: absolute path of the folder that the entries are in, as the program knew it.
    """
    workspace = None
    pack_problem = header.pack_problem
    if header.entries is not None:
        try:
            workspace = _entries(header.entries, contents, limits, path_inside)
        except ValueError as error:
            pack_problem = f"the working folder is refused: {error}"
    return JobResult(
        exit_code=header.exit_code,
        stdout=header.stdout,
        stderr=header.stderr,
        file=header.file,
        file_problem=header.file_problem,
        workspace=workspace,
        pack_problem=pack_problem,
        left_out=header.left_out,
        left_out_names=tuple(header.left_out_names),
    )


def _entries(
    listed: Sequence[Any], contents: bytes, limits: WorkspaceLimits, path_inside: str
) -> tuple[Entry, ...]:
    """Make the entries of a working folder anew.

    Raises:
        ValueError: they are more than the limits, or one of them is not what a working folder may
            hold.
    """
    if len(listed) > limits.max_entries:
        raise ValueError(f"it has {len(listed)} entries, more than {limits.max_entries}")
    entries: list[Entry] = []
    folders = {""}
    names: set[bytes] = set()
    bytes_left = limits.max_bytes
    offset = 0
    for line in listed:
        match line:
            case ["folder", str(name), int(mode)]:
                entry = Entry(kind="folder", name=name, mode=mode)
            case ["file", str(name), int(mode), int(size)]:
                if not 0 <= size <= len(contents) - offset:
                    raise ValueError(
                        f"{name[:200]!a} has {size} bytes, and {len(contents) - offset} follow"
                    )
                entry = Entry(
                    kind="file", name=name, mode=mode, data=contents[offset : offset + size]
                )
                offset += size
            case ["link", str(name), str(target)]:
                if not is_inner_link(name, target, path_inside):
                    raise ValueError(f"the link {name[:200]!a} leads out of it")
                entry = Entry(kind="link", name=name, target=target)
            case _:
                raise ValueError(f"{str(line)[:200]!a} is not an entry")

        parent, _, _ = entry.name.rpartition("/")
        if parent not in folders:
            raise ValueError(f"{entry.name!a} is in no folder that comes before it")
        if entry.kind == "folder":
            folders.add(entry.name)

        encoded_name = os.fsencode(entry.name)
        if encoded_name in names:
            raise ValueError(f"{entry.name!a} is there twice")
        names.add(encoded_name)

        bytes_left -= entry.num_bytes
        if bytes_left < 0:
            raise ValueError(f"it has more than {limits.max_bytes} bytes")
        entries.append(entry)
    if offset != len(contents):
        raise ValueError(f"{len(contents) - offset} bytes belong to no file")
    return tuple(entries)
