"""The cache folder, bounded reads, file writes that survive a crash or a full disk, and temporary folders.

Temporary folders do not outlive their process, however it ends. Their maker removes them, or
:func:`remove_temp_folders` where a process leaves abruptly; after ``kill -9``, the next process
that makes one with the same prefix and parent. A lock shows whether the owner lives.
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
    """Expand ``~``, and move a path in ``~/.cache/jax_agent_rl``, as recipes have it, to :func:`cache_root`."""
    path = Path(path)
    return (
        cache_root() / path.relative_to(_DEFAULT_CACHE)
        if path.is_relative_to(_DEFAULT_CACHE)
        else path.expanduser()
    )


def read_regular_file(path: Path, limit: int) -> bytes:
    """Read a file that others may have put there: it is bounded, and nothing is waited for, as with a named pipe.

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
    """Yield every line of a file with the place where it begins, in bytes; one is in memory at a time.

    Args:
        file: others may have written it, and it may be growing.
        limit: of a line's bytes; in place of a longer one, None is yielded.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        begin = 0
        while line := stream.readline(limit + 1):
            content: bytes | None = line
            if len(line) > limit:
                content = None
                while line and not line.endswith(b"\n"):
                    line = stream.readline(limit + 1)
            yield begin, content
            begin = stream.tell()


def write_atomically(file: Path, text: str, *, message: str = _NO_ROOM) -> None:
    """Replace a file by a text, see :func:`replacing`."""
    with replacing(file, message=message) as stream:
        stream.write(text.encode())


@contextlib.contextmanager
def replacing(
    file: Path, *, permissions: int = 0o666, message: str = _NO_ROOM
) -> Iterator[IO[bytes]]:
    """Yield a stream whose content takes the place of a file in one move, once it is whole and on disk.

    Whatever happens before, the old file stays as it is: a crash, a full disk, an error in the
    context.

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
            handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, permissions)
            with open(handle, "wb") as stream:
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

    ``message`` is a template with ``{file}`` and ``{reason}``; the default suits files of a run.
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

    Unlike the time of modification, that of the inode's change cannot be set back by copying or
    unpacking.
    """
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_new(
    target: Path, *, replaces: Collection[str] = (), error: type[JaxAgentRLError] = StorageError
) -> None:
    """Check that a folder to write does not exist, is empty, or is an older one of its kind.

    Args:
        target: the folder.
        replaces: globs of the names that an older one has; one that holds anything else is another.
        error: type of the error.

    Raises:
        JaxAgentRLError: of type ``error``; the folder holds something else, or is none.
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
def whole_folder(
    target: Path, *, replaces: Collection[str] = (), error: type[JaxAgentRLError] = StorageError
) -> Iterator[Path]:
    """Yield a folder to fill, which takes the place of ``target`` in one move: no file of an older one stays.

    If it is not completed, nothing is left of it, and ``target`` is as it was.

    Args:
        target: a folder that does not exist, is empty, or that ``replaces`` describes.
        replaces: see :func:`require_new`.
        error: type of the error for a folder that holds something else.

    Raises:
        JaxAgentRLError: of type ``error``; ``target`` holds something else.
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
            _take_place(folder, target, unfinished / "old")
    finally:
        if unfinished is not None:
            remove_temp_folder(unfinished)


def _take_place(folder: Path, target: Path, aside: Path) -> None:
    """Rename ``folder`` to ``target``, and what was there to ``aside``."""
    is_taken = target.exists() and any(target.iterdir())
    if is_taken:
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if is_taken:
            aside.rename(target)
        raise


SHARED_MEMORY = Path("/dev/shm")

_mine: dict[Path, int] = {}  # descriptor of the locked folder
_guard = threading.Lock()


def make_temp_folder(prefix: str, parent: Path | None = None, *, in_memory: bool = False) -> Path:
    """Make a folder, and remove those of the same prefix whose owners died.

    Args:
        prefix: of its name.
        parent: None: the system's temporary folder.
        in_memory: prefer ``/dev/shm``, where there is one, if there is no ``parent``.
    """
    if parent is None:
        parent = (
            SHARED_MEMORY if in_memory and SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        )
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_dead(folder)
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = unlocked.rename(parent / unlocked.name[1:])  # under this name it is always locked
    with _guard:
        _mine[folder] = lock
    return folder


def remove_temp_folder(folder: Path) -> None:
    """Remove a folder from :func:`make_temp_folder`; idempotent."""
    with _guard:
        lock = _mine.pop(folder, None)
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def remove_temp_folders() -> None:
    """Remove all folders of this process."""
    for folder in list(_mine):
        remove_temp_folder(folder)


@contextlib.contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Let other processes see with :func:`is_in_use` that this one writes to a folder, where the storage has locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(
            OSError
        ):  # another process writes there, too, or this storage has no locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def is_in_use(folder: Path) -> bool:
    """Return whether a living process has marked a folder with :func:`mark_in_use`."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # this storage has no locks
        return False
    finally:
        os.close(handle)
    return False


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
