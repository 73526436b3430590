"""The staleness bound: how many groups may be open, and which may still be trained on.

::

    admit ──► running ──complete──► ready ──take──► taken ──finish_step──► trained
                 │                    │               └─ discard: a filter rejected it;
                 │                    │                  its slot is free at once
                 └──── too old: dropped, with its reason

The *staleness* of a token is the number of versions between the weights that sampled it and those
that are trained on it; the version counts finished steps. The bound S holds by three rules, here
and nowhere else:

    admission   running + ready + taken <= (S + 1) * batch. A step consumes a batch, so what is
                admitted at version v can be trained by the step that begins at v + S.
    hand-out    with stragglers="wait", a batch leaves only if the groups left behind can still make
                their deadlines: for every k, at most k * batch of them have to be trained within
                the k steps after this one. Otherwise the learner waits for the oldest. With "drop"
                it takes what is there.
    expiry      what is older than S when a version begins is dropped: with "wait" nothing, unless
                an engine served older weights than it reported.

One call advances the version and frees the slots of trained groups, when the new weights are
served. So no group is admitted under older weights than it is counted for. Plain and
single-threaded; :mod:`jax_agent_rl.collect.groups` gives it coroutines.

References: Fu et al. 2025 (AReaL), arXiv 2505.24298, for the admission rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

from jax_agent_rl.types import DropReason, Group, Trajectory

Stragglers = Literal["wait", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Permission to start one group.

    Attributes:
        number: number of the group in the run.
        version: version of the weights at admission: none of its tokens is older.
    """

    number: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Expired:
    """Groups that a new version makes too old.

    Attributes:
        running: numbers of running groups; their tasks have to be stopped.
        ready: complete groups that waited for the learner, by number.
    """

    running: tuple[int, ...]
    ready: Mapping[int, Group]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready:
    group: Group
    oldest: int  # version of its oldest token


class RolloutBuffer:
    """Groups between their start and the optimizer step that uses them.

    Args:
        batch: groups per step, >= 1.
        staleness: the bound S, in versions, >= 0.
        stragglers: ``wait``: the learner waits for groups that would become too old, and none is
            lost. ``drop``: it takes what is there, and what becomes too old is dropped.
        oversample: groups admitted beyond the capacity, with ``drop`` only: as many of the slowest
            are dropped.
        version: version of the weights served.

    Attributes:
        capacity: maximum open groups.
        version: version of the weights served, which between two steps is the learner's.
        started: groups admitted.
        trained: groups a step consumed (filters may have rejected some of their members).
        dropped: dropped groups, by reason.
    """

    def __init__(
        self,
        *,
        batch: int,
        staleness: int,
        stragglers: Stragglers = "wait",
        oversample: int = 0,
        version: int = 0,
    ) -> None:
        if batch < 1 or staleness < 0 or oversample < 0:
            raise ValueError(
                f"batch={batch} must be >= 1,"
                f" staleness={staleness} and oversample={oversample} >= 0"
            )
        if oversample and stragglers == "wait":
            raise ValueError(
                f"oversample={oversample} groups exist to be dropped;"
                " set stragglers='drop', or oversample=0"
            )
        self.batch = batch
        self.staleness = staleness
        self.stragglers = stragglers
        self.oversample = oversample
        self.capacity = (staleness + 1) * batch + oversample
        self.version = version
        self.started = 0
        self.trained = 0
        self.dropped: Counter[DropReason] = Counter()
        self._running: dict[int, Ticket] = {}
        self._ready: dict[int, _Ready] = {}
        self._taken: set[int] = set()
        self._versions: dict[
            int, int
        ] = {}  # at admission, of open groups and of those that a resumed run continues

    @property
    def running(self) -> int:
        """Number of groups whose trajectories still run."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Number of complete groups that wait for the learner."""
        return len(self._ready)

    @property
    def taken(self) -> int:
        """Number of groups the learner has taken."""
        return len(self._taken)

    @property
    def ready_groups(self) -> tuple[Group, ...]:
        """The complete groups that wait for the learner."""
        return tuple(entry.group for entry in self._ready.values())

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the open groups: running, ready or taken."""
        return tuple(sorted(self._running.keys() | self._ready.keys() | self._taken))

    @property
    def kept(self) -> Collection[int]:
        """Numbers of the open groups, and of the ones that a resumed run has yet to admit."""
        return self._versions.keys()

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now."""
        return self.capacity - len(self._running) - len(self._ready) - len(self._taken)

    def admit(self, number: int) -> Ticket:
        """Admit a group; its first token may be sampled from now on.

        Raises:
            ValueError: there is no room, or a group of this number is open.
        """
        if self.room < 1:
            raise ValueError(
                f"group {number}: all {self.capacity} slots are taken until a step finishes"
            )
        if number in self.open:
            raise ValueError(f"group {number} was admitted twice")
        # A group that a resumed run continues keeps the version of its first admission.
        version = self._versions.setdefault(number, self.version)
        ticket = Ticket(number=number, version=version)
        self._running[number] = ticket
        self.started += 1
        return ticket

    def complete(self, number: int, group: Group) -> bool:
        """Record that a running group has ended.

        It is handed out even if it has lost all its members.

        Returns:
            False if it is too old already and was dropped.

        Raises:
            KeyError: no such group is running.
        """
        ticket = self._running.pop(number)
        oldest = min(versions(group.trajectories), default=ticket.version)
        if self._expired(oldest):
            self.dropped[DropReason.STALE] += 1
            self._forget([number])
            return False
        self._ready[number] = _Ready(group=group, oldest=oldest)
        return True

    def take(self, count: int) -> dict[int, Group] | None:
        """Return the ``count`` oldest complete groups, ordered by number.

        None: wait for more to complete.
        """
        by_age = sorted(self._ready, key=lambda number: (self._ready[number].oldest, number))
        if len(by_age) < count or not self._leaves_time(by_age[count:]):
            return None

        groups: dict[int, Group] = {}
        for number in sorted(by_age[:count]):
            groups[number] = self._ready.pop(number).group
        self._taken.update(groups)
        return groups

    def discard(self, numbers: Collection[int], reason: DropReason) -> None:
        """Drop groups that were taken and will not be trained on.

        Others may be taken in their place.

        Raises:
            ValueError: one of them was not taken.
        """
        unknown = set(numbers) - self._taken
        if unknown:
            raise ValueError(
                f"groups {sorted(unknown)} were not taken, so they cannot be discarded"
            )
        self._taken.difference_update(numbers)
        self._forget(numbers)
        self.dropped[reason] += len(numbers)

    def finish_step(self, version: int) -> Expired:
        """Record that what was taken has been trained on, and that new weights are served.

        Args:
            version: version of those weights, the successor of :attr:`version`.

        Returns:
            The groups that are too old now, and were dropped.

        Raises:
            ValueError: it is not the successor, or less than a batch was taken, so that others
                could not be trained in time.
        """
        if len(self._taken) < self.batch:
            raise ValueError(f"a step of {len(self._taken)} groups: it has to consume {self.batch}")
        if version != self.version + 1:
            raise ValueError(
                f"version {version} does not follow {self.version}: every step is one version"
            )

        self.trained += len(self._taken)
        self._forget(self._taken)
        self._taken.clear()
        self.version = version
        return self._drop_expired()

    def _drop_expired(self) -> Expired:
        """Drop what is older than the bound allows."""
        expired_running = []
        if self.stragglers == "drop":  # otherwise the learner has waited for all that run
            for number, ticket in self._running.items():
                if self._expired(ticket.version):
                    expired_running.append(number)

        expired_ready = {}
        for number, entry in self._ready.items():
            if self._expired(entry.oldest):
                expired_ready[number] = entry.group

        for number in expired_running:
            del self._running[number]
        for number in expired_ready:
            del self._ready[number]
        self._forget([*expired_running, *expired_ready])
        self.dropped[DropReason.STALE] += len(expired_running) + len(expired_ready)
        return Expired(running=tuple(expired_running), ready=expired_ready)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON.

        A resumed run has to admit the ``open`` groups again.
        """
        dropped = {}
        for reason, count in self.dropped.items():
            if count:
                dropped[str(reason)] = count

        return {
            "version": self.version,
            "started": self.started,
            "trained": self.trained,
            "dropped": dropped,
            "open": list(self.open),
            "versions": {str(number): version for number, version in self._versions.items()},
        }

    def restore(self, state: Mapping[str, Any], *, continued: Collection[int] = ()) -> None:
        """Continue from :meth:`state`, before anything was admitted.

        All slots are free. The open groups count as cancelled, and what is admitted now is as new
        as the weights. Groups that are ``continued`` are the exception: with their ids they keep
        the version of their first admission.
        """
        if self.started:
            raise ValueError(f"{self.started} groups were admitted already")
        self.version = state["version"]
        self.trained = state["trained"]
        self.dropped = Counter()
        for reason, count in state["dropped"].items():
            self.dropped[DropReason(reason)] = count

        # The continued groups will be admitted again, and counted as started then.
        open_groups = state["open"]
        reopened = len(set(open_groups) & set(continued))
        self.started = state["started"] - reopened
        self.dropped[DropReason.CANCELLED] += len(open_groups) - reopened
        self._versions = {number: state["versions"][str(number)] for number in continued}

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._versions[number]

    def _expired(self, oldest: int) -> bool:
        return oldest < self.version - self.staleness

    def _leaves_time(self, waiting: Collection[int]) -> bool:
        """Return whether this step leaves time for the other groups.

        It does if all running groups and the ``waiting`` ready ones can still be trained in time
        after it. If nothing runs, waiting would not help.
        """
        if self.stragglers == "drop" or not self._running:
            return True

        # How many groups must be trained within how many steps after this one.
        deadlines: Counter[int] = Counter()
        for ticket in self._running.values():
            deadlines[ticket.version + self.staleness - self.version] += 1
        for number in waiting:
            deadlines[self._ready[number].oldest + self.staleness - self.version] += 1

        for steps in range(self.staleness + 1):
            due = sum(count for deadline, count in deadlines.items() if deadline <= steps)
            if due > steps * self.batch:
                return False
        return True


def versions(trajectories: Iterable[Trajectory]) -> Iterator[int]:
    """Yield the version of every sampled token, segments included."""
    for trajectory in trajectories:
        for sequence in (trajectory, *trajectory.segments):
            yield from compress(sequence.policy_versions, sequence.response_mask)
