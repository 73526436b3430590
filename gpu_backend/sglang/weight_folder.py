"""The folder in which SGLang's server finds new weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder


class WeightFolder:
    """Links to the files of one update at a time: the server loads all files of a folder.

    Args:
        parent: where to make the folder; None: shared memory of this machine.
    """

    def __init__(self, parent: str | None) -> None:
        self._folder = make_temp_folder(
            "jax_agent_rl-sglang-weights-", Path(parent) if parent else None, in_memory=True
        )

    @contextlib.contextmanager
    def holding(self, files: Sequence[str]) -> Iterator[Path]:
        """Return the folder with links to these files, and to no others."""
        links = []
        try:
            for file in files:
                path = Path(file).absolute()
                link = self._folder / path.name
                link.symlink_to(path)
                links.append(link)
            yield self._folder
        finally:
            for link in links:
                link.unlink()

    def remove(self) -> None:
        """Remove the folder."""
        remove_temp_folder(self._folder)
