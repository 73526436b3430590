"""The order in which training rows are used: shuffled anew each epoch, resumable exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jax_agent_rl.errors import CheckpointError

T = TypeVar("T")


class DataCursor(Generic[T]):
    """Endless shuffled passes over rows.

    >>> cursor = DataCursor(["a", "b", "c"], seed=0)
    >>> first = cursor.next_rows(4)                  # three of epoch 0, one of epoch 1
    >>> sorted(first[:3]), cursor.state()
    (['a', 'b', 'c'], {'epoch': 1, 'position': 1, 'rows': 3})
    """

    def __init__(self, rows: Sequence[T], *, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._position = 0

    def next_rows(self, count: int) -> list[T]:
        """The next ``count`` rows, over the end of an epoch if need be."""
        taken: list[T] = []
        while len(taken) < count:
            if self._position == len(self._rows):
                self._epoch, self._position = self._epoch + 1, 0
            order = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))
            part = order[self._position : self._position + count - len(taken)]
            taken += [self._rows[i] for i in part]
            self._position += len(part)
        return taken

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as JSON."""
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._rows)}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where a cursor over the same rows with the same seed stood.

        Raises:
            CheckpointError: the data set has another number of rows now.
        """
        if state["rows"] != len(self._rows):
            raise CheckpointError(
                f"the checkpoint was made with {state['rows']} training rows, data.train has {len(self._rows)} now; "
                "restore the file or start a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
