"""The training step, the same for every trainer, and the run around it.

::

    run ─► evaluate ─► repeat: train_step ─► rollout          groups of trajectories with rewards (the trainer's own)
                                          ─► filter           drop what is not worth a gradient
                                          ─► learn            one learner update, in a thread
                                          ─► publish_weights  new weights to every engine (the trainer's own)
                                          ─► record_step      metrics, trajectories, progress
        ─► evaluate ─► save
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import Selection, select
from jax_agent_rl.learner.cancellation import StepCancellation
from jax_agent_rl.learner.losses import aggregation
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.learner.scored_batch import trained_lengths
from jax_agent_rl.observe.metrics import RunFolder
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.trainer.agreement import AgreementWatch
from jax_agent_rl.trainer.components import CheckpointStore, RunComponents
from jax_agent_rl.trainer.groups import all_trajectories, evaluation_sampling, gather
from jax_agent_rl.trainer.interruption import InterruptibleUpdate
from jax_agent_rl.trainer.record import RunRecord, account, evaluation_record, step_record
from jax_agent_rl.trainer.timing import Phases
from jax_agent_rl.types import DropReason, Group, PauseMode, SamplingParams


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The groups of one step.

    Attributes:
        groups: before any filter.
        engine: what the engines did while they were collected.
        seconds: over which ``engine`` counts.
        metrics: more named values for the step's record.
    """

    groups: list[Group]
    engine: BackendMetrics
    seconds: float
    metrics: Mapping[str, object] = field(default_factory=dict)


@dataclass(kw_only=True)
class Trainer:
    """Trains until ``trainer.steps`` (or ``trainer.target_accuracy``), from wherever ``record`` stands.

    Attributes:
        runtime: engine, agents, learner.
        folder: where results go.
        checkpointer: where states go.
        record: progress that survives a restart.
        progress: the display.
        observers: take each line of metrics once it is recorded; they never fail.
        clock: seconds, monotonic.
        learner_idle_seconds: seconds of this step in which the learner had nothing to do.
        phases: what the trainer did when.
    """

    runtime: RunComponents
    folder: RunFolder
    checkpointer: CheckpointStore
    record: RunRecord
    progress: Progress
    observers: Sequence[Callable[[Mapping[str, Any]], None]] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard = LostBatchGuard(self.runtime.config.trainer.max_failed_batches, self.record.lost_batches)
        self._partly_updated = False
        self._aggregation_described = False
        self.agreement = AgreementWatch(self.runtime, self.folder, version=self.record.step, say=self.progress.say)
        self.learner_idle_seconds = 0.0
        self.phases = Phases(self.clock)

    async def train_step(self, begin: float) -> None:
        """Run one step. Cancelled, it is undone, unless its updates have begun for good: then it finishes first.

        Args:
            begin: when training began, on :attr:`clock`.
        """
        step_began = self.clock()
        collected = await self.rollout()
        await self.complete_step(collected, begin, step_began)

    async def rollout(self) -> Collected:
        """Return the groups of the next step."""
        raise NotImplementedError

    async def publish_weights(self, version: int, selection: Selection) -> float:
        """Publish what was learnt to the engines; return the seconds it took."""
        raise NotImplementedError

    def on_step_end(self, version: int) -> None:
        """React to a finished step, whose weights are published unless the run ends."""

    def rollout_status(self) -> str:
        """Return what the rollout does while the learner is busy, for the display."""
        return ""

    async def stop_rollouts(self) -> None:
        """Stop the rollouts that still run after the last step or at an interruption. May be called repeatedly."""

    async def run(self) -> None:
        """Run to the end. Cancelling it (Ctrl-C, SIGTERM) leaves a checkpoint of the last finished step."""
        begin = self.clock() - self.record.train_seconds
        try:
            if self.record.evaluated < 0:
                self.record.accuracy_before = await self.evaluate()
                begin = self.clock()
            while not await self.reached_target() and self.record.step < self.runtime.config.trainer.steps:
                await self.train_step(begin)
            await self.stop_rollouts()
            self.record.train_seconds = self.clock() - begin
            if self.record.accuracy_after is None:
                self.record.accuracy_after = await self.evaluate()
        finally:
            self.progress.phase(f"saving step {self.record.step}", self.checkpointer.written)
            try:
                if not self._partly_updated:  # else the parameters are those of no step: the last checkpoint stands
                    self.save()
                self.checkpointer.wait()
            finally:
                await self.stop_rollouts()
                accounting = self.runtime.collector.accounting
                accounting.drop(accounting.in_flight, DropReason.CANCELLED)

    async def reached_target(self) -> bool:
        """Evaluate if ``trainer.eval_every`` asks for it now; return whether the target accuracy is reached."""
        config, step = self.runtime.config.trainer, self.record.step
        if not step or not config.eval_every or step % config.eval_every or self.record.evaluated == step:
            return False
        accuracy = await self.evaluate()
        if accuracy is None or not config.target_accuracy or accuracy < config.target_accuracy:
            return False
        self.record.accuracy_after = accuracy
        return True

    async def complete_step(self, collected: Collected, begin: float, step_began: float) -> None:
        """Filter, learn, publish and record.

        Interrupted while it learns, the step is undone if the learner can. What has been learnt is recorded even if
        the engines no longer get it: a resumed run publishes first.
        """
        self.checkpointer.check()
        self.phases.ended("engine", collected.seconds)
        step, seconds = self.record.step + 1, 0.0
        update = InterruptibleUpdate(self.progress.say, self.stop_rollouts)
        selection = self.filter(collected.groups)
        try:
            await update.run(self.learn(selection, update.cancellation))
            seconds = await self.publish_weights(step, selection)
        except BaseException:
            await self.stop_rollouts()
            raise
        finally:
            if (result := update.result) is not None:
                self.on_step_end(step)
                self.record_step(collected, result, begin, step_began, weight_update_seconds=seconds)
            self._partly_updated = update.cancellation.is_partly_applied and self.record.step < step
        every = self.runtime.config.trainer.checkpoint_every
        if every and step % every == 0:
            self.save()

    def record_step(
        self,
        collected: Collected,
        learnt: UpdateResult,
        begin: float,
        step_began: float,
        *,
        weight_update_seconds: float,
    ) -> None:
        """Record a finished step: progress, a line of metrics, the trajectories, the display."""
        runtime, record, step, groups = self.runtime, self.record, self.record.step + 1, collected.groups
        metrics = learnt.metrics
        record.train_seconds = self.clock() - begin
        record.recompilations = collected.engine.recompilations + self._learner_recompilations()
        if not collected.metrics.get("staleness_max"):  # what is stale differs by what was learnt since
            record.max_logprob_gap = max(record.max_logprob_gap, metrics.get("logprob_gap_max", 0.0))
        step_seconds = self.clock() - step_began
        line = step_record(
            step,
            groups,
            metrics,
            collected.engine,
            accounting=runtime.collector.accounting.summary(),
            rollout_seconds=collected.seconds,
            weight_update_seconds=weight_update_seconds,
            step_seconds=step_seconds,
            recompilations=record.recompilations,
            pipeline={
                "learner_idle_share": self.learner_idle_seconds / step_seconds,
                **asdict(runtime.client.stats()),
                **self.agreement.take_metrics(),
                **collected.metrics,
            },
        )
        self.folder.add_metrics(line | {"phase_seconds": self.phases.take()})
        self.folder.add_trajectories(step, "train", all_trajectories(groups), learnt=learnt.tokens)
        self.learner_idle_seconds = 0.0
        record.step, record.accuracy_after = step, None
        record.cursor = runtime.cursor.state()
        record.lost_batches = self._guard.lost_batches
        left = (runtime.config.trainer.steps - step) * record.train_seconds / step
        self.progress.step(line | {"accuracy": record.latest_accuracy}, seconds_left=left)
        record.latest_accuracy = None
        self._notify_observers(line)

    def filter(self, groups: Sequence[Group]) -> Selection:
        """Select what is worth a gradient; count the rest as dropped, by reason."""
        selection = select(groups, self.runtime.config.algorithm)
        for reason, ids in selection.dropped.items():
            self.runtime.collector.accounting.drop(ids, reason)
        return selection

    async def learn(self, selection: Selection, cancellation: StepCancellation) -> UpdateResult:
        """Run one learner update in a thread, so that the event loop goes on; an empty one if nothing is left."""
        if not selection.groups:
            return UpdateResult(metrics={}, skipped=False)
        self._describe_aggregation(selection)
        ticks = [0, 0]

        def tick(done: int, total: int) -> None:
            ticks[:] = done, total

        self.progress.phase(
            f"step {self.record.step + 1}: learner",
            lambda: f"{ticks[0]}/{ticks[1] or '?'} micro-batches{self.rollout_status()}",
        )
        update = self.runtime.learner.update
        check = self.agreement.check(selection.groups, self.record.step + 1)
        arguments = {"masked": selection.masked, "tick": tick, "cancellation": cancellation, "check": check}
        async with self.runtime.room_for_learning():
            with self.phases.of("learn"):
                result = await asyncio.to_thread(update, selection.groups, **arguments)
        account(self.runtime.collector.accounting, selection, result)
        if "loss" in result.metrics:  # not while only a critic learns
            self.agreement.learnt(self.record.step + 1)
        if not self.record.learner_programs and "loss" in result.metrics:  # not while only a critic learns
            self.record.learner_programs = self._learner_programs()
        return result

    def _describe_aggregation(self, selection: Selection) -> None:
        """Display what a token weighs in the loss of the first batch, where that depends on trajectory lengths."""
        config, described = self.runtime.config, self._aggregation_described
        self._aggregation_described = True
        if described or not aggregation.depends_on_lengths(config.algorithm, config.learner.num_minibatches):
            return
        lengths = trained_lengths(selection.groups, config.learner.num_minibatches, masked=selection.masked)
        self.progress.say(f"  {aggregation.describe_batch(config.algorithm, lengths)}")

    async def publish(self, version: int, *, mode: PauseMode | None = None) -> float:
        """Send new weights to every engine; version and prefix cache change with them.

        Args:
            version: of the weights.
            mode: of running generations; see :meth:`AsyncServer.update_weights`.

        Returns:
            seconds from the learner's parameters to engines that serve them: export, transfer, loading, proof.
        """
        begin, runtime = self.clock(), self.runtime
        with self.phases.of("publish"):
            update = await asyncio.to_thread(runtime.publisher.make, runtime.learner, version)
            await runtime.client.update_weights(update, mode=mode)
        return self.clock() - begin

    async def evaluate(self) -> float | None:
        """Return the mean reward on the held-out rows (None without rows), and record it."""
        runtime = self.runtime
        if not runtime.heldout:
            self.record.evaluated = self.record.step
            return None
        sampling = evaluation_sampling(runtime.config)
        begin = self.clock()
        step = self.record.step
        label = f"held-out evaluation after step {step}"
        with self.phases.of("evaluate"):
            groups = await self._gather(runtime.evaluator, runtime.heldout, 1, sampling, step, "heldout", label)
        trajectories = all_trajectories(groups)
        runtime.evaluator.accounting.train(t.trajectory_id for t in trajectories)
        line = evaluation_record(step, groups, seconds=self.clock() - begin)
        self.folder.add_metrics(line | {"phase_seconds": self.phases.take()})
        self.folder.add_trajectories(step, "heldout", trajectories)
        self.record.latest_accuracy, self.record.evaluated = line["accuracy"], step
        self.progress.say(
            f"  held-out accuracy after step {step}: {line['accuracy']:.1%} of {len(groups)} ({line['seconds']:.0f} s)"
        )
        self._notify_observers(line)
        return line["accuracy"]

    def _notify_observers(self, line: Mapping[str, Any]) -> None:
        for observer in self.observers:
            observer(line)

    def save(self) -> None:
        """Save a checkpoint of the last finished step, if there is none yet."""
        self.record.accounting = self.runtime.collector.accounting.state()
        with self.phases.of("save"):
            self.checkpointer.save(self.record.step, self.runtime.learner.state, self.record.to_json())

    def _learner_recompilations(self) -> int:
        known = self.record.learner_programs
        return max(0, self._learner_programs() - known) if known else 0

    def _learner_programs(self) -> int:
        return self.runtime.learner.programs_compiled - self.agreement.programs

    async def _gather(
        self,
        collector: RolloutCollector,
        rows: Sequence[dict],
        group_size: int,
        sampling: SamplingParams,
        step: int,
        label: str,
        phase: str,
    ) -> list[Group]:
        total, done = len(rows) * group_size, 0

        def arrived(_: Group) -> None:
            nonlocal done
            done += group_size

        self.progress.phase(phase, lambda: f"{done}/{total} trajectories")
        groups = await gather(
            collector,
            self.runtime.client,
            rows,
            group_size=group_size,
            sampling=sampling,
            step=step,
            label=label,
            arrived=arrived,
        )
        self._guard.check(groups, collector.latest_losses)
        return groups
