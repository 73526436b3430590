"""Weight files on the server: named by path below ``rollout.weight_dir``, or uploaded.

Permission to update weights must not open any other file, device or URL of the server's machine.
Whoever can write to the folder can replace the weights anyway. Uploads are streamed to a folder of
the server's own, checked, used once, and deleted. A client that sends deltas has the files of the
newest update kept, to which the next delta is applied.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.utils.files import SHARED_MEMORY, make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.weight_transfer import apply_delta, base_of, check_files, result_name

logger = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_PUBLISHED = re.compile(r"jax_agent_rl-weights-[A-Za-z0-9_]+")
"""Folders that a learner on this machine makes in shared memory, see ``runtime.publishers``."""
_BELOW = re.compile(r"[A-Za-z0-9_./=-]*")
"""What may follow the configured address: no character with a meaning in URLs."""

_UPLOAD_ID = re.compile(r"[0-9a-f]{16,64}")
_UPLOAD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_WRITE_BYTES = 4 << 20
UPLOAD_TTL_SECONDS = 900.0
"""Age at which an unused upload is deleted: its client died."""
UPLOAD_TIMEOUT_SECONDS = 60.0
"""Timeout for the next bytes of a file."""
MAX_UPLOADS = 4
"""Maximum uploads at a time; a learner sends one after the other."""
MAX_FILES = 4096
"""Maximum files of one upload."""


class SharedDir:
    """Weight files that a client names by path.

    Args:
        folder: ``rollout.weight_dir``, a folder or a bucket's address; None: shared memory of this
            machine, and there only what a learner of the same user wrote.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._is_bucket = folder is not None and "://" in folder
        self._root = Path(folder).absolute() if folder and not self._is_bucket else SHARED_MEMORY

    @property
    def is_configured(self) -> bool:
        """Whether the configuration names a folder or bucket."""
        return self._folder is not None

    async def files(self, paths: Any) -> list[str]:
        """Return the paths of weight files, checked.

        Raises:
            WeightUpdateError: one is outside the folder, not a regular file, or reached through a
                link.
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
        below = (
            PurePosixPath(path).is_relative_to(own)
            and _BELOW.fullmatch(inner)
            and ".." not in inner.split("/")
        )
        if self._folder is None or (scheme or "file") != (own_scheme or "file") or not below:
            raise self._elsewhere(str(folder))
        if not self._is_bucket:
            os.close(
                await asyncio.to_thread(
                    self._walk, PurePosixPath(path).relative_to(own).parts, path
                )
            )
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
                opened = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
            finally:
                os.close(folder)
            try:
                found = os.fstat(opened)
            finally:
                os.close(opened)
        except OSError as error:
            raise WeightUpdateError(
                f"weight file {path} cannot be read: {error.strerror}"
            ) from None
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
                    below = os.open(
                        name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
                    )
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
        where = self._folder or f"{SHARED_MEMORY}/jax_agent_rl-weights-*"
        return WeightUpdateError(
            f"weights at {path[:200]!r} are not read: this server takes them from {where} alone;"
            " set rollout.weight_dir to the same folder on both sides, or have them uploaded"
        )


@dataclass(kw_only=True, slots=True)
class _Upload:
    folder: Path
    touched: float
    size: int = 0
    files: int = 0
    arriving: int = 0


class Uploads:
    """The uploads of one server.

    Args:
        max_bytes: maximum bytes of all uploads together; None: half of the free space.
        folder: where to put them; None: ``/dev/shm`` if there is one, else the temporary folder.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        max_bytes: int | None = None,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = make_temp_folder("jax_agent_rl-uploads-", folder, in_memory=True)
        self._max_bytes = (
            shutil.disk_usage(self._root).free // 2 if max_bytes is None else max_bytes
        )
        self._uploads: dict[str, _Upload] = {}
        self._kept: dict[str, Path] = {}  # files of the newest update, by digest
        self._clock = clock

    async def receive(
        self, upload: str, name: str, digest: str, blocks: AsyncIterator[bytes]
    ) -> int:
        """Write one file; return its size in bytes.

        Args:
            upload: name of the upload, hexadecimal.
            name: of the file.
            digest: SHA-256 that the sender announced, hexadecimal.
            blocks: the bytes.

        Raises:
            WeightUpdateError: a name is not allowed, there are too many bytes, or the SHA-256
                differs. Nothing is kept.
            TimeoutError: its sender fell silent. Nothing is kept.
        """
        if not (_UPLOAD_ID.fullmatch(upload) and _UPLOAD_NAME.fullmatch(name)):
            raise WeightUpdateError(
                f"upload {upload!r}, file {name!r}: these names are not allowed"
            )
        self.drop_expired()
        kept = self._open(upload)
        kept.files += 1
        kept.arriving += 1
        try:
            size, found = await self._write(kept, name, blocks)
            if found != digest:
                raise WeightUpdateError(
                    f"{name}: its SHA-256 is {found}, the sender said {digest}; send it again"
                )
        except BaseException:  # includes broken connections: half a file must not stay
            self.drop(upload)
            raise
        finally:
            kept.arriving -= 1
            kept.touched = self._clock()
        return size

    def files(self, upload: str) -> list[str]:
        """Return the paths of an upload; raise WeightUpdateError if there is no such upload."""
        if upload not in self._uploads:
            raise WeightUpdateError(f"there is no upload {upload!r}; send the files again")
        return [str(file) for file in sorted(self._uploads[upload].folder.iterdir())]

    async def holds(self, digests: Sequence[str]) -> bool:
        """Return whether deltas of files with these digests can be applied; else make room for whole files."""
        if digests and self._kept.keys() == set(digests):
            return True
        self._forget()
        return False

    async def apply_deltas(self, upload: str, digests: Mapping[str, Any]) -> bool:
        """Replace an upload's deltas by the files they make from those kept, which are deleted.

        Args:
            upload: name of an upload of deltas.
            digests: of the resulting files, by name.

        Returns:
            False if they make other files than the sender has, which it must then send whole.

        Raises:
            WeightUpdateError: there is no such upload.
        """
        deltas = [Path(file) for file in self.files(upload)]
        kept, bases = self._uploads[upload], dict(self._kept)
        kept.arriving += 1
        try:
            kept.size += await asyncio.to_thread(_apply_deltas, deltas, bases)
            await asyncio.to_thread(
                check_files, self.files(upload), {str(n): str(d) for n, d in digests.items()}
            )
        except (WeightUpdateError, OSError) as error:
            logger.warning("the whole weights are needed instead of what changed: %s", error)
            self.drop(upload)
            return False
        finally:
            kept.arriving -= 1
            kept.touched = self._clock()
            self._forget()
        return True

    def keep(self, upload: str, digests: Mapping[str, str]) -> None:
        """Keep the files of an upload that was taken for the next deltas, in place of those of the one before.

        Args:
            upload: name of the upload.
            digests: of its files, by name.
        """
        self._forget()
        taken = self._uploads.pop(upload)
        self._kept = {digests.get(file.name, ""): file for file in taken.folder.iterdir()}

    def _forget(self) -> None:
        """Delete the files that are kept for deltas."""
        for folder in {file.parent for file in self._kept.values()}:
            shutil.rmtree(folder, ignore_errors=True)
        self._kept = {}

    def drop(self, upload: str) -> None:
        """Delete an upload."""
        if (kept := self._uploads.pop(upload, None)) is not None:
            shutil.rmtree(kept.folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything."""
        remove_temp_folder(self._root)

    async def sweep(self, every: float = UPLOAD_TTL_SECONDS / 10) -> None:
        """Call :meth:`drop_expired` every ``every`` seconds, until cancelled."""
        while True:
            await asyncio.sleep(every)
            self.drop_expired()

    def drop_expired(self) -> None:
        """Delete uploads of clients that died: nothing was added for ``UPLOAD_TTL_SECONDS``."""
        now = self._clock()
        for name, kept in list(self._uploads.items()):
            if not kept.arriving and now - kept.touched > UPLOAD_TTL_SECONDS:
                self.drop(name)

    def _open(self, upload: str) -> _Upload:
        """Return the upload a file belongs to; make it if there is room."""
        kept = self._uploads.get(upload)
        if kept is None:
            if len(self._uploads) >= MAX_UPLOADS:
                raise WeightUpdateError(
                    f"{len(self._uploads)} uploads wait to be used, the most; use them first"
                )
            kept = _Upload(folder=self._root / upload, touched=self._clock())
            kept.folder.mkdir()
            self._uploads[upload] = kept
        if kept.files >= MAX_FILES:
            raise WeightUpdateError(
                f"the upload has {MAX_FILES} files, the most; put more weights into one"
            )
        return kept

    async def _write(
        self, kept: _Upload, name: str, blocks: AsyncIterator[bytes]
    ) -> tuple[int, str]:
        """Stream to the file in large writes on a thread; return size and SHA-256."""
        digest, size, pending = hashlib.sha256(), 0, bytearray()
        with (kept.folder / name).open("xb") as out:

            def flush() -> None:
                digest.update(pending)
                out.write(pending)

            while True:
                async with asyncio.timeout(UPLOAD_TIMEOUT_SECONDS):
                    block = await anext(blocks, b"")
                if not block:
                    break
                size += len(block)
                kept.size += len(block)  # of all files that arrive concurrently
                if (total := sum(each.size for each in self._uploads.values())) > self._max_bytes:
                    raise WeightUpdateError(
                        f"{name}: the uploads have {total} bytes, more than the server's limit of"
                        f" {self._max_bytes}; make room where they go (docker: --shm-size), or set"
                        " rollout.weight_dir"
                    )
                pending += block
                if len(pending) >= _WRITE_BYTES:
                    await asyncio.to_thread(flush)
                    pending.clear()
            await asyncio.to_thread(flush)
        return size, digest.hexdigest()


def _apply_deltas(deltas: Sequence[Path], bases: Mapping[str, Path]) -> int:
    """Put the files that deltas make in place of the deltas, and delete the bases; return the bytes that are added."""
    added = 0
    for delta in deltas:
        digest = base_of(delta)
        if digest not in bases:
            raise WeightUpdateError(
                f"{delta.name} changes a file with the digest {digest}, which this server lacks"
            )
        out = delta.with_name(result_name(delta))
        apply_delta(bases[digest], delta, out)
        added += out.stat().st_size - delta.stat().st_size
        for used in (bases[digest], delta):
            used.unlink()
    return added
