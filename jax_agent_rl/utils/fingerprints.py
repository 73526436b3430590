"""Fingerprints: they say by content what a cached, exported, served or resumed thing is made of.

::

    fingerprint(value)           JSON-like values, dataclasses, arrays
    digest(data)                 bytes in memory
    file_fingerprint(file)       its bytes
    read_fingerprint(file)       its bytes, read again each time: finds damage
    folder_fingerprint(folder)   the names and bytes of all files below it
    media_fingerprint(file)      size, beginning and end of an image or a video
    code_fingerprint(name)       a Python file, or a module by its name
    RowFingerprint               the rows of a data set, as they are read from whatever files
    models.identity              a model: its weights by tensor, its configuration, its tokenizer

Names of files, numbers of steps and versions, and times say nothing about content: a run that is
rewound writes step 7 again, and a folder may be replaced by another one. Whatever is looked up
later is therefore looked up by a fingerprint.

They are XXH3-128 digests, which cost about as much as reading memory, and find damage, mistakes and
other content. They do not protect against somebody who forges both.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from pydantic import BaseModel

from jax_agent_rl.utils.files import Stamp, file_stamp

if TYPE_CHECKING:
    import numpy as np

PREFIX = "xxh3_128:"
"""Names the algorithm, so that another one could be told apart."""


def digest(data: bytes | memoryview) -> str:
    """Return the fingerprint of bytes."""
    return PREFIX + xxhash.xxh3_128(data).hexdigest()


def fingerprint(value: Any) -> str:
    """Return the fingerprint of a value.

    Equal values have equal fingerprints, in every process and on every machine.

    Args:
        value: None, booleans, numbers, text, bytes, paths, enumerations, arrays, dataclasses,
            pydantic's models, and lists, tuples, sets and mappings of these. A tuple equals a list;
            the order of a mapping's keys does not matter.

    Raises:
        TypeError: the value is of another type.
    """
    hasher = xxhash.xxh3_128()
    _feed(hasher, value)
    return PREFIX + hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    """Add a value to a hash.

    Each part begins with its kind and its length, so that no two values give the same bytes.
    """
    if value is None or isinstance(value, bool):
        hasher.update(repr(value).encode())
    elif isinstance(value, Enum):
        _feed(hasher, value.value)
    elif isinstance(value, int):
        _feed_bytes(hasher, "int", str(value).encode())
    elif isinstance(value, float):
        _feed_bytes(hasher, "float", struct.pack("<d", value))
    elif isinstance(value, str):
        _feed_bytes(hasher, "text", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, Path):
        _feed_bytes(hasher, "text", str(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        _feed_bytes(hasher, "bytes", bytes(value))
    elif isinstance(value, Mapping):
        hasher.update(f"map {len(value)}:".encode())
        for key in sorted(value, key=str):
            _feed(hasher, key)
            _feed(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}:".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, set | frozenset):
        _feed(hasher, sorted(map(fingerprint, value)))
    elif is_dataclass(value) and not isinstance(value, type):
        hasher.update(f"{type(value).__name__}:".encode())
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        _feed(hasher, values)
    elif isinstance(value, BaseModel):
        hasher.update(f"{type(value).__name__}:".encode())
        _feed(hasher, value.model_dump())
    elif hasattr(value, "__array__"):
        _feed_array(hasher, value)
    else:
        raise TypeError(f"a {type(value).__name__} has no fingerprint")


def _feed_bytes(hasher: Any, kind: str, data: bytes) -> None:
    hasher.update(f"{kind} {len(data)}:".encode())
    hasher.update(data)


def _feed_array(hasher: Any, value: Any) -> None:
    import numpy as np

    array: np.ndarray = np.ascontiguousarray(value)
    hasher.update(f"array {array.dtype} {array.shape}:".encode())
    hasher.update(array.reshape(-1).view(np.uint8).data)


def file_fingerprint(file: str | Path) -> str:
    """Return the fingerprint of a file's bytes.

    Raises:
        OSError: it cannot be read.
    """
    path = Path(file)
    return _file_fingerprint(path, file_stamp(path))


@functools.lru_cache(4096)
def _file_fingerprint(file: Path, stamp: Stamp) -> str:
    """Read a file once in a process; ``stamp`` changes whenever its content does."""
    return read_fingerprint(file)


def read_fingerprint(file: str | Path) -> str:
    """Return the fingerprint of a file's bytes, which are read each time.

    Raises:
        OSError: it cannot be read.
    """
    with open(file, "rb") as stream:
        return PREFIX + hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


_MEDIA_END = 64 * 1024  # bytes


def media_fingerprint(file: Path) -> str:
    """Return the fingerprint of an image or a video: its size, its first and its last 64 KiB.

    Two encoded pictures that are equal in all three are the same, and a set of videos is not read
    as a whole each time that a run starts.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        head = stream.read(_MEDIA_END)
        stream.seek(max(0, size - _MEDIA_END))
        tail = stream.read(_MEDIA_END)
    return fingerprint([size, head, tail])


def folder_fingerprint(folder: str | Path) -> str:
    """Return the fingerprint of all files below a folder, by their names within it.

    Raises:
        OSError: a file cannot be read.
    """
    root = Path(folder)
    return _tree_fingerprint(root, _files_below(root))


def _code_folder_fingerprint(root: Path) -> str:
    """Return the fingerprint of a folder of code, without what Python writes when it runs it."""
    code_files = []
    for file in _files_below(root):
        if "__pycache__" not in file.relative_to(root).parts:
            code_files.append(file)
    return _tree_fingerprint(root, code_files)


def _files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def _tree_fingerprint(root: Path, files: Iterable[Path]) -> str:
    fingerprints = {}
    for file in files:
        name = file.relative_to(root).as_posix()
        fingerprints[name] = file_fingerprint(file)
    return fingerprint(fingerprints)


def code_fingerprint(name: str) -> str:
    """Return the fingerprint of code, without what it imports.

    Modules are looked for where ``utils.plugins`` will find them, also in the working directory. A
    module that is nowhere is known by its name.

    Args:
        name: a Python file, a folder, or the import path of a module or package.

    Raises:
        OSError: a file cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return file_fingerprint(path)
    if path.is_dir():
        return _code_folder_fingerprint(path)

    spec = None
    if "/" not in name and ":" not in name:
        spec = _find_module(name)
    if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        if spec.submodule_search_locations:  # a package
            return _code_folder_fingerprint(Path(spec.origin).parent)
        return file_fingerprint(spec.origin)
    return fingerprint(name)


def _find_module(name: str) -> ModuleSpec | None:
    """Return where a module is, without importing its parents where that is possible.

    Returns:
        None if it is nowhere.
    """
    spec = None
    search_path = [*sys.path, os.getcwd()]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), search_path)
        if spec is None:
            break
        search_path = list(spec.submodule_search_locations or ())
    if spec is not None:
        return spec

    try:
        return importlib.util.find_spec(name)  # installed in place, by a finder of its own
    except (ImportError, ValueError):
        return None


class RowFingerprint:
    """Accumulates the fingerprint of rows, in order, as ``data.reader`` reads them.

    It is of the rows, not of the files that they are read from.
    """

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._count = 0
        self._tasks: dict[Path, str] = {}

    def add(
        self, row: Mapping[str, Any], files: Iterable[Path] = (), task: Path | None = None
    ) -> None:
        """Add the next row, which holds what JSON can hold, and bytes of images.

        The order of its columns does not matter. The order of the keys inside them does, since a
        template may write them out.

        Args:
            row: its columns by name.
            files: images and videos that it names, each read as by :func:`media_fingerprint`.
            task: folder of the task that it names.

        Raises:
            OSError: a file cannot be read.
        """
        ordered = {name: row[name] for name in sorted(row)}
        text = json.dumps(ordered, ensure_ascii=False, separators=(",", ":"), default=_as_json)
        _feed_bytes(self._hasher, "row", text.encode("utf-8", "surrogatepass"))
        for file in files:
            _feed_bytes(self._hasher, "file", media_fingerprint(file).encode())
        if task is not None:
            _feed_bytes(self._hasher, "task", self._task_fingerprint(task).encode())
        self._count += 1

    def _task_fingerprint(self, folder: Path) -> str:
        """Return a folder's fingerprint; many rows may name the same."""
        if folder not in self._tasks:
            self._tasks[folder] = folder_fingerprint(folder)
        return self._tasks[folder]

    def value(self) -> str:
        """Return the fingerprint of the rows so far."""
        return f"{PREFIX}{self._hasher.hexdigest()}/{self._count}"


def _as_json(value: Any) -> Any:
    return {"fingerprint": fingerprint(value)}
