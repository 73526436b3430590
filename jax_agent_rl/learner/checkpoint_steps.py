"""The steps of the checkpoints in a folder, found by their names alone.

Nothing that computes is imported for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jax_agent_rl.errors import CheckpointError

if TYPE_CHECKING:
    from etils import epath


def located(folder: Path | str) -> Path | epath.Path:
    """Return the absolute path of a folder of checkpoints.

    One with a scheme (``gs://…``) is in a bucket.
    """
    if "://" not in str(folder):
        return Path(folder).resolve()
    from etils import epath

    return epath.Path(folder)


def complete_steps(folder: Path | str) -> list[int]:
    """Return the steps of all complete checkpoints in a folder, ascending.

    There are none if it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = located(folder)
    if isinstance(path, Path):
        return _local_steps(path)
    import orbax.checkpoint as ocp

    try:
        return sorted(ocp.utils.checkpoint_steps(path))
    except Exception as error:  # the client of a bucket may raise anything
        raise CheckpointError(
            f"trainer.checkpoint_dir={path} cannot be read ({brief(error)});"
            " check that the bucket is there, that this machine's account may read and write it,"
            " and that the extra 'tpu' is installed"
        ) from error


def _local_steps(folder: Path) -> list[int]:
    """Return the steps in a folder of this machine.

    A checkpoint gets its name, a number, when it is complete.
    """
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read ({error.strerror or error});"
            " put the folder back, or name another run"
        ) from error
    return sorted(int(name) for name in names if name.isdecimal())


def brief(error: Exception) -> str:
    """Shorten an error to its beginning and its end.

    Errors of tensorstore go on for pages and end with the cause.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) <= 300:
        return text
    return f"{text[:150]} … {text[-150:]}"
