"""Weight files on their way in: streamed to a folder of the server's own, checked, used once, deleted."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.owned_folder import OwnedFolder

_ID = re.compile(r"[0-9a-f]{16,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")
_BLOCK = 4 << 20
_FORGOTTEN_SECONDS = 900.0
_MEMORY = Path("/dev/shm")


class Uploads:
    """The uploads of one server.

    Args:
        max_bytes: most bytes of one upload, all its files together.
        folder: where to put them; None: memory of this machine where it has ``/dev/shm``, else the temporary folder.
    """

    def __init__(self, *, max_bytes: int, folder: Path | None = None) -> None:
        parent = folder or (_MEMORY if _MEMORY.is_dir() else None)
        self._folder = OwnedFolder("jax_agent_rl-uploads-", parent)
        self._root = self._folder.path
        self._max_bytes = max_bytes
        self._touched: dict[str, float] = {}

    async def receive(self, upload: str, name: str, digest: str, blocks: AsyncIterator[bytes]) -> int:
        """Writes one file; returns its size in bytes.

        Raises:
            WeightUpdateError: a name is not allowed, it is too large, or its SHA-256 is another. Nothing is kept.
        """
        if not (_ID.fullmatch(upload) and _NAME.fullmatch(name)):
            raise WeightUpdateError(f"upload {upload!r}, file {name!r}: these names are not allowed")
        self._drop_forgotten()
        folder = self._root / upload
        folder.mkdir(exist_ok=True)
        self._touched[upload] = time.monotonic()
        room = self._max_bytes - sum(file.stat().st_size for file in folder.iterdir())
        try:
            size, found = await _write(folder / name, blocks, room)
            if found != digest:
                raise WeightUpdateError(f"{name}: its SHA-256 is {found}, the sender said {digest}; send it again")
        except BaseException:  # a broken connection, too: half a file must not stay
            self.drop(upload)
            raise
        self._touched[upload] = time.monotonic()
        return size

    def files(self, upload: str) -> list[str]:
        """Paths of an upload.

        Raises:
            WeightUpdateError: there is no such upload.
        """
        if upload not in self._touched:
            raise WeightUpdateError(f"there is no upload {upload!r}; send the files again")
        return [str(file) for file in sorted((self._root / upload).iterdir())]

    def drop(self, upload: str) -> None:
        """Deletes an upload."""
        if self._touched.pop(upload, None) is not None:
            shutil.rmtree(self._root / upload, ignore_errors=True)

    def close(self) -> None:
        """Deletes everything."""
        self._folder.close()

    def _drop_forgotten(self) -> None:
        """A client that died after its upload would fill the disk otherwise."""
        now = time.monotonic()
        for upload in [u for u, when in self._touched.items() if now - when > _FORGOTTEN_SECONDS]:
            self.drop(upload)


async def _write(file: Path, blocks: AsyncIterator[bytes], room: int) -> tuple[int, str]:
    """Streams to the file in large writes on a thread; returns size and SHA-256."""
    digest, size, pending = hashlib.sha256(), 0, bytearray()
    with file.open("xb") as out:

        def flush() -> None:
            digest.update(pending)
            out.write(pending)

        async for block in blocks:
            size += len(block)
            if size > room:
                raise WeightUpdateError(
                    f"{file.name}: the upload is larger than the server's limit ({room} bytes left)"
                )
            pending += block
            if len(pending) >= _BLOCK:
                await asyncio.to_thread(flush)
                pending.clear()
        await asyncio.to_thread(flush)
    return size, digest.hexdigest()
