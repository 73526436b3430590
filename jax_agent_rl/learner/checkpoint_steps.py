"""The steps of the checkpoints in a folder, found by their names alone: nothing that computes is imported for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jax_agent_rl.errors import CheckpointError

if TYPE_CHECKING:
    from etils import epath


def located(folder: Path | str) -> Path | epath.Path:
    """Return the absolute path of a folder of checkpoints; one with a scheme (``gs://…``) is in a bucket."""
    if "://" not in str(folder):
        return Path(folder).resolve()
    from etils import epath

    return epath.Path(folder)


def complete_steps(folder: Path | str) -> list[int]:
    """Return the steps of all complete checkpoints in a folder, ascending; none if it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    place = located(folder)
    if isinstance(place, Path):
        return _local_steps(place)
    import orbax.checkpoint as ocp

    try:
        return sorted(ocp.utils.checkpoint_steps(place))
    except Exception as error:  # whatever the client of the bucket raises
        raise CheckpointError(
            f"trainer.checkpoint_dir={place} cannot be read ({brief(error)}); check that the bucket is there, that "
            "this machine's account may read and write it, and that the extra 'tpu' is installed"
        ) from error


def _local_steps(place: Path) -> list[int]:
    """Return the steps in a folder here: a checkpoint gets its name, a number, when it is complete."""
    try:
        names = [entry.name for entry in place.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {place} cannot be read ({error.strerror or error}); put the folder back, or name "
            "another run"
        ) from error
    return sorted(int(name) for name in names if name.isdecimal())


def brief(error: Exception) -> str:
    """Shorten an error to its first and last words; tensorstore's go on for pages and end with the cause."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:150]} … {text[-150:]}"
