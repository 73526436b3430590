"""Runs the trajectories of a step, a group per row.

::

    rows ─► a task per group ─► strategy.next_wave ─► a task per trajectory ─► reward ─► outcome ─┐
                 │                      ▲              waits for a slot        │                  │
                 │                      │              (max_in_flight), then   └─ any failure:    │
                 │                      │              EpisodeRequest ─► agent    counted by its  │
                 │ no further wave      │                                         reason, others  │
                 ▼                      └─────────────── all outcomes of the wave ── go on ◄──────┘
              caller

                consumes          produces     waits for
    trajectory  a slot            an outcome   the engine, tools, the reward; no longer than its
                                               deadline (``groups``)
    group       outcomes          waves        the slowest member of the wave
    collect     complete groups   groups       all of them; ``arrived`` has each at once
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any

from jax_agent_rl.agents import (
    AgentContext,
    AgentLoop,
    AgentSelector,
    EpisodeRequest,
    Prefix,
    derive_seed,
    role_id,
)
from jax_agent_rl.collect.accounting import Accounting
from jax_agent_rl.collect.groups import (
    NO_LIMITS,
    GroupDeadlines,
    GroupRecord,
    OpenGroup,
    TimeLimits,
    trace_fields,
)
from jax_agent_rl.collect.priority_semaphore import PrioritySemaphore
from jax_agent_rl.collect.strategies import Chains, Growth, Outcome, Start, Strategy
from jax_agent_rl.errors import ConfigError, ReplayError, TrajectoryError
from jax_agent_rl.tracing import NO_SPAN, NoSpan, OpenSpan, Tracer, span
from jax_agent_rl.types import DropReason, Group, SamplingParams, Trajectory
from jax_agent_rl.utils.failures import describe_error, error_place, raised_by_user
from jax_agent_rl.utils.loop_watch import at_work
from jax_agent_rl.utils.tasks import gather_or_cancel

Score = Callable[[Trajectory], Awaitable[Trajectory]]
"""Returns the trajectory with its reward, e.g. :func:`jax_agent_rl.rewards.score`."""


class RolloutCollector:
    """Collects groups of scored trajectories.

    Args:
        context: shared by the agent loops.
        max_in_flight: maximum concurrent trajectories.
        seed: the run's seed. With it, the label, the step and the indices, sampling is
            reproducible.
        accounting: where trajectories are counted; a new one if None. Evaluation needs its own.
        strategy: which trajectories of a group are started, and from where; None: all from the
            prompt.
        limits: time limits of trajectories and groups.
        tracer: traces trajectories; None traces none.
        validate: mark traces as evaluations.

    Attributes:
        latest_losses: message of the newest loss, by reason.
    """

    def __init__(
        self,
        context: AgentContext,
        *,
        score: Score,
        max_in_flight: int,
        seed: int,
        accounting: Accounting | None = None,
        strategy: Strategy | None = None,
        limits: TimeLimits = NO_LIMITS,
        tracer: Tracer | None = None,
        validate: bool = False,
    ):
        self._strategy = strategy or Chains()
        if self._strategy.branches:
            context = replace(context, keep_sessions=True)
        self.accounting = accounting or Accounting()
        self.latest_losses: dict[DropReason, str] = {}
        self._client = context.client
        self._context = context
        self._agents = AgentSelector(context)
        self._score = score
        self._slots = PrioritySemaphore(max_in_flight)
        self._seed = seed
        self._limits = limits
        self._tracer = tracer
        self._validate = validate

    async def close(self) -> None:
        """Close the agent loops; nothing may be running."""
        await self._agents.close()

    async def preflight(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check what the loops of these rows depend on, once before a run; raise ConfigError."""
        await self._agents.preflight(rows)

    def require_branching(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check that the strategy can branch what the loops of these rows make.

        Raises:
            ConfigError: it cannot.
        """
        if self._strategy.branches:
            self._agents.require_branching(rows)

    async def collect(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        label: str = "train",
        arrived: Callable[[Group], None] = lambda group: None,
    ) -> list[Group]:
        """Collect one group per row, in the order of the rows; members are in order of their start.

        A group may have lost members (``Group.dropped``), even all of them. Its trajectories stay
        in flight in :attr:`accounting` until the caller resolves them. Cancelling this stops
        everything, and counts what is in flight then as ``CANCELLED``.

        Args:
            rows: one prompt each.
            group_size: trajectories per row, for strategies that leave it open.
            sampling: for every turn; each trajectory gets a seed of its own.
            step: training step, part of the ids and seeds.
            label: distinguishes uses in one step (``train``, ``eval``); part of the ids and seeds.
            arrived: called with each group as soon as it is complete. Training must not depend on
                the order of completion.

        Raises:
            ValueError: ``group_size`` < 1, or trajectories of this label and step are still in
                flight.
        """
        complete: dict[int, Group] = {}

        async def collect_row(index: int, row: Mapping[str, Any]) -> None:
            complete[index] = await self.collect_one(
                row, group_size=group_size, sampling=sampling, step=step, index=index, label=label
            )
            arrived(complete[index])

        # In order, so that a group's members run together and share their prompt in the engine.
        try:
            await gather_or_cancel(collect_row(index, row) for index, row in enumerate(rows))
        except BaseException:
            for group in complete.values():
                ids = {trajectory.trajectory_id for trajectory in group.trajectories}
                self.accounting.drop(ids & self.accounting.in_flight, DropReason.CANCELLED)
            raise
        return [complete[index] for index in range(len(rows))]

    async def collect_one(
        self,
        row: Mapping[str, Any],
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        index: int,
        label: str = "train",
        record: GroupRecord | None = None,
        why_stopped: Callable[[], DropReason] = lambda: DropReason.CANCELLED,
    ) -> Group:
        """Collect one group, as :meth:`collect` does.

        This is for callers that start groups one by one; all of them share the slots.

        Args:
            index: takes the place of the row's index in :meth:`collect`.
            record: keeps what the members sample, and holds what is continued of an interrupted
                run; not with a strategy that branches.
            why_stopped: called when this is cancelled; returns the reason for dropping what was
                started.
        """
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: must be >= 1")
        group = OpenGroup(
            group_id=f"{label}-{step}-{index}",
            row=row,
            group_size=group_size,
            sampling=sampling,
            seed_parts=(self._seed, label, step, index),
            record=record or GroupRecord(),
        )
        if self.accounting.is_open(group.group_id):
            raise ValueError(
                f"{label} trajectories of step {step} are still in flight: group {group.group_id}"
            )
        growth = Growth(group_size=group_size, seed=derive_seed(*group.seed_parts))
        started = 0
        try:
            while starts := self._strategy.next_wave(growth):
                with closing(GroupDeadlines(self._limits, len(starts))) as deadlines:
                    tasks = []
                    async with asyncio.TaskGroup() as wave:
                        for start in starts:
                            member = self._run(group, started, start, deadlines)
                            tasks.append(wave.create_task(member))
                            started += 1
                group.waves.append([task.result() for task in tasks])
                growth = replace(growth, waves=tuple(group.waves))
            return self._close(group, self._strategy.select(growth))
        except BaseException:
            self.accounting.drop(group.started & self.accounting.in_flight, why_stopped())
            raise
        finally:
            if self._strategy.branches:  # until here, others might have branched from any of them
                for number in range(started):
                    self._client.end_session(group.member_id(number))
                    self._context.environments.snapshots.forget(group.member_id(number))

    def _close(self, group: OpenGroup, selected: Sequence[Trajectory]) -> Group:
        """Return the complete group; count what the strategy did not select."""
        selected_ids = {trajectory.trajectory_id for trajectory in selected}
        surplus = []
        branches = 0
        topped_up = 0
        for outcome in group.outcomes:
            if outcome.start.fork is not None:
                branches += 1
            if outcome.start.topped_up:
                topped_up += 1
            for trajectory in outcome.trajectories:
                if trajectory.trajectory_id not in selected_ids:
                    surplus.append(trajectory.trajectory_id)

        if surplus:
            self.accounting.drop(surplus, DropReason.NOT_SELECTED)
            group.dropped[DropReason.NOT_SELECTED] += len(surplus)

        metrics = {}
        if self._strategy.branches:
            metrics = {"branches": float(branches), "topped_up": float(topped_up)}
        return Group(
            group_id=group.group_id,
            trajectories=tuple(sorted(selected, key=_number)),
            dropped=dict(group.dropped),
            metrics=metrics,
            frozen=tuple(sorted(group.frozen, key=_number)),
        )

    async def _run(
        self, group: OpenGroup, number: int, start: Start, deadlines: GroupDeadlines
    ) -> Outcome:
        """Run one member of a group; count it if it is lost."""
        trajectory_id = group.member_id(number)
        record = group.record
        recorded = record.ended.get(number)
        if recorded is not None:
            deadlines.recall(survived=isinstance(recorded, Trajectory))
            return self._recall(group, trajectory_id, start, recorded)

        result: tuple[Trajectory, ...] | DropReason
        with self._traced(group, number) as trace:
            async with AsyncExitStack() as slot:
                with span("wait", "slot"):
                    await slot.enter_async_context(self._slots.take(urgency=len(group.waves)))
                self.accounting.start(trajectory_id)
                group.started.add(trajectory_id)
                record.running[number] = lambda: self._progress(group, number)
                try:
                    result = await deadlines.limit(self._play(group, number, start))
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise  # counted by collect_one, with everything that was started
                    result = self._report_loss(trajectory_id, error)
                except Exception as error:
                    result = self._report_loss(trajectory_id, error)
            if trace:
                trace.set(**trace_fields(result))
        record.running.pop(number)

        if isinstance(result, DropReason):
            record.ended[number] = result
            self.accounting.drop([trajectory_id], result)
            group.dropped[result] += 1
            return Outcome(trajectory_id=trajectory_id, start=start, trajectories=())

        if len(result) == 1:  # a checkpoint does not hold episodes of several roles
            record.ended[number] = result[0]
        trained = []
        for trajectory in result:
            if self._context.is_trained(trajectory.role):
                trained.append(trajectory)
            else:
                group.frozen.append(trajectory)
        trained_ids = [trajectory.trajectory_id for trajectory in trained]
        self.accounting.split(trajectory_id, trained_ids)
        group.started.update(trained_ids)
        return Outcome(trajectory_id=trajectory_id, start=start, trajectories=tuple(trained))

    def _recall(
        self, group: OpenGroup, trajectory_id: str, start: Start, recorded: Trajectory | DropReason
    ) -> Outcome:
        """Return the outcome of a member that had ended before the run was interrupted."""
        if isinstance(recorded, DropReason):
            group.dropped[recorded] += 1
            return Outcome(trajectory_id=trajectory_id, start=start, trajectories=())

        self.accounting.start(trajectory_id)
        group.started.add(trajectory_id)
        trajectory = replace(
            recorded, row=group.row, trajectory_id=trajectory_id, group_id=group.group_id
        )
        return Outcome(trajectory_id=trajectory_id, start=start, trajectories=(trajectory,))

    def _progress(self, group: OpenGroup, number: int) -> Prefix | None:
        """Return what a running member can go on from.

        That is what it has now, or what it had in an earlier process.
        """
        prefix = None
        episode = self._context.episodes.get(group.member_id(number))
        if episode is not None:
            if self._agents.for_row(group.row).branching_problem(group.row) is None:
                prefix = episode.progress()
        if prefix is None:
            prefix = group.record.partial.get(number)
        return prefix

    def _traced(self, group: OpenGroup, number: int) -> AbstractContextManager[OpenSpan | NoSpan]:
        if self._tracer is None:
            return NO_SPAN
        _, _, step, sample = group.seed_parts
        return self._tracer.trajectory(
            trajectory_id=group.member_id(number),
            group_id=group.group_id,
            group_size=group.group_size,
            step=int(step),
            sample=int(sample),
            rollout=number,
            validate=self._validate,
        )

    async def _play(self, group: OpenGroup, number: int, start: Start) -> tuple[Trajectory, ...]:
        """Let the row's agent play one member, and return its scored trajectories, one per role."""
        start_time = time.perf_counter()
        loop = self._agents.for_row(group.row)
        request = self._request(group, number, start, loop)
        try:
            try:
                with _named(loop):
                    result = await loop.play(request)
            except ReplayError as error:
                if start.fork is not None or request.prefix is None:
                    raise
                # An earlier process had begun it, and its tools answer otherwise now.
                self._context.failures.report(
                    "starts again, as it cannot be continued",
                    f"{request.trajectory_id} starts again, as it cannot be continued: {error}",
                )
                del group.record.partial[number]
                with _named(loop):
                    result = await loop.play(replace(request, prefix=None))
            finally:
                # Roles do not branch: nothing goes on from their contexts while they are scored.
                for role in loop.roles:
                    client = self._context.client_of(role)
                    client.end_session(role_id(request.trajectory_id, role))

            if isinstance(result, Trajectory):
                result = [replace(result, fork=start.fork)]
            self._check_episode(request.trajectory_id, result)
            scored = [await self._scored(trajectory) for trajectory in result]
        finally:
            if not self._strategy.branches:
                self._client.end_session(request.trajectory_id)
        seconds = time.perf_counter() - start_time

        timed = []
        for trajectory in scored:
            metrics = {**trajectory.metrics, "total_seconds": seconds}
            timed.append(replace(trajectory, metrics=metrics))
        return tuple(timed)

    def _request(
        self, group: OpenGroup, number: int, start: Start, loop: AgentLoop
    ) -> EpisodeRequest:
        """Return what the agent has to play: from the prompt, from a fork or where it left off."""
        trajectory_id = group.member_id(number)
        fork = start.fork
        prefix = None
        if fork is not None and not fork.at_prompt:
            problem = loop.branching_problem(group.row)
            if problem is not None:
                raise ConfigError(f"{problem}; set rollout.strategy.name=chain")
            self._client.fork_session(fork.parent_id, trajectory_id)
            prefix = Prefix.of(group.survivor(fork.parent_id), fork)
        elif number in group.record.partial and loop.branching_problem(group.row) is None:
            prefix = group.record.partial[number]

        seed = derive_seed(*group.seed_parts, number)
        return EpisodeRequest(
            row=group.row,
            trajectory_id=trajectory_id,
            group_id=group.group_id,
            sampling=replace(group.sampling, seed=seed),
            prefix=prefix,
        )

    def _report_loss(self, trajectory_id: str, error: BaseException) -> DropReason:
        """Report a lost trajectory, and return why it is lost.

        Further ones with the same reason and place in the code are only counted.
        """
        reason = DropReason.AGENT_ERROR
        cause: BaseException | None = error
        place = ""
        if isinstance(error, TrajectoryError):
            reason = error.drop_reason
            cause = error.__cause__
            message = str(error)
            place = error.failed_at
            if not place:
                place = raised_by_user(error)
                if place:
                    message = f"{message} ({place})"
        elif isinstance(error, asyncio.CancelledError):
            message = "a cancelled future was awaited"
        else:
            message = f"its agent raised {describe_error(error)}"
            place = error_place(error)

        self.latest_losses[reason] = message
        kind = f"dropped ({reason})"
        if place:
            kind += f" at {place}"
        self._context.failures.report(
            kind, f"{trajectory_id} dropped ({reason}): {message}", error=cause
        )
        return reason

    async def _scored(self, trajectory: Trajectory) -> Trajectory:
        with span("reward", str(trajectory.row.get("data_source") or "")) as scoring:
            trajectory = await self._score(trajectory)
            if scoring:
                scoring.set(reward=trajectory.reward, reward_parts=trajectory.reward_parts)
        return trajectory

    def _check_episode(self, episode_id: str, trajectories: Sequence[Trajectory]) -> None:
        """Raise TrajectoryError if an agent returned what it must not return."""
        ids = []
        expected_ids = []
        for trajectory in trajectories:
            ids.append(trajectory.trajectory_id)
            role = trajectory.role
            expected_ids.append(role_id(episode_id, role) if role else episode_id)
        if ids != expected_ids or len(set(ids)) != len(ids):
            raise TrajectoryError(
                f"{episode_id}: the agent returned {ids} and not {expected_ids}; return what it"
                " started, each role once"
            )

        roles = [trajectory.role for trajectory in trajectories]
        if not any(self._context.is_trained(role) for role in roles):
            raise TrajectoryError(
                f"{episode_id}: no role that is trained took a turn; these did: {roles}"
            )


def _named(loop: AgentLoop) -> AbstractContextManager[None]:
    """Name an agent that is not part of this package, in case it holds the event loop."""
    package = __name__.partition(".")[0]
    if type(loop).__module__.partition(".")[0] == package:
        return nullcontext()
    return at_work(f"agent {loop.name!r}")


def _number(trajectory: Trajectory) -> int:
    """Return the number of its episode in the group."""
    _, _, number = trajectory.episode_id.rpartition("-")
    return int(number)
