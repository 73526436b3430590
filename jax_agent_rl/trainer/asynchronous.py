"""The asynchronous trainers: groups flow out of a stream, and the learner takes them in batches.

::

    rows ─► GroupStream: many groups grow ─► take_batch ─► base: select, update, publish, record
                 ▲    (engine, agents, tools)     │ useless groups are replaced         │
                 │                                ▼ (algorithm.max_resample_rounds)     │
                 └────────────── room ◄───────── RolloutBuffer ◄── version + 1 ─────────┘

    grow        consumes: a ticket and a row.  produces: a group.
                waits for: engine, tools, reward.
    take_batch  consumes: groups.              produces: a batch.
                waits for: enough of them, and none left behind that would become too old.

    one_step_off   engine   [ rollout 1 ][ rollout 2   ]  [ rollout 3 ]    [ rollout 4
                   learner               [ learn 1 ]   ^  [ learn 2      ]^[ learn 3
                   weights  0                          1                  2

    fully_async    engine   [ groups grow, complete, others start in their place ...........
                                 │ batch 1             │ batch 2            │ batch 3
                   learner       [ learn 1       ]     [ learn 2     ]      [ learn 3
                   weights  0                     1                   2

The subclasses decide when groups are wanted and how weights are handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.collect.buffer import RolloutBuffer, Ticket
from jax_agent_rl.collect.filters import Selection, select
from jax_agent_rl.collect.groups import GroupRecord, GroupStream, continued
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.rollout.protocol import BackendMetrics, Capabilities
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.record import staleness_record
from jax_agent_rl.trainer.step import RolloutBatch, training_sampling
from jax_agent_rl.types import DropReason, Group, PauseMode

LABEL = "async"
"""Trajectory ids begin with it: ``async-<s>-<i>-<member>`` belongs to the run's row number
s * batch + i, in whichever step it is trained on."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """The open groups at one moment.

    Attributes:
        groups: what they have sampled, by number; see :meth:`GroupRecord.state`.
        trajectory_ids: of the trajectories in flight.
    """

    groups: Mapping[int, Any]
    trajectory_ids: frozenset[str]


class StreamTrainer(Trainer):
    """A trainer whose groups come from a stream; see :class:`Trainer`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.runtime.config

        self.buffer = RolloutBuffer(
            batch=config.rollout.prompts_per_step,
            staleness=config.trainer.staleness_bound,
            stragglers=config.trainer.stragglers,
            oversample=config.trainer.oversample_prompts,
            version=self.record.step,
        )
        # If it is of another step, synchronous steps were trained since: nothing can continue.
        self._groups: dict[int, GroupRecord] = {}
        if self.record.buffer.get("version") == self.record.step:
            for number, state in self.record.in_flight.items():
                self._groups[int(number)] = GroupRecord.restore(state)
            self.buffer.restore(self.record.buffer, continued=self._groups)

        # What a turn has sampled so far is kept for checkpoints. An engine in another process would
        # have to send a message for every chunk, so it is not kept there.
        is_local = config.rollout.backend != "remote" and config.rollout.placement == "colocated"
        self.runtime.client.keeps_chunks = is_local

        self.stream = GroupStream(
            self.buffer,
            draw=self.runtime.cursor.draw,
            grow=self._grow,
            drop=self._drop,
        )
        self._stopped: _InFlight | None = None  # once the stream was told to stop

        # Engine metrics and time when the last batch was taken.
        self._last_metrics: BackendMetrics | None = None
        self._last_metrics_time = 0.0

    def wanted_after(self, step: int) -> int:
        """Return how many groups the steps after this one will consume."""
        return (self.runtime.config.trainer.steps - step) * self.buffer.batch

    async def take_batch(self) -> RolloutBatch:
        """Return the groups of the next step.

        Its engine metrics and its seconds run from one batch to the next. Rollout, learner and an
        evaluation, if there is one, share that time.
        """
        buffer = self.buffer
        began = self.clock()
        self.progress.phase(
            f"step {self.record.step + 1}: rollout",
            lambda: f"{buffer.ready}/{buffer.batch} groups ready, {buffer.running} running",
        )
        if self._last_metrics is None:  # the first batch of this process
            self._last_metrics = await self.runtime.metrics()
            self._last_metrics_time = began

        with self.phases.measure("wait"):
            groups = await self._take_useful()
        self.learner_idle_seconds += self.clock() - began

        metrics = await self.runtime.metrics()
        metrics_time = self.clock()
        engine = metrics.since(self._last_metrics)
        seconds = metrics_time - self._last_metrics_time
        self._last_metrics = metrics
        self._last_metrics_time = metrics_time
        self.phases.ended("engine", seconds)

        overlap = {
            **staleness_record(groups, buffer.version),
            "groups_running": buffer.running,
            "groups_ready": buffer.ready,
            "groups_stale": buffer.dropped[DropReason.STALE],
        }
        return RolloutBatch(groups=groups, engine=engine, seconds=seconds, metrics=overlap)

    async def _take_useful(self) -> list[Group]:
        """Return a batch; groups that a filter leaves out are replaced first.

        After ``algorithm.max_resample_rounds`` rounds, useless groups stay in the batch.
        """
        groups: dict[int, Group] = {}
        useless: Mapping[int, DropReason] = {}
        for _ in range(1 + self.runtime.config.algorithm.max_resample_rounds):
            for number, reason in useless.items():
                self.stream.discard([number], reason)
            missing = self.buffer.batch - self.buffer.taken
            if not missing:
                break

            new_groups = await self.stream.take(missing)
            self._guard.check(list(new_groups.values()), self.runtime.collector.latest_losses)
            useless = self._useless(new_groups)
            groups |= new_groups
        return [groups[number] for number in sorted(groups)]

    def rollout_status(self) -> str:
        return f"; {self.buffer.ready} groups ready, {self.buffer.running} running"

    async def stop_rollouts(self) -> None:
        if self._stopped is None:
            self._stopped = self._in_flight()  # closing the stream forgets it
        await self.stream.close()

    def save(self) -> None:
        """Save the open groups beside the learner's state.

        A resumed run draws their rows first and continues them.
        """
        in_flight = self._stopped or self._in_flight()
        saved_groups: dict[str, Any] = {}
        continued_ids: set[str] = set()
        for number, state in in_flight.groups.items():
            members = continued(state)
            if number in self.buffer.kept and members:
                saved_groups[str(number)] = state
                group_id = self._group_id(number)
                continued_ids.update(f"{group_id}-{member}" for member in members)

        self.record.in_flight = saved_groups
        self.record.buffer = self.buffer.state()
        self.record.cursor = self.runtime.cursor.state(again=self.buffer.open)
        self.continued = len(continued_ids & in_flight.trajectory_ids)
        super().save()

    def on_step_end(self, version: int) -> None:
        """Make room for what the next steps consume."""
        self.stream.finish_step(version, want=self.wanted_after_publishing(version))
        open_numbers = self.buffer.kept
        for number in list(self._groups):
            if number not in open_numbers:
                del self._groups[number]

    def wanted_after_publishing(self, version: int) -> int:
        """Return how many groups to start as soon as a version is served."""
        return self.wanted_after(version)

    def _in_flight(self) -> _InFlight:
        return _InFlight(
            groups={number: record.state() for number, record in self._groups.items()},
            trajectory_ids=self.runtime.collector.accounting.in_flight,
        )

    def _group_id(self, number: int) -> str:
        step, index = divmod(number, self.buffer.batch)
        return f"{LABEL}-{step}-{index}"

    async def _grow(self, ticket: Ticket, row: Any, why_stopped: Callable[[], DropReason]) -> Group:
        """Collect one group with shaped rewards."""
        config = self.runtime.config
        step, index = divmod(ticket.number, self.buffer.batch)
        collect = functools.partial(
            self.runtime.collector.collect_one,
            row,
            step=step,
            index=index,
            why_stopped=why_stopped,
        )

        async def collect_greedy(**options: Any) -> list[Group]:
            return [await collect(label=f"greedy-{LABEL}", **options)]

        group = await collect(
            group_size=config.rollout.group_size,
            sampling=training_sampling(config),
            label=LABEL,
            record=self._groups.setdefault(ticket.number, GroupRecord()),
        )
        try:
            # Without any engine, lost trajectories would look like failures of the policy.
            self.runtime.client.require_server()
            (shaped_group,) = await self.shape_rewards([group], collect_greedy)
        except BaseException:
            self._drop(group, why_stopped())
            raise
        return shaped_group

    def _drop(self, group: Group, reason: DropReason) -> None:
        trajectory_ids = [trajectory.trajectory_id for trajectory in group.trajectories]
        self.runtime.collector.accounting.drop(trajectory_ids, reason)

    def _useless(self, groups: Mapping[int, Group]) -> dict[int, DropReason]:
        """Return the groups that the filters leave out, each with a reason.

        Their members are counted with the step, by :meth:`select`.
        """
        reasons: dict[int, DropReason] = {}
        for number, group in groups.items():
            selection = select([group], self.runtime.config.algorithm)
            if not selection.groups:
                reasons[number] = next(iter(selection.dropped or group.dropped))
        return reasons


class OneStepOffTrainer(StreamTrainer):
    """The next batch is rolled out while this one is learned from.

    Weights change only between rollouts. So all tokens of a trajectory are of one version, and
    their staleness is 1 (0 in the first step). The engine needs no capability that the synchronous
    trainer does without. A step lasts as long as the slower of rollout and learner.
    """

    async def rollout(self) -> RolloutBatch:
        batch_size = self.buffer.batch
        self.stream.want(batch_size)
        batch = await self.take_batch()

        # The next batch starts now, and grows while the learner works on this one.
        self.stream.want(min(batch_size, self.wanted_after(self.record.step + 1)))
        return batch

    async def publish(self, version: int, selection: Selection) -> float:
        """Publish once the next batch is complete."""
        began = self.clock()
        phase = f"step {version}: learner waits for the next rollout"
        self.progress.phase(phase, self.rollout_status)
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

    Weights change under running generations: a trajectory may hold tokens of several versions, and
    each token is marked with its version. How old a token may be when it is trained on, and so how
    far the rollout runs ahead, is the buffer's decision (:mod:`jax_agent_rl.collect.buffer`). Every
    step publishes, even one that learned nothing: a version is a step.

    Raises:
        ConfigError: an engine cannot do what ``trainer.in_flight_update`` asks for.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = self.runtime.config.trainer.in_flight_update
        for server in self.runtime.client.pool.servers:
            capabilities = server.backend.capabilities
            supported = [name for name in PAUSES if _supports(capabilities, name)]
            if wanted not in supported:
                choices = ", ".join(supported)
                raise ConfigError(
                    f"trainer.in_flight_update={wanted}: {server.name} can do only {choices}"
                )
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
