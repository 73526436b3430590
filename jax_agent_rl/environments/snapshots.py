"""Snapshots of environments, by trajectory and turn.

::

    step, snapshot ──► store: t0 after turn 1, 2, 3 … ──► a branch of t0: the newest that is not
                       (bounded: the oldest goes)         later than its fork
                                                      └─► a checkpoint: the newest of each running
                                                          trajectory

A snapshot that is not there any more costs a replay, never a trajectory that could be replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pydantic import Base64Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSnapshot:
    """The state of an environment between two turns.

    Attributes:
        turns: number of turns that it has answered.
        data: what the environment returned; base64 in a checkpoint.
    """

    turns: int
    data: Base64Bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns={self.turns}: a snapshot follows a turn")


class SnapshotStore:
    """Snapshots that something may go on from.

    Args:
        max_bytes: maximum size of all together; the oldest make room. 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._snapshots: OrderedDict[tuple[str, int], EnvironmentSnapshot] = OrderedDict()

    def add(self, trajectory_id: str, snapshot: EnvironmentSnapshot) -> bool:
        """Keep a snapshot of a trajectory; return False if it alone is too large."""
        if len(snapshot.data) > self.max_bytes:
            return False
        self._remove((trajectory_id, snapshot.turns))
        self._snapshots[trajectory_id, snapshot.turns] = snapshot
        self.num_bytes += len(snapshot.data)
        while self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._snapshots)))
        return True

    def newest(self, trajectory_id: str, turns: int) -> EnvironmentSnapshot | None:
        """Return the newest snapshot of a trajectory that follows at most ``turns`` turns."""
        for number in range(turns, 0, -1):
            snapshot = self._snapshots.get((trajectory_id, number))
            if snapshot is not None:
                return snapshot
        return None

    def forget(self, trajectory_id: str) -> None:
        """Remove all snapshots of a trajectory."""
        keys = [key for key in self._snapshots if key[0] == trajectory_id]
        for key in keys:
            self._remove(key)

    def _remove(self, key: tuple[str, int]) -> None:
        snapshot = self._snapshots.pop(key, None)
        if snapshot is not None:
            self.num_bytes -= len(snapshot.data)
