"""Runs the trajectories of a step and hands over each group as soon as it is complete.

::

    rows × group_size ──► one task each ──► agent.run ──► reward ──► its group ──last member──► queue ──► caller
                          waits for a slot                 │
                          (max_in_flight)                  └─ any failure: counted by its reason, the rest goes on

    task      consumes: a slot.            produces: a member.   waits for: the engine, tools, the reward.
    collect   consumes: complete groups.   produces: groups.     waits for: the slowest member of the next group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax_agent_rl.agents import AgentContext, AgentSelector, derive_seed
from jax_agent_rl.errors import TrajectoryError
from jax_agent_rl.rollout.accounting import Accounting
from jax_agent_rl.types import DropReason, Group, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

Score = Callable[[Trajectory], Awaitable[Trajectory]]
"""Returns the trajectory with its reward, e.g. :func:`jax_agent_rl.rewards.score`."""


@dataclass(kw_only=True, slots=True)
class _OpenGroup:
    """A group while its members are running."""

    group_id: str
    missing: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    dropped: Counter[DropReason] = field(default_factory=Counter)

    def close(self) -> Group:
        ordered = tuple(self.members[sample] for sample in sorted(self.members))
        return Group(group_id=self.group_id, trajectories=ordered, dropped=dict(self.dropped))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One trajectory to run."""

    trajectory_id: str
    sample: int
    row: Mapping[str, Any]
    group: _OpenGroup
    sampling: SamplingParams


class RolloutCollector:
    """Collects groups of scored trajectories.

    Args:
        context: what the agent loops share.
        score: scores one trajectory.
        max_in_flight: most trajectories that run at the same time.
        seed: the run's seed. With it, the label, the step and the indices, sampling is reproducible.
        accounting: where trajectories are counted; a new one if None. Evaluation wants its own.

    Attributes:
        latest_losses: for each reason, what the newest loss said.
    """

    def __init__(
        self,
        context: AgentContext,
        *,
        score: Score,
        max_in_flight: int,
        seed: int,
        accounting: Accounting | None = None,
    ):
        self.accounting = accounting or Accounting()
        self.latest_losses: dict[DropReason, str] = {}
        self._client = context.client
        self._agents = AgentSelector(context)
        self._score = score
        self._max_in_flight = max_in_flight
        self._seed = seed

    async def close(self) -> None:
        """Closes the agent loops; nothing may be running."""
        await self._agents.close()

    async def preflight(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Checks what the loops of these rows depend on, once before a run; raises ConfigError."""
        await self._agents.preflight(rows)

    async def collect(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        label: str = "train",
    ) -> AsyncGenerator[Group, None]:
        """Yields one group per row, in the order in which they are complete; members are in order of their index.

        A group may have lost members (``Group.dropped``), even all of them. Its trajectories stay in flight in
        :attr:`accounting` until the caller says what became of them. Leaving the loop early or cancelling it stops
        everything and counts what was not handed over as ``CANCELLED``; wrap it in :func:`contextlib.aclosing` so
        that this happens at once.

        Args:
            rows: one prompt each.
            group_size: trajectories per row.
            sampling: for every turn; each trajectory gets a seed of its own.
            step: training step, part of the ids and seeds.
            label: tells apart uses in one step (``train``, ``eval``), part of the ids and seeds.

        Raises:
            ValueError: ``group_size`` < 1, or trajectories of this label and step are still in flight.
        """
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: must be >= 1")
        slots = asyncio.Semaphore(self._max_in_flight)
        complete: asyncio.Queue[_OpenGroup] = asyncio.Queue()
        jobs = self._jobs(rows, group_size=group_size, sampling=sampling, step=step, label=label)
        undelivered = {job.trajectory_id for job in jobs}
        if clash := undelivered & self.accounting.in_flight:
            raise ValueError(f"{label} trajectories of step {step} are still in flight: {sorted(clash)[:3]}")
        tasks = [asyncio.create_task(self._run(job, slots, complete), name=job.trajectory_id) for job in jobs]
        try:
            for _ in rows:
                group = (await complete.get()).close()
                undelivered.difference_update(t.trajectory_id for t in group.trajectories)
                yield group
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.accounting.drop(undelivered & self.accounting.in_flight, DropReason.CANCELLED)

    def _jobs(
        self, rows: Sequence[Mapping[str, Any]], *, group_size: int, sampling: SamplingParams, step: int, label: str
    ) -> list[_Job]:
        """Group by group, so that the members of a group run together and share their prompt in the engine."""
        jobs = []
        for index, row in enumerate(rows):
            group = _OpenGroup(group_id=f"{label}-{step}-{index}", missing=group_size)
            for sample in range(group_size):
                seed = derive_seed(self._seed, label, step, index, sample)
                jobs.append(
                    _Job(
                        trajectory_id=f"{group.group_id}-{sample}",
                        sample=sample,
                        row=row,
                        group=group,
                        sampling=replace(sampling, seed=seed),
                    )
                )
        return jobs

    async def _run(self, job: _Job, slots: asyncio.Semaphore, complete: asyncio.Queue[_OpenGroup]) -> None:
        """Runs one trajectory and files it, or its loss, in its group."""
        group = job.group
        async with slots:
            self.accounting.start(job.trajectory_id)
            result = await self._run_or_reason(job)
        if isinstance(result, Trajectory):
            group.members[job.sample] = result
        else:
            self.accounting.drop([job.trajectory_id], result)
            group.dropped[result] += 1
        group.missing -= 1
        if group.missing == 0:
            complete.put_nowait(group)

    async def _run_or_reason(self, job: _Job) -> Trajectory | DropReason:
        """The scored trajectory, or why there is none. Only a cancellation of the task itself passes through."""
        began = time.perf_counter()
        try:
            loop = self._agents.for_row(job.row)
            trajectory = await loop.run(
                job.row, trajectory_id=job.trajectory_id, group_id=job.group.group_id, sampling=job.sampling
            )
            trajectory = await self._score(trajectory)
        except TrajectoryError as error:
            logger.warning("%s dropped (%s): %s", job.trajectory_id, error.drop_reason, error)
            self.latest_losses[error.drop_reason] = str(error)
            return error.drop_reason
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # counted by collect, as everything that was not handed over
            logger.exception("%s dropped: a cancelled future was awaited", job.trajectory_id)
            return DropReason.AGENT_ERROR
        except Exception as error:
            logger.exception("%s dropped: its agent loop raised", job.trajectory_id)
            self.latest_losses[DropReason.AGENT_ERROR] = f"{type(error).__name__}: {error}"
            return DropReason.AGENT_ERROR
        finally:
            self._client.end_session(job.trajectory_id)
        return replace(trajectory, metrics={**trajectory.metrics, "total_seconds": time.perf_counter() - began})
