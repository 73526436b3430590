"""What became of every trajectory.

At any moment, ``started = trained + dropped (by reason) + in flight``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_agent_rl.errors import NothingToTrainError
from jax_agent_rl.types import DropReason, Group
from jax_agent_rl.utils.text import counted


class Accounting:
    """Counts trajectories from their start to their end.

    The end is the optimizer step that used a trajectory, or the reason why it was dropped. It is
    *in flight* until then, also while it waits in a buffer. Each trajectory is resolved once, and
    only if it was started, so nothing is lost or counted twice unnoticed.

    Attributes:
        started: trajectories started.
        trained: trajectories an optimizer step has used.
        dropped: trajectories lost or left out, by reason.
    """

    def __init__(self) -> None:
        self.started = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self._in_flight: set[str] = set()
        self._open_by_group: Counter[str] = Counter()

    @property
    def in_flight(self) -> frozenset[str]:
        """Ids of the trajectories in flight."""
        return frozenset(self._in_flight)

    def is_open(self, group_id: str) -> bool:
        """Return whether a trajectory of this group is in flight.

        Such a trajectory's id is the group's, a hyphen, a number, and perhaps a role.
        """
        return group_id in self._open_by_group

    def start(self, trajectory_id: str) -> None:
        """Record that a trajectory begins.

        Raises:
            ValueError: one with this id is in flight.
        """
        if trajectory_id in self._in_flight:
            raise ValueError(f"trajectory {trajectory_id!r} was started twice")
        self._in_flight.add(trajectory_id)
        self._open_by_group[_group_id(trajectory_id)] += 1
        self.started += 1

    def split(self, episode_id: str, trajectory_ids: Sequence[str]) -> None:
        """Record that an episode was run to its end: its roles' trajectories take its place."""
        if list(trajectory_ids) == [episode_id]:
            return
        self.started -= self._resolve([episode_id])
        for trajectory_id in trajectory_ids:
            self.start(trajectory_id)

    def train(self, trajectory_ids: Iterable[str]) -> None:
        """Record that an optimizer step used these; raise ValueError if one is not in flight."""
        self.trained += self._resolve(trajectory_ids)

    def drop(self, trajectory_ids: Iterable[str], reason: DropReason) -> None:
        """Record that these will not be trained on; raise ValueError if one is not in flight."""
        count = self._resolve(trajectory_ids)
        if count:  # a reason without trajectories is not listed
            self.dropped[reason] += count

    def check(self) -> None:
        """Raise AssertionError unless the counts add up."""
        resolved = self.trained + self.dropped.total()
        if self.started != resolved + len(self._in_flight):
            raise AssertionError(
                f"started={self.started} is not trained={self.trained} +"
                f" dropped={dict(self.dropped)} + in flight={len(self._in_flight)}"
            )

    def summary(self) -> dict[str, int]:
        """Return counts for metrics.

        They are ``started``, ``trained``, ``in_flight``, ``dropped`` and ``dropped/<reason>``.
        """
        self.check()
        counts = {
            "started": self.started,
            "trained": self.trained,
            "in_flight": len(self._in_flight),
            "dropped": self.dropped.total(),
        }
        for reason, count in sorted(self.dropped.items()):
            counts[f"dropped/{reason}"] = count
        return counts

    def state(self, *, continued: int = 0) -> dict[str, int | dict[str, int]]:
        """Return the checkpoint state.

        Trajectories in flight count as cancelled, except those that the resumed run continues: it
        starts them again.

        Args:
            continued: number of those, which are in flight or were cancelled just now.
        """
        counts = Counter(self.dropped)
        counts[DropReason.CANCELLED] += len(self._in_flight) - continued
        dropped = {}
        for reason, count in counts.items():
            if count > 0:
                dropped[str(reason)] = count

        return {
            "started": self.started - continued,
            "trained": self.trained,
            "dropped": dropped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`; only before anything was started."""
        if self.started:
            raise ValueError(f"{self.started} trajectories were started already")
        self.started = state["started"]
        self.trained = state["trained"]
        self.dropped = Counter()
        for reason, count in state["dropped"].items():
            self.dropped[DropReason(reason)] = count

    def _resolve(self, trajectory_ids: Iterable[str]) -> int:
        """Take them out of flight, all or none; return how many."""
        ids = list(trajectory_ids)
        unknown = [trajectory_id for trajectory_id in ids if trajectory_id not in self._in_flight]
        if unknown or len(set(ids)) != len(ids):
            raise ValueError(f"not in flight, or named twice: {unknown or ids}")

        self._in_flight.difference_update(ids)
        for trajectory_id in ids:
            group_id = _group_id(trajectory_id)
            self._open_by_group[group_id] -= 1
            if self._open_by_group[group_id] == 0:
                del self._open_by_group[group_id]
        return len(ids)


def _group_id(trajectory_id: str) -> str:
    """Return the group of ``<group>-<number>`` or ``<group>-<number>/<role>``."""
    episode_id, _, _ = trajectory_id.partition("/")
    group_id, _, _ = episode_id.rpartition("-")
    return group_id


class LostBatchGuard:
    """Stops a run that loses whole batches in a row: failing or hanging rewards, a dead engine.

    Args:
        max_failed_batches: the count at which the run stops, >= 1.
        lost_batches: initial count, of a resumed run.

    Attributes:
        lost_batches: batches in a row without a surviving trajectory.
    """

    def __init__(self, max_failed_batches: int, lost_batches: int = 0):
        self._max_failed_batches = max_failed_batches
        self.lost_batches = lost_batches

    def check(self, groups: Sequence[Group], latest_losses: Mapping[DropReason, str]) -> None:
        """Check one collected batch, before any filter; one without groups does not count.

        ``latest_losses`` are messages of the newest losses, by reason.

        Raises:
            NothingToTrainError: the limit is reached; names the reasons, with an example of the
                most frequent one.
        """
        if not groups:
            return
        if any(group.trajectories for group in groups):
            self.lost_batches = 0
            return
        self.lost_batches += 1
        if self.lost_batches < self._max_failed_batches:
            return

        reasons: Counter[DropReason] = Counter()
        for group in groups:
            reasons.update(group.dropped)
        counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        main_reason = reasons.most_common(1)[0][0]
        newest_loss = latest_losses.get(main_reason, "see the log")
        raise NothingToTrainError(
            f"every trajectory of {counted(self.lost_batches, 'batch')} in a row was lost"
            f" ({counts}). The newest {main_reason}: {newest_loss}. Repair that, or raise"
            " trainer.max_failed_batches"
        )
