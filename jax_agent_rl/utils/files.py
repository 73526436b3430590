"""Writing files so that a crash or a full disk leaves something whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from jax_agent_rl.errors import StorageError

_NO_ROOM = (
    "{file} could not be written ({reason}); make space there, then go on with --resume. "
    "Complete checkpoints are intact"
)


def write_atomically(file: Path, text: str, *, message: str = _NO_ROOM) -> None:
    """Replaces a file in one move, so a crash leaves the old or the new one.

    Args:
        message: as :func:`writing` takes it.

    Raises:
        StorageError: it could not be written; the old one is there.
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
    """Around writing a file, by default one of a run; StorageError says which one failed, and what to do.

    Args:
        message: of the error; ``{file}`` and ``{reason}`` are filled in.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(message.format(file=file, reason=error.strerror or error)) from error
