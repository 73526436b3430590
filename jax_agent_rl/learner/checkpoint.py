"""Checkpoints with Orbax: the train state on device, and a small JSON of everything else a resume needs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jax_agent_rl.errors import CheckpointError

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writes ``folder/<step>/`` atomically and keeps the newest ones.

    Args:
        folder: made if missing.
        keep: how many checkpoints stay.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder.resolve()
        self._keep = keep
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=True, create=True)
        return ocp.CheckpointManager(self._folder, options=options)

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Starts saving ``state`` (a pytree of arrays) and ``progress`` (JSON); returns once the arrays are copied.

        Raises:
            CheckpointError: the folder cannot be written. Earlier checkpoints are intact.
        """
        if self._manager.latest_step() == step:
            return
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(progress))
        try:
            self._manager.save(step, args=arguments, force=True)
        except (OSError, ValueError) as error:
            # Orbax may remember a step whose commit failed; a fresh manager only sees what is on disk.
            self._manager = self._open()
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self._folder}: {error}"
            ) from error

    def wait(self) -> None:
        """Returns when every started save is on disk.

        Raises:
            CheckpointError: a save failed. Earlier checkpoints are intact.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            self._manager = self._open()
            raise CheckpointError(f"a checkpoint could not be written to {self._folder}: {error}") from error

    def restore(self, like: Any) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint: its step, the state placed as ``like`` is, and the progress.

        Args:
            like: a state of the same structure; shapes, dtypes and shardings are taken from it.

        Raises:
            CheckpointError: none there, or it belongs to another model.
        """
        step = self._manager.latest_step()
        if step is None:
            raise CheckpointError(f"no checkpoint in {self._folder}; start the run without --resume")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=arguments)
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(
                f"checkpoint {step} in {self._folder} does not fit this configuration's model: {error}"
            ) from error
        return step, restored.state, restored.progress

    def close(self) -> None:
        """Waits for running saves and frees Orbax's threads."""
        self.wait()
        self._manager.close()
