"""The cache folder, and file writes that survive a crash or a full disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jax_agent_rl.errors import StorageError

_DEFAULT_CACHE = "~/.cache/jax_agent_rl"
_NO_ROOM = (
    "{file} could not be written ({reason}); make space there, then go on with --resume. "
    "Complete checkpoints are intact"
)


def cache_root() -> Path:
    """Return the folder of downloads, converted models and compiled programs.

    It is ``$JAX_AGENT_RL_CACHE``, or ``~/.cache/jax_agent_rl``.
    """
    return Path(os.environ.get("JAX_AGENT_RL_CACHE", _DEFAULT_CACHE)).expanduser()


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Expand ``~``, and move a path in ``~/.cache/jax_agent_rl``, as recipes have it, to :func:`cache_root`."""
    path = Path(path)
    return cache_root() / path.relative_to(_DEFAULT_CACHE) if path.is_relative_to(_DEFAULT_CACHE) else path.expanduser()


def write_atomically(file: Path, text: str, *, message: str = _NO_ROOM) -> None:
    """Replace a file in one move, so that a crash leaves the old or the new one; ``message`` as in :func:`writing`.

    Raises:
        StorageError: it could not be written; the old one is intact.
    """
    temporary = file.with_name(file.name + ".tmp")
    try:
        with writing(file, message=message):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, file)
    except StorageError:
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
