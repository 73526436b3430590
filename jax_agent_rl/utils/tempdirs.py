"""Temporary folders that do not outlive their process, however it ends.

Removed by whoever made them in the end; by :func:`remove_all` where a process leaves without an orderly end; and after
``kill -9`` by the next process that makes one of the same kind in the same place: a lock says whether the owner lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

_mine: dict[Path, int] = {}  # the descriptor that holds the lock, which is on the folder itself
_guard = threading.Lock()


def make_folder(prefix: str, parent: Path | None = None) -> Path:
    """A new folder; those of the same prefix in the same place whose owners have died are removed.

    Args:
        prefix: of its name.
        parent: where; None is the temporary folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_dead(folder)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = unlocked.rename(parent / unlocked.name[1:])  # nobody ever sees it under this name without its lock
    with _guard:
        _mine[folder] = lock
    return folder


def remove_folder(folder: Path) -> None:
    """Removes what :func:`make_folder` returned; once more does nothing."""
    with _guard:
        lock = _mine.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def remove_all() -> None:
    """Removes all folders of this process."""
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
