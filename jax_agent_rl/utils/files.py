"""The cache folder, bounded reads, writes that survive a crash or a full disk, temporary folders.

Temporary folders do not outlive their process, however it ends. Their maker removes them, or
:func:`remove_temp_folders` where a process leaves abruptly. After ``kill -9``, the next process
that makes one with the same prefix and parent removes them: a lock shows whether the owner lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from jax_agent_rl.errors import JaxAgentRLError, StorageError

_DEFAULT_CACHE = "~/.cache/jax_agent_rl"
_NO_ROOM = (
    "{file} could not be written ({reason}); make space there, then go on with --resume. "
    "Complete checkpoints are intact"
)
_NO_FOLDER = "{file} could not be written ({reason}); make space there, or name another folder"


def cache_root() -> Path:
    """Return the folder of downloads, converted models and compiled programs.

    It is ``$JAX_AGENT_RL_CACHE``, or ``~/.cache/jax_agent_rl``.
    """
    return Path(os.environ.get("JAX_AGENT_RL_CACHE", _DEFAULT_CACHE)).expanduser()


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Expand ``~`` in a path.

    A path in ``~/.cache/jax_agent_rl``, as recipes have it, is moved to :func:`cache_root`.
    """
    path = Path(path)
    if path.is_relative_to(_DEFAULT_CACHE):
        return cache_root() / path.relative_to(_DEFAULT_CACHE)
    return path.expanduser()


def read_regular_file(path: Path, limit: int) -> bytes:
    """Read a file that others may have put there.

    At most ``limit`` bytes are read, and what is not a regular file is refused: a named pipe would
    block the reader.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or has more than ``limit`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is larger than {limit} bytes")
    return data


def read_lines(file: Path, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield every line of a file with its offset in bytes; one line is in memory at a time.

    Args:
        file: others may have written it, and it may be growing.
        limit: most bytes of a line; in place of a longer one, None is yielded.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        offset = 0
        while line := stream.readline(limit + 1):
            content: bytes | None = line
            if len(line) > limit:
                content = None
                while line and not line.endswith(b"\n"):  # skip the rest of the line
                    line = stream.readline(limit + 1)
            yield offset, content
            offset = stream.tell()


def write_atomically(file: Path, text: str, *, message: str = _NO_ROOM) -> None:
    """Replace a file by a text, see :func:`replacing`."""
    with replacing(file, message=message) as stream:
        stream.write(text.encode())


@contextlib.contextmanager
def replacing(
    file: Path, *, permissions: int = 0o666, message: str = _NO_ROOM
) -> Iterator[IO[bytes]]:
    """Yield a stream whose content replaces a file in one move, once it is complete and on disk.

    Until then the old file stays as it is, also in a crash, on a full disk, or after an error in
    the context.

    Args:
        file: need not exist.
        permissions: of the new file, less what the umask takes.
        message: as in :func:`writing`.

    Raises:
        StorageError: it could not be written.
    """
    temporary = file.with_name(file.name + ".tmp")
    try:
        with writing(file, message=message):
            temporary.unlink(missing_ok=True)  # of a process that was killed
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, permissions)
            with open(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(file: Path, *, message: str = _NO_ROOM) -> Iterator[None]:
    """Turn an OSError while a file is written into a StorageError that names the file and the fix.

    Args:
        message: a template with ``{file}`` and ``{reason}``; the default suits files of a run.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(message.format(file=file, reason=error.strerror or error)) from error


def make_folder(folder: Path, *, message: str = _NO_FOLDER) -> None:
    """Make a folder with its parents; one that is there stays as it is.

    Args:
        folder: often one that a user named.
        message: as in :func:`writing`.

    Raises:
        StorageError: it cannot be made: a file is in its place, its name is too long, the disk is
            full.
    """
    with writing(folder, message=message):
        folder.mkdir(parents=True, exist_ok=True)


Stamp = tuple[int, int, int, int, int]


def file_stamp(file: Path) -> Stamp:
    """Return what changes with a file's content: device, inode, size, times of its last change.

    Copying or unpacking can set back the time of modification, but not the time of the inode's
    change.
    """
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_new(
    target: Path, *, replaces: Collection[str] = (), error: type[JaxAgentRLError] = StorageError
) -> None:
    """Check that a folder to write does not exist, is empty, or is an older one of its kind.

    Args:
        target: need not exist.
        replaces: globs of the names in an older one; a folder that holds anything else is refused.
        error: class of the error to raise.

    Raises:
        JaxAgentRLError: of class ``error``; the folder holds something else, or is a file.
    """
    if not os.path.exists(target):  # unlike Path.exists, also False for a name that is too long
        return
    if not target.is_dir():
        raise error(f"{target} is a file; name a new folder")
    for name in sorted(os.listdir(target)):
        if not any(fnmatch.fnmatch(name, pattern) for pattern in replaces):
            raise error(
                f"{target} is not empty; name a new folder (it holds {name}, which would be taken"
                " for a part)"
            )


@contextlib.contextmanager
def replacing_folder(
    target: Path, *, replaces: Collection[str] = (), error: type[JaxAgentRLError] = StorageError
) -> Iterator[Path]:
    """Yield a folder to fill, which replaces ``target`` in one move.

    No file of an older folder stays. After an error in the context nothing is left of the new
    folder, and ``target`` is as it was.

    Args:
        target: a folder that does not exist, is empty, or that ``replaces`` describes.
        replaces: as in :func:`require_new`.
        error: class of the error for a folder that holds something else.

    Raises:
        JaxAgentRLError: of class ``error``; ``target`` holds something else.
        StorageError: it could not be written.
    """
    require_new(target, replaces=replaces, error=error)
    unfinished: Path | None = None
    try:
        with writing(target, message=_NO_FOLDER):
            make_folder(target.parent)
            unfinished = make_temp_folder(".unfinished-", target.parent)
            folder = unfinished / "new"
            folder.mkdir()  # with the permissions of new folders, which a temporary one has not

        yield folder

        require_new(target, replaces=replaces, error=error)  # another process may have been faster
        with writing(target, message=_NO_FOLDER):
            _swap_in(folder, target, unfinished / "old")
    finally:
        if unfinished is not None:
            remove_temp_folder(unfinished)


def _swap_in(folder: Path, target: Path, old_folder: Path) -> None:
    """Rename ``folder`` to ``target``, and the folder that was there to ``old_folder``."""
    has_old_folder = target.exists() and any(target.iterdir())
    if has_old_folder:
        target.rename(old_folder)
    try:
        folder.rename(target)
    except OSError:
        if has_old_folder:
            old_folder.rename(target)
        raise


SHARED_MEMORY = Path("/dev/shm")

_temp_folders: dict[Path, int] = {}  # this process's, with the descriptor that locks each
_temp_folders_lock = threading.Lock()


def make_temp_folder(prefix: str, parent: Path | None = None, *, in_memory: bool = False) -> Path:
    """Make a folder, and remove folders of the same prefix whose owners died.

    Args:
        parent: None is the system's temporary folder.
        in_memory: prefer ``/dev/shm``, where there is one, if there is no ``parent``.
    """
    if parent is None and in_memory and SHARED_MEMORY.is_dir():
        parent = SHARED_MEMORY
    if parent is None:
        parent = Path(tempfile.gettempdir())

    for folder in parent.glob(f"{prefix}*"):
        _remove_if_dead(folder)

    # It gets its name once it is locked, so that no other process takes its owner for dead.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    descriptor = _open_folder(unlocked)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    folder = unlocked.rename(parent / unlocked.name[1:])
    with _temp_folders_lock:
        _temp_folders[folder] = descriptor
    return folder


def remove_temp_folder(folder: Path) -> None:
    """Remove a folder from :func:`make_temp_folder`; idempotent."""
    with _temp_folders_lock:
        descriptor = _temp_folders.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if descriptor is not None:
        os.close(descriptor)


def remove_temp_folders() -> None:
    """Remove all folders of this process."""
    for folder in list(_temp_folders):
        remove_temp_folder(folder)


@contextlib.contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Let other processes see with :func:`is_in_use` that this one writes to a folder.

    Storage without locks shows nothing.
    """
    descriptor = _open_folder(folder)
    try:
        # It fails if another process writes there as well, or if this storage has no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_in_use(folder: Path) -> bool:
    """Return whether a living process has marked a folder with :func:`mark_in_use`."""
    descriptor = _open_folder(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # this storage has no locks
        return False
    finally:
        os.close(descriptor)
    return False


def _open_folder(folder: Path) -> int:
    """Return a descriptor of a folder, which can be locked."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _remove_if_dead(folder: Path) -> None:
    try:
        descriptor = _open_folder(folder)
    except OSError:  # gone, or another user's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives, or this storage has no locks
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
