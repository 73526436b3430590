"""A temporary folder that does not stay for ever when its owner is killed: the next owner of one like it removes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = ".owned"


class OwnedFolder:
    """Made now, mode 0700, removed by :meth:`close`.

    The owner holds a lock on a file in it, which the kernel lets go of however the owner ends. Making a folder removes
    those of the same prefix whose lock is free. Where a file system has no locks, none is removed.

    Args:
        prefix: of its name; the same in every process that makes folders of this kind.
        parent: where; None: the temporary folder.
    """

    def __init__(self, prefix: str, parent: str | Path | None = None) -> None:
        parent = Path(parent or tempfile.gettempdir())
        _remove_abandoned(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock: int | None = _lock(self.path)

    def close(self) -> None:
        """Removes it and everything in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """The descriptor of the locked file; it gets its name when it is locked, so nobody finds it free before."""
    unnamed = folder / f"{_LOCK}-not-yet"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        unnamed.unlink()
        return None
    unnamed.rename(folder / _LOCK)
    return descriptor


def _remove_abandoned(prefix: str, parent: Path) -> None:
    """A folder without a lock file is left alone: its owner is about to make one, or could not."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # of another user, removed meanwhile, or owned
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
