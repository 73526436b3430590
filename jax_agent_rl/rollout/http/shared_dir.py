"""Weight files that a client names by path: only regular files below ``rollout.weight_dir`` are read.

Permission to update weights must not open any other file, device or URL of the server's machine. Whoever can write to
the folder can replace the weights anyway.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jax_agent_rl.errors import WeightUpdateError

_MEMORY = Path("/dev/shm")
_PUBLISHED = re.compile(r"jax_agent_rl-weights-[A-Za-z0-9_]+")
"""Folders that a learner on this machine makes in shared memory, see ``learner.export``."""
_BELOW = re.compile(r"[A-Za-z0-9_./=-]*")
"""What may follow the configured address: no character with a meaning in URLs."""
_SUFFIX = ".safetensors"


class SharedFolder:
    """See the module docstring.

    Args:
        folder: ``rollout.weight_dir``, a folder or a bucket's address; None: shared memory of this machine, and there
            only what a learner of the same user wrote.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._is_bucket = folder is not None and "://" in folder
        self._root = Path(folder).absolute() if folder and not self._is_bucket else _MEMORY

    @property
    def is_configured(self) -> bool:
        """Whether the configuration names a folder or bucket."""
        return self._folder is not None

    async def files(self, paths: Any) -> list[str]:
        """Return the paths of weight files, checked.

        Raises:
            WeightUpdateError: one is outside the folder, not a regular file, or reached through a link.
        """
        if not isinstance(paths, list) or not paths:
            raise WeightUpdateError(f"paths={paths!r}: must be a list of weight files")
        return await asyncio.to_thread(lambda: [str(self._checked(str(path))[0]) for path in paths])

    async def sees(self, sizes: Mapping[str, Any]) -> bool:
        """Return whether weight files of these paths and sizes can be read; reveals nothing about other files."""

        def look() -> bool:
            try:
                return all(self._checked(path)[1] == size for path, size in sizes.items())
            except WeightUpdateError:
                return False

        return await asyncio.to_thread(look)

    async def address(self, folder: Any) -> str:
        """Return the address of a version's folder, checked.

        Raises:
            WeightUpdateError: it is not below the configured folder or bucket.
        """
        scheme, _, path = str(folder).rpartition("://")
        own_scheme, _, own = str(self._folder if self._is_bucket else self._root).rpartition("://")
        inner = path.removeprefix(own)
        below = PurePosixPath(path).is_relative_to(own) and _BELOW.fullmatch(inner) and ".." not in inner.split("/")
        if self._folder is None or (scheme or "file") != (own_scheme or "file") or not below:
            raise self._elsewhere(str(folder))
        if not self._is_bucket:
            os.close(await asyncio.to_thread(self._walk, PurePosixPath(path).relative_to(own).parts, path))
        return str(folder)

    def _checked(self, path: str) -> tuple[Path, int]:
        """Return a file's path and size. It is opened without following links or blocking."""
        inner = PurePosixPath(path)
        if self._is_bucket or not inner.is_relative_to(self._root) or inner.suffix != _SUFFIX:
            raise self._elsewhere(path)
        *folders, name = inner.relative_to(self._root).parts
        if self._folder is None and (len(folders) != 1 or not _PUBLISHED.fullmatch(folders[0])):
            raise self._elsewhere(path)
        try:
            folder = self._walk(folders, path)
            try:
                opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                found = os.fstat(opened)
            finally:
                os.close(opened)
        except OSError as error:
            raise WeightUpdateError(f"weight file {path} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise WeightUpdateError(f"weight file {path} is not a regular file")
        return Path(inner), found.st_size

    def _walk(self, folders: Sequence[str], path: str) -> int:
        """Return a descriptor of a folder below the root, no component of which is a link."""
        if ".." in folders:
            raise self._elsewhere(path)
        try:
            at = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in folders:
                try:
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                finally:
                    os.close(at)
                at = below
            if self._folder is None and os.fstat(at).st_uid != os.geteuid():
                os.close(at)
                raise self._elsewhere(path)
        except OSError as error:
            raise WeightUpdateError(f"weights at {path} cannot be read: {error.strerror}") from None
        return at

    def _elsewhere(self, path: str) -> WeightUpdateError:
        where = self._folder or f"{_MEMORY}/jax_agent_rl-weights-*"
        return WeightUpdateError(
            f"weights at {path[:200]!r} are not read: this server takes them from {where} alone; set "
            "rollout.weight_dir to the same folder on both sides, or have them uploaded"
        )
