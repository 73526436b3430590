"""Temporary folders that do not outlive their process, however it ends.

Their maker removes them, or :func:`remove_all` where a process leaves abruptly; after ``kill -9``, the next process
that makes one with the same prefix and parent. A lock shows whether the owner lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

_mine: dict[Path, int] = {}  # descriptor of the locked folder
_guard = threading.Lock()


def make_folder(prefix: str, parent: Path | None = None, *, in_memory: bool = False) -> Path:
    """Make a folder, and remove those of the same prefix whose owners died.

    Args:
        prefix: of its name.
        parent: None: the system's temporary folder.
        in_memory: prefer ``/dev/shm``, where there is one, if there is no ``parent``.
    """
    if parent is None:
        parent = SHARED_MEMORY if in_memory and SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_dead(folder)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = unlocked.rename(parent / unlocked.name[1:])  # under this name it is always locked
    with _guard:
        _mine[folder] = lock
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder from :func:`make_folder`; idempotent."""
    with _guard:
        lock = _mine.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def remove_all() -> None:
    """Remove all folders of this process."""
    for folder in list(_mine):
        remove_folder(folder)


def _remove_if_dead(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # gone, or another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives, or this storage knows no locks
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
