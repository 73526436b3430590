"""The base of the asynchronous trainers: groups flow out of a stream, and the learner takes them in batches.

::

    rows ─► GroupStream: many groups grow ─► take_batch ─► base: filter, learn, publish_weights, record_step
                 ▲    (engine, agents, tools)     │ useless groups are replaced           │
                 │                                ▼ (algorithm.max_resample_rounds)               │
                 └────────────── room ◄───────── RolloutBuffer ◄── version + 1 ───────────┘

    grow        consumes: a ticket and a row.  produces: a group.    waits for: engine, tools, reward.
    take_batch  consumes: groups.              produces: Collected.  waits for: enough of them, not too old to wait.

The subclasses say when groups are wanted and how weights are handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax_agent_rl.collect.buffer import RolloutBuffer, Ticket
from jax_agent_rl.collect.filters import select
from jax_agent_rl.collect.stream import GroupStream
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.trainer.base import Collected, Trainer
from jax_agent_rl.trainer.groups import all_trajectories, shaped, training_sampling, with_baseline
from jax_agent_rl.trainer.record import staleness_record
from jax_agent_rl.types import DropReason, Group

LABEL = "async"
"""Of trajectory ids: ``async-<s>-<i>-<member>`` is of the run's row number s * batch + i, in whichever step it is
trained on."""


class StreamTrainer(Trainer):
    """A trainer whose groups come from a stream; see :class:`Trainer`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.runtime.config
        buffer = RolloutBuffer(
            batch=config.rollout.prompts_per_step,
            staleness=config.trainer.staleness_bound,
            stragglers=config.trainer.stragglers,
            spare=config.trainer.oversample_prompts,
            version=self.record.step,
        )
        if self.record.buffer.get("version") == self.record.step:  # else the steps since were synchronous ones
            buffer.restore(self.record.buffer)
        self.buffer = buffer
        self.stream = GroupStream(buffer, draw=self.runtime.cursor.draw, grow=self._grow, drop=self._drop)
        self._reading: tuple[BackendMetrics, float] | None = None

    def wanted_after(self, step: int) -> int:
        """Return how many groups the steps after this one will consume."""
        return (self.runtime.config.trainer.steps - step) * self.buffer.batch

    async def take_batch(self) -> Collected:
        """Return the groups of the next step, and what rollout and engines did since the last one was taken."""
        buffer, began = self.buffer, self.clock()
        self.progress.phase(
            f"step {self.record.step + 1}: rollout",
            lambda: f"{buffer.ready}/{buffer.batch} groups ready, {buffer.running} running",
        )
        self._reading = self._reading or (await self.runtime.metrics(), began)
        with self.phases.of("wait"):
            groups = await self._take_useful()
        self.learner_idle_seconds += self.clock() - began
        # From one batch to the next: rollout and learner (and an evaluation, if there was one) share that time.
        engine, seconds = await self._engine_since(*self._reading)
        overlap = staleness_record(groups, buffer.version) | {
            "groups_running": buffer.running,
            "groups_ready": buffer.ready,
            "groups_stale": buffer.dropped[DropReason.STALE],
        }
        return Collected(groups=groups, engine=engine, seconds=seconds, metrics=overlap)

    async def _take_useful(self) -> list[Group]:
        """Return a batch; groups that a filter leaves out are replaced first.

        After ``algorithm.max_resample_rounds`` rounds useless ones stay in the batch.
        """
        groups: dict[int, Group] = {}
        useless: Mapping[int, DropReason] = {}
        for _ in range(1 + self.runtime.config.algorithm.max_resample_rounds):
            for number, reason in useless.items():
                self.stream.discard([number], reason)
            missing = self.buffer.batch - self.buffer.taken
            if not missing:
                break
            new = await self.stream.take(missing)
            self._guard.check(list(new.values()), self.runtime.collector.latest_losses)
            useless = self._useless(new)
            groups |= new
        return [groups[number] for number in sorted(groups)]

    def rollout_status(self) -> str:
        return f"; {self.buffer.ready} groups ready, {self.buffer.running} running"

    async def stop_rollouts(self) -> None:
        await self.stream.close()

    def save(self) -> None:
        """Save the open groups beside the learner's state: a resumed run draws their rows first."""
        self.record.buffer = self.buffer.state()
        self.record.cursor = self.runtime.cursor.state(again=self.buffer.open)
        super().save()

    async def _grow(self, ticket: Ticket, row: Any, why_stopped: Callable[[], DropReason]) -> Group:
        """Collect one group with shaped rewards and, for ReMax, the reward of a greedy rollout."""
        config, sampling = self.runtime.config, training_sampling(self.runtime.config)
        step, index = divmod(ticket.number, self.buffer.batch)
        collect = functools.partial(
            self.runtime.collector.collect_one, row, step=step, index=index, why_stopped=why_stopped
        )
        group = await collect(group_size=config.rollout.group_size, sampling=sampling, label=LABEL)
        group = shaped(group, config)
        try:
            self.runtime.client.require_server()  # else what was lost would look like the policy's failure
            if config.algorithm.adv_estimator != "remax":
                return group
            greedy = await collect(group_size=1, sampling=replace(sampling, temperature=0.0), label=f"greedy-{LABEL}")
        except BaseException:
            self._drop(group, why_stopped())
            raise
        self._drop(greedy, DropReason.GREEDY)
        return with_baseline(group, shaped(greedy, config))

    def _drop(self, group: Group, reason: DropReason) -> None:
        self.runtime.collector.accounting.drop([t.trajectory_id for t in all_trajectories([group])], reason)

    def _useless(self, groups: Mapping[int, Group]) -> dict[int, DropReason]:
        """Return the groups that the filters leave out, each with a reason. The step counts their members."""
        reasons: dict[int, DropReason] = {}
        for number, group in groups.items():
            selection = select([group], self.runtime.config.algorithm)
            if not selection.groups:
                reasons[number] = next(iter(selection.dropped or group.dropped))
        return reasons

    async def _engine_since(self, before: BackendMetrics, begin: float) -> tuple[BackendMetrics, float]:
        """Return what the engines did since a reading, and the seconds since; replace the reading."""
        now, end = await self.runtime.metrics(), self.clock()
        self._reading = now, end
        return now.since(before), end - begin
