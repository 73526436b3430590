"""The training step, the same for every trainer, and the run around it.

::

    run ─► evaluate ─► repeat: train_step ─► rollout   groups of trajectories, scored as they finish (the trainer's own)
                                          ─► select    drop what has no gradient
                                          ─► update    advantages, losses, optimizer: the learner, in a thread
                                          ─► publish   new weights to every engine (the trainer's own)
                                          ─► record    metrics, trajectories, progress (``observing.RunReporter``)
        ─► evaluate ─► save
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import Selection, select
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.trainer import Checkpoints, RunComponents, WeightSource
from jax_agent_rl.trainer.agreement import AgreementWatch
from jax_agent_rl.trainer.observing import Phases, RunReporter
from jax_agent_rl.trainer.record import RunRecord, account, step_record
from jax_agent_rl.trainer.step import (
    RolloutBatch,
    Step,
    all_trajectories,
    evaluation_sampling,
    gather,
    update_role_baselines,
    with_role_baselines,
)
from jax_agent_rl.types import DropReason, Group, PauseMode, SamplingParams


@dataclass(kw_only=True)
class Trainer:
    """Trains until ``trainer.steps`` (or ``trainer.target_accuracy``), from the step of ``record`` on.

    Attributes:
        runtime: engine, agents, learner.
        folder: where results go.
        checkpointer: where states go.
        record: progress that survives a restart.
        progress: the display.
        clock: seconds, monotonic.
        continued: number of trajectories in flight whose ids the next checkpoint holds.
        learner_idle_seconds: seconds of this step in which the learner had nothing to do.
        phases: what the trainer did when.
        reporter: records steps and evaluations, and passes them to observers.
    """

    runtime: RunComponents
    folder: RunDir
    checkpointer: Checkpoints
    record: RunRecord
    progress: Progress
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard = LostBatchGuard(self.runtime.config.trainer.max_failed_batches, self.record.lost_batches)
        self._has_unrecorded_update = False
        self._has_recorded = False  # a step, since this process began
        self._began = self.clock() - self.record.train_seconds  # of training, as if it had never been interrupted
        self.agreement = AgreementWatch(
            self.runtime, self.folder, version=self._version(self.record.step), print_line=self.progress.print_line
        )
        self.continued = 0
        self.learner_idle_seconds = 0.0
        self.phases = Phases(self.clock)
        self.reporter = RunReporter(self.runtime, self.folder, self.record, self.progress, self.phases, self.clock)

    async def train_step(self) -> None:
        """Run one step. Cancelled, it is undone, unless its updates have begun for good: then it finishes first."""
        async with self._recorded_step() as step:
            step.batch = await self.rollout()  # groups of trajectories, scored as they finish
            selection = self.select(step.batch.groups)  # those with a gradient
            await step.learn(self.update(step, selection))  # advantages, losses, optimizer
            step.publish_seconds = await self.publish(step.number, selection)

    async def rollout(self) -> RolloutBatch:
        """Return the scored groups of the next step."""
        raise NotImplementedError

    async def publish(self, version: int, selection: Selection) -> float:
        """Publish what was learned to the engines; return the seconds it took."""
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
        self._began = self.clock() - self.record.train_seconds
        try:
            if self.record.evaluated < 0:
                self.record.accuracy_before = await self.evaluate()
                self._began = self.clock()
            while not await self.reached_target() and self.record.step < self.runtime.config.trainer.steps:
                await self.train_step()
            await self.stop_rollouts()
            self.record.train_seconds = self.clock() - self._began
            if self.record.accuracy_after is None:
                self.record.accuracy_after = await self.evaluate()
        finally:
            self.progress.phase(f"saving step {self.record.step}", self.checkpointer.written)
            try:
                if not self._has_unrecorded_update:  # else the last checkpoint stands
                    self.save()
                self.checkpointer.wait()
            finally:
                await self.stop_rollouts()
                accounting = self.runtime.collector.accounting
                accounting.drop(accounting.in_flight, DropReason.CANCELLED)

    async def reached_target(self) -> bool:
        """Evaluate if ``trainer.eval_every`` asks for it now; return whether the target accuracy is reached."""
        config, step = self.runtime.config.trainer, self.record.step
        due = config.eval_every and 0 < step < config.steps and step % config.eval_every == 0
        if not due or self.record.evaluated == step:  # after the last step, run() evaluates
            return False
        accuracy = await self.evaluate()
        if accuracy is None or not config.target_accuracy or accuracy < config.target_accuracy:
            return False
        self.record.accuracy_after = accuracy
        return True

    @asynccontextmanager
    async def _recorded_step(self) -> AsyncIterator[Step]:
        """Record the step if its update succeeded, even if its weights were not published: a resumed run does it."""
        step = Step(
            number=self.record.step + 1,
            began=self.clock(),
            print_line=self.progress.print_line,
            stop_rollouts=self.stop_rollouts,
        )
        try:
            yield step
        except BaseException:
            await self.stop_rollouts()
            raise
        finally:
            result = step.result
            # Until the step is on record, the parameters are those of no step that is.
            self._has_unrecorded_update = result is not None or step.cancellation.is_partly_applied
            if result is not None and step.batch is not None:
                self.on_step_end(step.number)
                self._record(step, step.batch, result)
            self._has_unrecorded_update = step.cancellation.is_partly_applied and self.record.step < step.number
        every = self.runtime.config.trainer.checkpoint_every
        if every and step.number % every == 0:
            self.save()

    def _record(self, step: Step, batch: RolloutBatch, result: UpdateResult) -> None:
        record = self.record
        record.train_seconds = self.clock() - self._began
        record.recompilations = batch.engine.recompilations + self._learner_recompilations()
        if not batch.metrics.get("staleness_max"):  # what is stale differs by what was learned since
            record.max_logprob_gap = max(record.max_logprob_gap, result.metrics.get("logprob_gap_max", 0.0))
        step_seconds = self.clock() - step.began
        compared = self.agreement.take_metrics()
        if "loss" in result.metrics:
            record.count_comparison(compared["compared_tokens"] > 0)
        line = step_record(
            step.number,
            batch.groups,
            result.metrics,
            batch.engine,
            accounting=self.runtime.collector.accounting.summary(),
            rollout_seconds=batch.seconds,
            weight_update_seconds=step.publish_seconds,
            step_seconds=step_seconds,
            recompilations=record.recompilations,
            algorithm=self.runtime.config.algorithm,
            pipeline={
                "learner_idle_share": self.learner_idle_seconds / step_seconds,
                **asdict(self.runtime.client.stats()),
                **compared,
                **batch.metrics,
            },
        )
        if not self._has_recorded:
            self._has_recorded = True
            self.checkpointer.delete_newer(record.step)  # of a run that went back; this step takes their place
        self.reporter.write_step(line, batch.groups, result)
        # A step that could not be written is not finished: the last checkpoint stands.
        record.step, record.accuracy_after = step.number, None
        record.cursor = self.runtime.cursor.state()
        record.lost_batches = self._guard.lost_batches
        if self.runtime.config.algorithm.adv_estimator == "rae":
            record.role_baselines = update_role_baselines(
                record.role_baselines, batch.groups, turn_reward=self.runtime.config.algorithm.turn_reward
            )
        self.learner_idle_seconds = 0.0
        self.reporter.show_step(line)

    def select(self, groups: Sequence[Group]) -> Selection:
        """Select what is worth a gradient; count the rest as dropped, by reason."""
        selection = select(groups, self.runtime.config.algorithm)
        for reason, ids in selection.dropped.items():
            self.runtime.collector.accounting.drop(ids, reason)
        if self.runtime.config.algorithm.adv_estimator != "rae":
            return selection
        known = self.record.role_baselines
        return replace(selection, groups=tuple(with_role_baselines(group, known) for group in selection.groups))

    async def update(self, step: Step, selection: Selection) -> UpdateResult:
        """Run the learner's update in a thread, so that the event loop goes on; an empty one if nothing is left."""
        self.checkpointer.check()
        if not selection.groups:
            return UpdateResult(metrics={}, skipped=False)
        check = self.agreement.check(selection.groups, step.number)
        groups = selection.groups
        if self.runtime.teach is not None:
            self.progress.phase(f"step {step.number}: teachers")
            with self.phases.measure("teach"):
                groups = await self.runtime.teach(groups)
        tick = self.reporter.show_learning(selection, self.rollout_status)
        async with self.runtime.room_for_learning():
            with self.phases.measure("learn"):
                result = await asyncio.to_thread(
                    self.runtime.learner.update,
                    groups,
                    masked=selection.masked,
                    tick=tick,
                    cancellation=step.cancellation,
                    check=check,
                )
        account(self.runtime.collector.accounting, selection, result)
        if "loss" in result.metrics:  # not while only a critic learns
            self.agreement.learned(self._version(step.number), updates=self._count_updates(result))
            self.record.learner_programs = self.record.learner_programs or self._learner_programs()
        return result

    def _count_updates(self, result: UpdateResult) -> int:
        """Return how many updates of the optimizer a step of this configuration makes; 0 if none was applied."""
        learner = self.runtime.config.learner
        return 0 if result.skipped else learner.ppo_epochs * learner.num_minibatches

    async def push_weights(self, version: int, *, mode: PauseMode | None = None) -> float:
        """Send new weights to every engine; version and prefix cache change with them.

        Args:
            version: the step they are of; see :meth:`_version`.
            mode: of running generations; see :meth:`AsyncServer.update_weights`.

        Returns:
            seconds from the learner's parameters to engines that serve them: export, transfer, loading, proof.
        """
        begin = self.clock()
        await self._push(self.runtime.learner, self._version(version), mode)
        return self.clock() - begin

    async def _push(self, source: WeightSource, version: int, mode: PauseMode | None = None) -> None:
        with self.phases.measure("publish"):
            update = await asyncio.to_thread(self.runtime.publisher.make, source, version)
            await self.runtime.client.update_weights(update, mode=mode)

    def _version(self, step: int) -> int:
        """Return the policy version of a step's weights: its number, plus the versions that evaluations took."""
        return step + self.record.extra_versions

    @asynccontextmanager
    async def _serving_average(self) -> AsyncIterator[None]:
        """Let the engines serve the average of the weights (``learner.ema_decay``), then the step's own again.

        Versions only grow: each of the two is a new one. If the context fails, the run ends with the average served.
        """
        if not self.runtime.config.learner.ema_decay or not self.record.step:  # before training they are equal
            yield
            return
        self.record.extra_versions += 1
        await self._push(self.runtime.learner.averaged(), self._version(self.record.step))
        yield
        self.record.extra_versions += 1
        await self._push(self.runtime.learner, self._version(self.record.step))

    async def evaluate(self) -> float | None:
        """Return the mean reward on the held-out rows (None without rows), and record it."""
        runtime, step = self.runtime, self.record.step
        if not runtime.heldout:
            self.record.evaluated = step
            return None
        begin = self.clock()
        label = f"held-out evaluation after step {step}"
        async with self._serving_average():
            with self.phases.measure("evaluate"):
                groups = await self._gather(
                    runtime.evaluator, runtime.heldout, 1, evaluation_sampling(runtime.config), step, "heldout", label
                )
        runtime.evaluator.accounting.train(t.trajectory_id for t in all_trajectories(groups))
        return self.reporter.report_evaluation(groups, seconds=self.clock() - begin)

    def save(self) -> None:
        """Save a checkpoint of the last finished step, if there is none yet."""
        self.record.accounting = self.runtime.collector.accounting.state(continued=self.continued)
        with self.phases.measure("save"):
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
