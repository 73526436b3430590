"""Order of training rows: reshuffled each epoch, exactly resumable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jax_agent_rl.errors import CheckpointError

T = TypeVar("T")


class DataCursor(Generic[T]):
    """Endless shuffled passes over rows.

    >>> cursor = DataCursor(["a", "b", "c"], seed=0)
    >>> first = cursor.next_rows(4)                  # three of epoch 0, one of epoch 1
    >>> sorted(first[:3]), cursor.state()
    (['a', 'b', 'c'], {'epoch': 1, 'position': 1, 'rows': 3, 'again': []})

    Every draw has a number, by which it can be repeated after a restart.

    >>> resumed = DataCursor(["a", "b", "c"], seed=0)
    >>> resumed.restore(cursor.state(again=[2]))
    >>> [number for number, row in (resumed.draw(), resumed.draw())]
    [2, 4]
    """

    def __init__(self, rows: Sequence[T], *, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._again: list[int] = []
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def rows(self) -> Sequence[T]:
        """All rows, in the data's order."""
        return self._rows

    def next_rows(self, count: int) -> list[T]:
        """Return the next ``count`` rows, across the end of an epoch if need be."""
        return [self.draw()[1] for _ in range(count)]

    def draw(self) -> tuple[int, T]:
        """Return the number of the next draw and its row."""
        if self._again:
            number = self._again.pop(0)
            return number, self._row(*divmod(number, len(self._rows)))
        epoch, position = self._epoch, self._position
        self._epoch, self._position = divmod(epoch * len(self._rows) + position + 1, len(self._rows))
        return epoch * len(self._rows) + position, self._row(epoch, position)

    def _row(self, epoch: int, position: int) -> T:
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return self._rows[self._order[1][position]]

    def state(self, *, again: Iterable[int] = ()) -> dict[str, Any]:
        """Return the state for :meth:`restore`, as JSON; ``again`` are numbers of draws to repeat first."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "rows": len(self._rows),
            "again": sorted({*self._again, *again}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where a cursor over the same rows with the same seed stood.

        Raises:
            CheckpointError: the data set has a different number of rows now.
        """
        if state["rows"] != len(self._rows):
            raise CheckpointError(
                f"the checkpoint was made with {state['rows']} training rows, data.train has {len(self._rows)} now; "
                "restore the file or start a new run"
            )
        drawn = state["epoch"] * len(self._rows) + state["position"]
        self._epoch, self._position = divmod(drawn, len(self._rows))
        self._again = list(state.get("again", ()))  # which older checkpoints do not have
