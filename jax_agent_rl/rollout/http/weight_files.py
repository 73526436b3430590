"""Weight files on the server: named by path below ``rollout.weight_dir``, or uploaded.

Permission to update weights must not open any other file, device or URL of the server's machine.
Whoever can write to the folder can replace the weights anyway. Uploads are streamed to a folder of
the server's own, checked, used once, and deleted. For a client that sends deltas the files of the
newest update are kept; a delta is applied to its file when it has arrived.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.utils.files import SHARED_MEMORY, make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.weight_deltas import DELTA_SUFFIX, apply_delta, new_path
from jax_agent_rl.utils.weight_transfer import check_files

logger = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
_PUBLISHED = re.compile(r"jax_agent_rl-weights-[A-Za-z0-9_]+")
"""Folders that a learner on this machine makes in shared memory, see ``runtime.transports``."""
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
        self._root = SHARED_MEMORY
        if folder and not self._is_bucket:
            self._root = Path(folder).absolute()

    @property
    def is_configured(self) -> bool:
        """Whether the configuration names a folder or bucket."""
        return self._folder is not None

    async def files(self, paths: Sequence[str] | None) -> list[str]:
        """Return the paths of weight files, checked.

        Raises:
            WeightUpdateError: one is outside the folder, not a regular file, or reached through a
                link.
        """
        if not paths:
            raise WeightUpdateError(f"paths={paths!r}: must be a list of weight files")
        await asyncio.to_thread(self._sizes, paths)
        return list(paths)

    async def sees(self, sizes: Mapping[str, int]) -> bool:
        """Return whether weight files of these paths and sizes can be read.

        The answer reveals nothing about other files.
        """
        try:
            return await asyncio.to_thread(self._sizes, sizes) == list(sizes.values())
        except WeightUpdateError:
            return False

    async def address(self, folder: str) -> str:
        """Return the address of a version's folder, checked.

        Raises:
            WeightUpdateError: it is not below the configured folder or bucket.
        """
        configured = str(self._folder if self._is_bucket else self._root)
        root_scheme, _, root = configured.rpartition("://")
        scheme, _, path = folder.rpartition("://")
        has_root_scheme = (scheme or "file") == (root_scheme or "file")
        is_below = PurePosixPath(path).is_relative_to(root)
        has_plain_name = _BELOW.fullmatch(path.removeprefix(root)) and ".." not in path.split("/")
        if self._folder is None or not (has_root_scheme and is_below and has_plain_name):
            raise self._elsewhere(folder)
        if not self._is_bucket:
            status = await asyncio.to_thread(self._status, path)
            if not stat.S_ISDIR(status.st_mode):
                raise WeightUpdateError(
                    f"weights at {path} cannot be read: {os.strerror(errno.ENOTDIR)}"
                )
        return folder

    def _sizes(self, paths: Iterable[str]) -> list[int]:
        """Return the sizes of weight files, checked without opening them: a pipe would block."""
        sizes = []
        for path in paths:
            if self._is_bucket or PurePosixPath(path).suffix != _SUFFIX:
                raise self._elsewhere(path)
            status = self._status(path)
            if not stat.S_ISREG(status.st_mode):
                raise WeightUpdateError(f"weight file {path} is not a regular file")
            sizes.append(status.st_size)
        return sizes

    def _status(self, path: str) -> os.stat_result:
        """Return the status of a file or folder below the root that is reached without links."""
        if not PurePosixPath(path).is_relative_to(self._root):
            raise self._elsewhere(path)
        names = PurePosixPath(path).relative_to(self._root).parts
        # Before anything is looked at, lest the error tell what else is in shared memory.
        is_published = len(names) == 2 and _PUBLISHED.fullmatch(names[0])
        if ".." in names or (self._folder is None and not is_published):
            raise self._elsewhere(path)

        location = self._root
        try:
            for name in names:
                location /= name
                if location.is_symlink():
                    raise self._elsewhere(path)
            if self._folder is None and location.parent.stat().st_uid != os.geteuid():
                raise self._elsewhere(path)
            status = location.stat()
            if not os.access(location, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise WeightUpdateError(f"weights at {path} cannot be read: {error.strerror}") from None
        return status

    def _elsewhere(self, path: str) -> WeightUpdateError:
        where = self._folder or f"{SHARED_MEMORY}/jax_agent_rl-weights-*"
        return WeightUpdateError(
            f"weights at {path[:200]!r} are not read: this server takes them from {where} alone;"
            " set rollout.weight_dir to the same folder on both sides, or have them uploaded"
        )


@dataclass(kw_only=True, slots=True)
class _Upload:
    """Files that one client sends for one update.

    Attributes:
        last_used: when something was last added, in seconds of the clock.
        size: bytes of all its files.
        num_files: files that were begun.
        num_busy: files that are arriving; it does not expire meanwhile.
    """

    folder: Path
    last_used: float
    size: int = 0
    num_files: int = 0
    num_busy: int = 0


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
        if max_bytes is None:
            max_bytes = shutil.disk_usage(self._root).free // 2
        self._max_bytes = max_bytes
        self._uploads: dict[str, _Upload] = {}
        self._base_folder: Path | None = None  # with the files of the newest update, for deltas
        self._bases: dict[str, Path] = {}  # these files by digest
        self._clock = clock

    async def receive(
        self, upload: str, name: str, digest: str, blocks: AsyncIterator[bytes]
    ) -> bool:
        """Write one file, or make it of a kept file and a delta.

        Args:
            upload: name of the upload, hexadecimal.
            name: name of the file or of its delta.
            digest: the file's fingerprint, as its sender announced it.
            blocks: the bytes of the file or of its delta.

        Returns:
            False if the delta makes another file: the sender has to send the whole one.

        Raises:
            WeightUpdateError: a name is not allowed, there are too many bytes, or the digest
                differs. Nothing is kept.
            TimeoutError: its sender fell silent. Nothing is kept.
        """
        if not (_UPLOAD_ID.fullmatch(upload) and _UPLOAD_NAME.fullmatch(name)):
            raise WeightUpdateError(
                f"upload {upload!r}, file {name!r}: these names are not allowed"
            )
        self.drop_expired()
        state = self._open(upload)
        state.num_files += 1
        state.num_busy += 1
        try:
            await self._write(state, name, blocks)
            file = state.folder / name
            if name.endswith(DELTA_SUFFIX):
                return await self._apply_delta(state, file, digest)
            await asyncio.to_thread(check_files, [str(file)], {name: digest})
            return True
        except BaseException:  # includes broken connections: half a file must not stay
            self.drop(upload)
            raise
        finally:
            state.num_busy -= 1
            state.last_used = self._clock()

    async def _apply_delta(self, state: _Upload, delta: Path, digest: str) -> bool:
        """Replace a delta and a kept file by a new file; return whether it has this digest."""
        file = new_path(delta)
        try:
            await asyncio.to_thread(apply_delta, delta, self._bases)
            await asyncio.to_thread(check_files, [str(file)], {file.name: digest})
        except (WeightUpdateError, OSError) as error:
            logger.warning("a whole weight file is needed instead of what changed: %s", error)
            delta.unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            return False
        state.size += file.stat().st_size
        return True

    def files(self, upload: str) -> list[str]:
        """Return the paths of an upload; raise WeightUpdateError if there is no such upload."""
        if upload not in self._uploads:
            raise WeightUpdateError(f"there is no upload {upload!r}; send the files again")
        return [str(file) for file in sorted(self._uploads[upload].folder.iterdir())]

    def holds(self, digests: Sequence[str]) -> bool:
        """Return whether deltas of files with these digests can be applied.

        If not, make room for complete files.
        """
        if digests and self._bases.keys() >= set(digests):
            return True
        self._delete_bases()
        return False

    def keep(self, upload: str, digests: Mapping[str, str]) -> None:
        """Keep the files of an upload for the next deltas, in place of the previous update's files.

        Args:
            upload: name of an upload that the engine has taken.
            digests: digests of its files, by name.
        """
        self._delete_bases()
        folder = self._uploads.pop(upload).folder
        self._base_folder = folder
        self._bases = {digests.get(file.name, ""): file for file in folder.iterdir()}

    def _delete_bases(self) -> None:
        """Delete the files that are kept for deltas."""
        if self._base_folder is not None:
            shutil.rmtree(self._base_folder, ignore_errors=True)
        self._base_folder = None
        self._bases = {}

    def drop(self, upload: str) -> None:
        """Delete an upload."""
        state = self._uploads.pop(upload, None)
        if state is not None:
            shutil.rmtree(state.folder, ignore_errors=True)

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
        for name, state in list(self._uploads.items()):
            if not state.num_busy and now - state.last_used > UPLOAD_TTL_SECONDS:
                self.drop(name)

    def _open(self, upload: str) -> _Upload:
        """Return the upload a file belongs to; make it if there is room."""
        state = self._uploads.get(upload)
        if state is None:
            if len(self._uploads) >= MAX_UPLOADS:
                raise WeightUpdateError(
                    f"{len(self._uploads)} uploads wait to be used, the most; use them first"
                )
            state = _Upload(folder=self._root / upload, last_used=self._clock())
            state.folder.mkdir()
            self._uploads[upload] = state
        if state.num_files >= MAX_FILES:
            raise WeightUpdateError(
                f"the upload has {MAX_FILES} files, the most; put more weights into one"
            )
        return state

    async def _write(self, state: _Upload, name: str, blocks: AsyncIterator[bytes]) -> None:
        """Stream to the file in large writes on a thread."""
        pending = bytearray()
        with (state.folder / name).open("xb") as out:
            while True:
                async with asyncio.timeout(UPLOAD_TIMEOUT_SECONDS):
                    block = await anext(blocks, b"")
                if not block:
                    break

                state.size += len(block)
                total = sum(upload.size for upload in self._uploads.values())
                if total > self._max_bytes:
                    raise WeightUpdateError(
                        f"{name}: the uploads have {total} bytes, more than the server's limit of"
                        f" {self._max_bytes}; make room where they go (docker: --shm-size), or set"
                        " rollout.weight_dir"
                    )

                pending += block
                if len(pending) >= _WRITE_BYTES:
                    await asyncio.to_thread(out.write, pending)
                    pending.clear()
            await asyncio.to_thread(out.write, pending)
