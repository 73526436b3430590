"""What became of every trajectory: ``started = trained + dropped (by reason) + in flight``, at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jax_agent_rl.types import DropReason


class Accounting:
    """Counts trajectories from their start to the optimizer step that used them, or the reason they were dropped.

    A trajectory is *in flight* from its start until somebody says what became of it: also while it waits in a
    buffer. Each can be resolved once, and only if it was started, so nothing is lost or counted twice unnoticed.

    Attributes:
        started: trajectories begun.
        trained: trajectories an optimizer step has used.
        dropped: trajectories lost or left out, by reason.
    """

    def __init__(self) -> None:
        self.started = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self._in_flight: set[str] = set()
        self._of_group: Counter[str] = Counter()

    @property
    def in_flight(self) -> frozenset[str]:
        """Ids of the trajectories whose fate is open."""
        return frozenset(self._in_flight)

    def is_open(self, group_id: str) -> bool:
        """Whether a trajectory of this group (its id, a hyphen and a number) is in flight."""
        return group_id in self._of_group

    def start(self, trajectory_id: str) -> None:
        """A trajectory begins.

        Raises:
            ValueError: one with this id is in flight.
        """
        if trajectory_id in self._in_flight:
            raise ValueError(f"trajectory {trajectory_id!r} was started twice")
        self._in_flight.add(trajectory_id)
        self._of_group[_group(trajectory_id)] += 1
        self.started += 1

    def train(self, trajectory_ids: Iterable[str]) -> None:
        """An optimizer step has used these; ValueError if one is not in flight."""
        self.trained += self._resolve(trajectory_ids)

    def drop(self, trajectory_ids: Iterable[str], reason: DropReason) -> None:
        """These will not be trained on; ValueError if one is not in flight."""
        if count := self._resolve(trajectory_ids):
            self.dropped[reason] += count

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""
        resolved = self.trained + self.dropped.total()
        if self.started != resolved + len(self._in_flight):
            raise AssertionError(
                f"started={self.started} is not trained={self.trained} + dropped={dict(self.dropped)} + "
                f"in flight={len(self._in_flight)}"
            )

    def summary(self) -> dict[str, int]:
        """Flat counts for metrics: ``started``, ``trained``, ``in_flight``, ``dropped``, ``dropped/<reason>``."""
        self.check()
        by_reason = {f"dropped/{reason}": count for reason, count in sorted(self.dropped.items())}
        totals = {"started": self.started, "trained": self.trained, "in_flight": len(self._in_flight)}
        return totals | {"dropped": self.dropped.total()} | by_reason

    def state(self) -> dict[str, int | dict[str, int]]:
        """What a checkpoint keeps. Trajectories in flight do not survive a restart: they count as cancelled."""
        dropped = self.dropped + Counter({DropReason.CANCELLED: len(self._in_flight)})
        return {"started": self.started, "trained": self.trained, "dropped": {str(k): v for k, v in dropped.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`; only before anything was started."""
        if self.started:
            raise ValueError(f"{self.started} trajectories were started already")
        self.started, self.trained = state["started"], state["trained"]
        self.dropped = Counter({DropReason(reason): count for reason, count in state["dropped"].items()})

    def _resolve(self, trajectory_ids: Iterable[str]) -> int:
        """Takes them out of flight, all or none; returns how many."""
        ids = list(trajectory_ids)
        strangers = [i for i in ids if i not in self._in_flight]
        if strangers or len(set(ids)) != len(ids):
            raise ValueError(f"not in flight, or named twice: {strangers or ids}")
        self._in_flight.difference_update(ids)
        for group in map(_group, ids):
            self._of_group[group] -= 1
            if not self._of_group[group]:
                del self._of_group[group]
        return len(ids)


def _group(trajectory_id: str) -> str:
    return trajectory_id.rpartition("-")[0]
