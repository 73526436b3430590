"""The asynchronous trainers: groups flow out of a stream, and the learner takes them in batches.

::

    rows ─► GroupStream: many groups grow ─► take_batch ─► base: select, update, publish, record
                 ▲    (engine, agents, tools)     │ useless groups are replaced         │
                 │                                ▼ (algorithm.max_resample_rounds)     │
                 └────────────── room ◄───────── RolloutBuffer ◄── version + 1 ─────────┘

    grow        consumes: a ticket and a row.  produces: a group.  waits for: engine, tools, reward.
    take_batch  consumes: groups.              produces: a batch.  waits for: enough of them, not too old to wait.

    one_step_off   engine   [ rollout 1 ][ rollout 2   ]  [ rollout 3 ]    [ rollout 4
                   learner               [ learn 1 ]   ^  [ learn 2      ]^[ learn 3         ^ weights
                   sampled by         0             0              1               2

    fully_async    engine   [ groups grow, complete, others start in their place ............................. ]
                                 │ batch 1        ↑ 1  │ batch 2      ↑ 2   │ batch 3       ↑ 3        ↑ weights
                   learner       [ learn 1       ]     [ learn 2     ]      [ learn 3      ]

The subclasses decide when groups are wanted and how weights are handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jax_agent_rl.collect.buffer import RolloutBuffer, Ticket
from jax_agent_rl.collect.filters import Selection, select
from jax_agent_rl.collect.groups import GroupRecord, GroupStream, continued
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import BackendMetrics, Capabilities
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.record import staleness_record
from jax_agent_rl.trainer.step import RolloutBatch, all_trajectories, shaped, training_sampling
from jax_agent_rl.types import DropReason, Group, PauseMode

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
            oversample=config.trainer.oversample_prompts,
            version=self.record.step,
        )
        self._groups: dict[int, GroupRecord] = {}
        if self.record.buffer.get("version") == self.record.step:  # else the steps since were synchronous ones
            self._groups = {int(n): GroupRecord.restore(group) for n, group in self.record.in_flight.items()}
            buffer.restore(self.record.buffer, continued=self._groups)
        self.buffer = buffer
        # Of an engine in another process, every chunk would be a message.
        local = config.rollout.backend != "remote" and config.rollout.placement == "colocated"
        self.runtime.client.keeps_chunks = local
        self._stopped: tuple[dict[int, Any], frozenset[str]] | None = None
        self.stream = GroupStream(buffer, draw=self.runtime.cursor.draw, grow=self._grow, drop=self._drop)
        self._reading: tuple[BackendMetrics, float] | None = None

    def wanted_after(self, step: int) -> int:
        """Return how many groups the steps after this one will consume."""
        return (self.runtime.config.trainer.steps - step) * self.buffer.batch

    async def take_batch(self) -> RolloutBatch:
        """Return the groups of the next step, and what rollout and engines did since the last one was taken."""
        buffer, began = self.buffer, self.clock()
        self.progress.phase(
            f"step {self.record.step + 1}: rollout",
            lambda: f"{buffer.ready}/{buffer.batch} groups ready, {buffer.running} running",
        )
        self._reading = self._reading or (await self.runtime.metrics(), began)
        with self.phases.measure("wait"):
            groups = await self._take_useful()
        self.learner_idle_seconds += self.clock() - began
        # From one batch to the next: rollout and learner (and an evaluation, if there was one) share that time.
        before, since = self._reading
        self._reading = await self.runtime.metrics(), self.clock()
        engine, seconds = self._reading[0].since(before), self._reading[1] - since
        self.phases.ended("engine", seconds)
        overlap = staleness_record(groups, buffer.version) | {
            "groups_running": buffer.running,
            "groups_ready": buffer.ready,
            "groups_stale": buffer.dropped[DropReason.STALE],
        }
        return RolloutBatch(groups=groups, engine=engine, seconds=seconds, metrics=overlap)

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
        self._stopped = self._stopped or self._in_flight()
        await self.stream.close()

    def save(self) -> None:
        """Save the open groups beside the learner's state: a resumed run draws their rows first and continues them."""
        groups, in_flight = self._stopped or self._in_flight()
        groups = {number: group for number, group in groups.items() if number in self.buffer.kept and continued(group)}
        self.record.in_flight = {str(number): group for number, group in groups.items()}
        self.record.buffer = self.buffer.state()
        self.record.cursor = self.runtime.cursor.state(again=self.buffer.open)
        members = {f"{self._group_id(number)}-{n}" for number, group in groups.items() for n in continued(group)}
        self.continued = len(members & in_flight)
        super().save()

    def on_step_end(self, version: int) -> None:
        """Make room for what the next steps consume."""
        self.stream.finish_step(version, want=self.wanted_after_publishing(version))
        self._groups = {number: record for number, record in self._groups.items() if number in self.buffer.kept}

    def wanted_after_publishing(self, version: int) -> int:
        """Return how many groups to start as soon as a version is served."""
        return self.wanted_after(version)

    def _in_flight(self) -> tuple[dict[int, Any], frozenset[str]]:
        """Return what the open groups have sampled, by number, and the ids of the trajectories in flight."""
        groups = {number: record.state() for number, record in self._groups.items()}
        return groups, self.runtime.collector.accounting.in_flight

    def _group_id(self, number: int) -> str:
        step, index = divmod(number, self.buffer.batch)
        return f"{LABEL}-{step}-{index}"

    async def _grow(self, ticket: Ticket, row: Any, why_stopped: Callable[[], DropReason]) -> Group:
        """Collect one group with shaped rewards and, for ReMax, the reward of a greedy rollout."""
        config, sampling = self.runtime.config, training_sampling(self.runtime.config)
        step, index = divmod(ticket.number, self.buffer.batch)
        collect = functools.partial(
            self.runtime.collector.collect_one, row, step=step, index=index, why_stopped=why_stopped
        )
        record = self._groups.setdefault(ticket.number, GroupRecord())
        group = await collect(group_size=config.rollout.group_size, sampling=sampling, label=LABEL, record=record)
        try:
            self.runtime.client.require_server()  # else what was lost would look like the policy's failure
            if config.algorithm.adv_estimator != "remax":
                return shaped(group, config)
            greedy = await collect(group_size=1, sampling=replace(sampling, temperature=0.0), label=f"greedy-{LABEL}")
        except BaseException:
            self._drop(group, why_stopped())
            raise
        self._drop(greedy, DropReason.GREEDY)
        return shaped(group, config, greedy)

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


class OneStepOffTrainer(StreamTrainer):
    """The next batch is rolled out while this one is learned from.

    Weights change only between rollouts, so a trajectory is of one version, the one before the weights it trains:
    staleness is 1 (0 in the first step). It needs nothing of the engine that the synchronous trainer does not. A step
    lasts as long as the slower of the two.
    """

    async def rollout(self) -> RolloutBatch:
        batch = self.buffer.batch
        self.stream.want(batch)
        collected = await self.take_batch()
        self.stream.want(min(batch, self.wanted_after(self.record.step + 1)))
        return collected

    async def publish(self, version: int, selection: Selection) -> float:
        """Publish once the next batch is complete."""
        began = self.clock()
        self.progress.phase(f"step {version}: learner waits for the next rollout", self.rollout_status)
        with self.phases.measure("wait"):
            await self.stream.idle()
        self.learner_idle_seconds += self.clock() - began
        return await self.push_weights(version)

    def wanted_after_publishing(self, version: int) -> int:
        return 0


PAUSES: dict[str, PauseMode | None] = {
    "auto": None,
    "keep": PauseMode.KEEP,
    "recompute": PauseMode.ABORT,
    "wait": PauseMode.WAIT,
}


class FullyAsyncTrainer(StreamTrainer):
    """Rollout never stops, and the learner takes a batch when there is one.

    Weights change under running generations: one trajectory may hold tokens of several versions, each marked with its
    own. How old a token may be when it is trained on, and so how far the rollout runs ahead, is the buffer's decision
    (:mod:`jax_agent_rl.collect.buffer`). Every step publishes, also one that learned nothing: a version is a step.

    Raises:
        ConfigError: an engine cannot do what ``trainer.in_flight_update`` asks for.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = self.runtime.config.trainer.in_flight_update
        for server in self.runtime.client.servers:
            can = [name for name in PAUSES if _supports(server.backend.capabilities, name)]
            if wanted not in can:
                raise ConfigError(f"trainer.in_flight_update={wanted}: {server.name} can do only {', '.join(can)}")
        self._pause = PAUSES[wanted]

    async def rollout(self) -> RolloutBatch:
        self.stream.want(self.wanted_after(self.record.step))
        return await self.take_batch()

    async def publish(self, version: int, selection: Selection) -> float:
        """Publish at once, whatever runs."""
        return await self.push_weights(version, mode=self._pause)


def _supports(capabilities: Capabilities, name: str) -> bool:
    pause = PAUSES[name]
    if pause is PauseMode.KEEP and not capabilities.in_flight_update:
        return False
    return pause is None or pause in capabilities.pause_modes
