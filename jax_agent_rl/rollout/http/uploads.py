"""Uploaded weight files: streamed to a folder of the server's own, checked, used once, deleted."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.utils import tempdirs

_ID = re.compile(r"[0-9a-f]{16,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_BLOCK = 4 << 20
_MEMORY = Path("/dev/shm")
UPLOAD_TTL_SECONDS = 900.0
"""Age at which an unused upload is deleted: its client died."""
UPLOAD_TIMEOUT_SECONDS = 60.0
"""Timeout for the next bytes of a file."""
MAX_UPLOADS = 4
"""Maximum uploads at a time; a learner sends one after the other."""
MAX_FILES = 4096
"""Maximum files of one upload."""


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
        self, *, max_bytes: int | None = None, folder: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        parent = folder or (_MEMORY if _MEMORY.is_dir() else None)
        self._root = tempdirs.make_folder("jax_agent_rl-uploads-", parent)
        self._max_bytes = shutil.disk_usage(self._root).free // 2 if max_bytes is None else max_bytes
        self._uploads: dict[str, _Upload] = {}
        self._clock = clock

    async def receive(self, upload: str, name: str, digest: str, blocks: AsyncIterator[bytes]) -> int:
        """Write one file; return its size in bytes.

        Args:
            upload: name of the upload, hexadecimal.
            name: of the file.
            digest: SHA-256 that the sender announced, hexadecimal.
            blocks: the bytes.

        Raises:
            WeightUpdateError: a name is not allowed, there are too many bytes, or the SHA-256 differs. Nothing is kept.
            TimeoutError: its sender fell silent. Nothing is kept.
        """
        if not (_ID.fullmatch(upload) and _NAME.fullmatch(name)):
            raise WeightUpdateError(f"upload {upload!r}, file {name!r}: these names are not allowed")
        self.drop_expired()
        kept = self._open(upload)
        kept.files += 1
        kept.arriving += 1
        try:
            size, found = await self._write(kept, name, blocks)
            if found != digest:
                raise WeightUpdateError(f"{name}: its SHA-256 is {found}, the sender said {digest}; send it again")
        except BaseException:  # includes broken connections: half a file must not stay
            self.drop(upload)
            raise
        finally:
            kept.arriving -= 1
            kept.touched = self._clock()
        return size

    def files(self, upload: str) -> list[str]:
        """Return the paths of an upload.

        Raises:
            WeightUpdateError: there is no such upload.
        """
        if upload not in self._uploads:
            raise WeightUpdateError(f"there is no upload {upload!r}; send the files again")
        return [str(file) for file in sorted(self._uploads[upload].folder.iterdir())]

    def drop(self, upload: str) -> None:
        """Delete an upload."""
        if (kept := self._uploads.pop(upload, None)) is not None:
            shutil.rmtree(kept.folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything."""
        tempdirs.remove_folder(self._root)

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
                raise WeightUpdateError(f"{len(self._uploads)} uploads wait to be used, the most; use them first")
            kept = _Upload(folder=self._root / upload, touched=self._clock())
            kept.folder.mkdir()
            self._uploads[upload] = kept
        if kept.files >= MAX_FILES:
            raise WeightUpdateError(f"the upload has {MAX_FILES} files, the most; put more weights into one")
        return kept

    async def _write(self, kept: _Upload, name: str, blocks: AsyncIterator[bytes]) -> tuple[int, str]:
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
                        f"{name}: the uploads have {total} bytes, more than the server's limit of {self._max_bytes}; "
                        "make room where they go (docker: --shm-size), or set rollout.weight_dir"
                    )
                pending += block
                if len(pending) >= _BLOCK:
                    await asyncio.to_thread(flush)
                    pending.clear()
            await asyncio.to_thread(flush)
        return size, digest.hexdigest()
