"""Groups while their trajectories run: members, time limits, checkpoints, stream to the learner.

A resumed run continues its trajectories instead of starting again: otherwise a kill would cost long
trajectories more often than short ones, and what is trained on would be biased. A checkpoint holds
the members that have ended, and running ones up to their newest id, as far as agent and engine
allow (:attr:`~jax_agent_rl.agents.loop.AgentLoop.continues_prefix`,
:meth:`~jax_agent_rl.agents.episode.Episode.progress`). Others start again under the same id, so
with the same seed.

Time limits, on the event loop's clock, decide when a group is complete::

    member starts ──► runs ──► ends in time                          counts for min_group_size if it
                        │                                            survived
                        ├────► trajectory_timeout is over            dropped: trajectory_timeout
                        └────► group_timeout is over since the last  dropped: straggler
                               member started, and min_group_size
                               members have survived

So every group ends within ``trajectory_timeout`` of the start of its last member, whatever agents,
tools and rewards wait for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter

from jax_agent_rl.agents.request import Prefix
from jax_agent_rl.collect.buffer import RolloutBuffer, Ticket
from jax_agent_rl.collect.strategies import Outcome
from jax_agent_rl.errors import StragglerError, TrajectoryError, TrajectoryTimeoutError
from jax_agent_rl.types import DropReason, Group, SamplingParams, Trajectory

_PREFIX = TypeAdapter(Prefix)
_TRAJECTORY = TypeAdapter(Trajectory)


@dataclass(kw_only=True)
class GroupRecord:
    """The members of a group by number.

    Attributes:
        ended: scored trajectories, and why others were dropped.
        partial: what an earlier process had sampled of members that had not ended.
        running: returns what a running member has sampled; None if it has to start again.
    """

    ended: dict[int, Trajectory | DropReason] = field(default_factory=dict)
    partial: dict[int, Prefix] = field(default_factory=dict)
    running: dict[int, Callable[[], Prefix | None]] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        ended: dict[str, Any] = {}
        dropped: dict[str, str] = {}
        for number, result in self.ended.items():
            if isinstance(result, DropReason):
                dropped[str(number)] = str(result)
            elif _is_plain(result):
                # The data cursor finds the row again.
                without_row = replace(result, row={})
                ended[str(number)] = _TRAJECTORY.dump_python(without_row, mode="json")

        prefixes: dict[int, Prefix] = {}
        for number, prefix in self.partial.items():
            if number not in self.running:
                prefixes[number] = prefix
        for number, progress in self.running.items():
            prefix = progress()
            if prefix is not None:
                prefixes[number] = prefix

        partial: dict[str, Any] = {}
        for number, prefix in prefixes.items():
            partial[str(number)] = _PREFIX.dump_python(prefix, mode="json", by_alias=True)
        return {"ended": ended, "begun": partial, "dropped": dropped}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> GroupRecord:
        """Return the record with this :meth:`state`."""
        record = cls()
        for number, trajectory in state["ended"].items():
            record.ended[int(number)] = _TRAJECTORY.validate_python(trajectory)
        for number, reason in state["dropped"].items():
            record.ended[int(number)] = DropReason(reason)
        for number, prefix in state["begun"].items():
            record.partial[int(number)] = _PREFIX.validate_python(prefix)
        return record


def continued(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the members that a resumed run continues.

    ``state`` is a :meth:`GroupRecord.state`.
    """
    return [int(number) for number in [*state["ended"], *state["begun"]]]


def _is_plain(trajectory: Trajectory) -> bool:
    """Return whether JSON can hold a trajectory, and it is its episode's only one."""
    if trajectory.role is not None or trajectory.segments:
        return False
    if trajectory.multi_modal or any(call.media for call in trajectory.tool_calls):
        return False
    return not any(turn.output.routed_experts for turn in trajectory.turns)


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    """A group while its trajectories run.

    Attributes:
        group_id, row, group_size, sampling: see :meth:`RolloutCollector.collect_one`.
        seed_parts: what its randomness derives from: the run's seed, label, step and index.
        record: what its members have sampled.
        waves: the outcomes so far.
        started: ids of the trajectories that were started.
        dropped: members lost, by reason.
        frozen: trajectories of roles that are not trained.
    """

    group_id: str
    row: Mapping[str, Any]
    group_size: int
    sampling: SamplingParams
    seed_parts: tuple[int | str, ...]
    record: GroupRecord
    waves: list[list[Outcome]] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    dropped: Counter[DropReason] = field(default_factory=Counter)
    frozen: list[Trajectory] = field(default_factory=list)

    def member_id(self, number: int) -> str:
        """Return the id of the member that was started as number ``number``, from 0."""
        return f"{self.group_id}-{number}"

    @property
    def outcomes(self) -> list[Outcome]:
        outcomes = []
        for wave in self.waves:
            outcomes += wave
        return outcomes

    def survivor(self, trajectory_id: str) -> Trajectory:
        """Return a surviving member."""
        for outcome in self.outcomes:
            if outcome.trajectory_id == trajectory_id and outcome.trajectory is not None:
                return outcome.trajectory
        raise KeyError(trajectory_id)


def trace_fields(result: Sequence[Trajectory] | DropReason) -> dict[str, Any]:
    """Return what the trace of a trajectory shows of its end.

    With several roles, that is the first trajectory's end, and every reward.
    """
    if isinstance(result, DropReason):
        return {"dropped": str(result)}
    first = result[0]
    fields: dict[str, Any] = {
        "agent_name": first.agent_name,
        "finish_reason": str(first.finish_reason),
        "reward": first.reward,
        "turns": first.num_turns,
        "sampled_tokens": sum(trajectory.num_sampled for trajectory in result),
        "messages": [{"role": m["role"], "content": m.get("content")} for m in first.messages],
    }
    if first.role:
        fields["rewards"] = {str(trajectory.role): trajectory.reward for trajectory in result}
    return fields


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """Time limits in seconds.

    Attributes:
        trajectory_timeout: maximum of one trajectory, its reward included; None: unlimited.
        min_group_size: surviving members with which a group is complete after ``group_timeout``;
            None: all have to end.
        group_timeout: since the last member started.
    """

    trajectory_timeout: float | None = None
    min_group_size: int | None = None
    group_timeout: float = 0.0


NO_LIMITS = TimeLimits()


class GroupDeadlines:
    """The time limits of the trajectories of one wave of a group.

    Args:
        members: number of trajectories that will start.
    """

    def __init__(self, limits: TimeLimits, members: int) -> None:
        self._limits = limits
        self._not_started = members
        self._survived = 0
        self._running: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._overdue = False  # group_timeout is over
        self._cut = False  # the stragglers were stopped

    async def limit(self, run: Coroutine[Any, Any, T]) -> T:
        """Run one member, and return its result: it has survived.

        Raises:
            TrajectoryTimeoutError, StragglerError: it was stopped.
        """
        deadline = asyncio.timeout(self._limits.trajectory_timeout)
        try:
            async with deadline:
                self._running.add(deadline)
                self._start()
                result = await run
        except TimeoutError:
            if not deadline.expired():
                raise
            raise self._timeout_error() from None
        finally:
            self._running.discard(deadline)
        self._survived += 1
        self._cut_stragglers()
        return result

    def recall(self, *, survived: bool) -> None:
        """Count a member that had ended before the run was resumed."""
        if survived:
            self._survived += 1
        self._start()

    def close(self) -> None:
        """Stop the clock; all members have ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _timeout_error(self) -> TrajectoryError:
        """Return the error of a member that was stopped."""
        limits = self._limits
        if self._cut:
            return StragglerError(
                f"rollout.min_group_size={limits.min_group_size} others had ended after"
                f" rollout.group_timeout={limits.group_timeout:g} s"
            )
        return TrajectoryTimeoutError(
            f"it ran past rollout.trajectory_timeout={limits.trajectory_timeout:g} s"
        )

    def _start(self) -> None:
        self._not_started -= 1
        if self._not_started == 0 and self._limits.min_group_size is not None:
            self._timer = asyncio.get_running_loop().call_later(
                self._limits.group_timeout, self._time_out
            )

    def _time_out(self) -> None:
        self._overdue = True
        self._cut_stragglers()

    def _cut_stragglers(self) -> None:
        """Stop what still runs, once the group is overdue and enough members have survived."""
        min_group_size = self._limits.min_group_size
        if self._cut or not self._overdue or min_group_size is None:
            return
        if self._survived < min_group_size:
            return
        self._cut = True
        now = asyncio.get_running_loop().time()
        for deadline in self._running:
            if not deadline.expired():
                deadline.reschedule(now)


@dataclass(kw_only=True)
class _Growing:
    """A group's task, and the reason if it is stopped."""

    task: asyncio.Task[None] | None = None
    reason: DropReason = DropReason.CANCELLED


Draw = Callable[[], tuple[int, Any]]
Grow = Callable[[Ticket, Any, Callable[[], DropReason]], Awaitable[Group]]
Drop = Callable[[Group, DropReason], None]


class GroupStream:
    """Groups that run concurrently and flow to the learner as they complete.

    It wraps the buffer in coroutines::

        draw ──► buffer.admit ──► a task per group ──► buffer.complete ──► take ──► learner
        (rows)        ▲             grow: engine,                                      │
                      │             tools, rewards                                     │
                      └──────────── room: finish_step, discard ◄───────────────────────┘

                              consumes          produces           waits for
        grow (one per group)  a ticket          a complete group   engine, tools, reward
        take                  complete groups   a batch            enough of them
        idle                  nothing           nothing            the last task

    Whatever makes room starts groups at once; no coroutine polls. An error outside a trajectory
    ends the stream: every ``take`` and ``idle`` raises it. Use it from one event loop.

    Args:
        draw: returns the next group's number and row.
        grow: runs the group of a ticket and a row. If cancelled, it drops what it had started with
            the reason that its third argument returns.
        drop: drops the members of a complete group.
    """

    def __init__(self, buffer: RolloutBuffer, *, draw: Draw, grow: Grow, drop: Drop) -> None:
        self.buffer = buffer
        self._draw = draw
        self._grow = grow
        self._drop = drop
        self._num_wanted = 0
        self._closed = False
        self._growing: dict[int, _Growing] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    def want(self, count: int) -> None:
        """Start ``count`` groups, and the buffer's oversampled ones, as far as there is room.

        The ``count`` groups will be taken.
        """
        self._num_wanted = count
        self._fill()

    async def take(self, count: int) -> dict[int, Group]:
        """Return the next batch, by number; see :meth:`RolloutBuffer.take`.

        Raises:
            RuntimeError: the stream was closed.
        """
        while not self._closed:
            self._check()
            groups = self.buffer.take(count)
            if groups is not None:
                self._num_wanted -= len(groups)
                return groups
            await self._changed.wait()
        raise RuntimeError("the stream of groups is closed")

    async def idle(self) -> None:
        """Wait until no group is running."""
        while self._growing:
            self._check()
            await self._changed.wait()
        self._check()

    def discard(self, numbers: Collection[int], reason: DropReason) -> None:
        """Discard groups (see :meth:`RolloutBuffer.discard`), and start others in their place."""
        self.buffer.discard(numbers, reason)
        self.want(self._num_wanted + len(numbers))

    def finish_step(self, version: int, *, want: int) -> None:
        """Finish a step, drop what is too old, and start ``want`` groups.

        See :meth:`RolloutBuffer.finish_step`.
        """
        expired = self.buffer.finish_step(version)
        if self._closed:  # all are stopped and dropped
            return
        for group in expired.ready.values():
            self._drop(group, DropReason.STALE)
        for number in expired.running:
            self._stop(self._growing.pop(number), DropReason.STALE)
        self.want(want)

    async def close(self) -> None:
        """Stop everything for good, drop it as cancelled, and wait until it has stopped.

        In the buffer these groups stay open, so that its state names what a resumed run has to
        start again.
        """
        if not self._closed:
            self._closed = True
            for growing in self._growing.values():
                self._stop(growing, DropReason.CANCELLED)
            self._growing.clear()
            for group in self.buffer.ready_groups:
                self._drop(group, DropReason.CANCELLED)
            self._notify()
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def _fill(self) -> None:
        """Start groups as far as they are wanted and there is room."""
        buffer = self.buffer
        limit = 0
        if self._num_wanted and not self._closed:
            limit = self._num_wanted + buffer.oversample
        while buffer.room and buffer.running + buffer.ready < limit:
            number, row = self._draw()
            growing = _Growing()
            self._growing[number] = growing
            run = self._run(buffer.admit(number), row, growing)
            growing.task = asyncio.create_task(run, name=f"group-{number}")
        self._notify()

    async def _run(self, ticket: Ticket, row: Any, growing: _Growing) -> None:
        try:
            group = await self._grow(ticket, row, lambda: growing.reason)
        except Exception as error:
            # Outside a trajectory: raised to the caller that waits for groups.
            self._error = self._error or error
            self._growing.pop(ticket.number, None)
            self._notify()
            return

        if self._growing.pop(ticket.number, None) is not growing:
            self._drop(group, growing.reason)  # it completed at the moment it was stopped
        elif not self.buffer.complete(ticket.number, group):
            self._drop(group, DropReason.STALE)
            self._fill()
        self._notify()

    def _stop(self, growing: _Growing, reason: DropReason) -> None:
        growing.reason = reason
        if growing.task is not None and not growing.task.done():
            growing.task.cancel()
            self._stopping.add(growing.task)
            growing.task.add_done_callback(self._stopping.discard)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
