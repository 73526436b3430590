"""The training step, the same for every trainer, and the run around it.

::

    run ─► evaluate
        ─► repeat: train_step ─► rollout   groups of trajectories, scored as they finish
                              ─► select    drop what has no gradient
                              ─► update    advantages, losses, optimizer: the learner, in a thread
                              ─► publish   new weights to every engine
                              ─► record    metrics, trajectories, progress
        ─► evaluate ─► save

Each trainer has its own ``rollout`` and ``publish``; everything else is here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

from jax_agent_rl.collect.accounting import LostBatchGuard
from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.learner.metrics import UpdateResult
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.observe.run_dir import RunDir
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.transport import WeightSource
from jax_agent_rl.trainer.agreement import AgreementWatch
from jax_agent_rl.trainer.components import Checkpoints, RunComponents
from jax_agent_rl.trainer.curriculum import record_pass_rates
from jax_agent_rl.trainer.observing import Phases, RunReporter
from jax_agent_rl.trainer.record import RunRecord, account, step_record
from jax_agent_rl.trainer.step import (
    RolloutBatch,
    Step,
    all_trajectories,
    evaluation_sampling,
    role_baselines_after,
    select_step,
    shaped,
    training_sampling,
)
from jax_agent_rl.types import DropReason, Group, PauseMode, SamplingParams
from jax_agent_rl.utils.text import counted


@dataclass(kw_only=True)
class Trainer:
    """Trains until ``trainer.steps`` (or ``trainer.target_accuracy``), from the step of ``record``.

    Attributes:
        folder: results are written here.
        record: progress that survives a restart.
        clock: seconds, monotonic.
        agreement: compares engine and learner.
        continued: number of trajectories in flight whose ids the next checkpoint holds.
        learner_idle_seconds: seconds of this step in which the learner had nothing to do.
        phases: begin and end of what the trainer did.
        reporter: records steps and evaluations, and passes them to observers.
    """

    runtime: RunComponents
    folder: RunDir
    checkpointer: Checkpoints
    record: RunRecord
    progress: Progress
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard = LostBatchGuard(
            self.runtime.config.trainer.max_failed_batches,
            self.record.lost_batches,
        )
        self._has_unrecorded_update = False
        self._has_recorded_step = False  # since this process began
        # When training would have begun without any interruption.
        self._train_began = self.clock() - self.record.train_seconds

        self.agreement = AgreementWatch(
            self.runtime,
            self.folder,
            version=self._version(self.record.step),
            print_line=self.progress.print_line,
        )
        self.continued = 0
        self.learner_idle_seconds = 0.0

        self.phases = Phases(self.clock)
        self.reporter = RunReporter(
            self.runtime,
            self.folder,
            self.record,
            self.progress,
            self.phases,
            self.clock,
        )

    async def train_step(self) -> None:
        """Run one step.

        A step that is cancelled is undone. If its updates have begun for good, it finishes first.
        """
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
        """Stop the rollouts that still run after the last step or at an interruption.

        It may be called repeatedly.
        """

    async def run(self) -> None:
        """Run to the end.

        Cancelling it (Ctrl-C, SIGTERM) leaves a checkpoint of the last finished step.
        """
        self._train_began = self.clock() - self.record.train_seconds
        last_step = self.runtime.config.trainer.steps
        try:
            if self.record.evaluated < 0:
                self.record.accuracy_before = await self.evaluate()
                self._train_began = self.clock()

            while not await self.reached_target() and self.record.step < last_step:
                await self.train_step()

            await self.stop_rollouts()
            self.record.train_seconds = self.clock() - self._train_began
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
        """Evaluate if ``trainer.eval_every`` asks for it now.

        Returns:
            whether the target accuracy is reached.
        """
        config = self.runtime.config.trainer
        step = self.record.step

        # Before the first and after the last step, run() evaluates.
        is_in_training = 0 < step < config.steps
        is_due = is_in_training and config.eval_every and step % config.eval_every == 0
        if not is_due or self.record.evaluated == step:
            return False

        accuracy = await self.evaluate()
        if accuracy is None or not config.target_accuracy or accuracy < config.target_accuracy:
            return False
        self.record.accuracy_after = accuracy
        return True

    @asynccontextmanager
    async def _recorded_step(self) -> AsyncIterator[Step]:
        """Record the step if its update succeeded, even if its weights were not published.

        A resumed run begins by publishing them.
        """
        step = Step(
            number=self.record.step + 1,
            began=self.clock(),
            print_line=self.progress.print_line,
            stop_rollouts=self.stop_rollouts,
        )
        try:
            yield step
            if step.result is not None and step.batch is not None:
                await self.reporter.store_attachments(step.number, step.batch.groups, learned=True)
        except BaseException:
            await self.stop_rollouts()
            raise
        finally:
            result = step.result
            is_partly_applied = step.cancellation.is_partly_applied
            # If recording fails, the parameters belong to no recorded step and must not be saved.
            self._has_unrecorded_update = result is not None or is_partly_applied
            if result is not None and step.batch is not None:
                self.on_step_end(step.number)
                self._record(step, step.batch, result)
            is_recorded = self.record.step >= step.number
            self._has_unrecorded_update = is_partly_applied and not is_recorded

        every = self.runtime.config.trainer.checkpoint_every
        if every and step.number % every == 0:
            self.save()

    def _record(self, step: Step, batch: RolloutBatch, result: UpdateResult) -> None:
        """Write the line of metrics and the trajectories of a step; then count it as finished."""
        config = self.runtime.config
        record = self.record
        record.train_seconds = self.clock() - self._train_began
        record.recompilations = batch.engine.recompilations + self._learner_recompilations()
        # The log-probs of stale tokens differ by what was learned since, not by a disagreement.
        if not batch.metrics.get("staleness_max"):
            logprob_gap = result.metrics.get("logprob_gap_max", 0.0)
            record.max_logprob_gap = max(record.max_logprob_gap, logprob_gap)
        step_seconds = self.clock() - step.began
        comparison = self.agreement.take_metrics()
        if "loss" in result.metrics:
            record.count_comparison(comparison["compared_tokens"] > 0)

        curriculum: dict[str, float] = {}
        if self.runtime.cursor.pools is not None:
            curriculum = record_pass_rates(self.runtime.cursor.pools, batch.groups)

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
            algorithm=config.algorithm,
            pipeline={
                "learner_idle_share": self.learner_idle_seconds / step_seconds,
                **asdict(self.runtime.client.stats()),
                **comparison,
                **batch.metrics,
                **curriculum,
            },
        )
        if not self._has_recorded_step:
            self._has_recorded_step = True
            # A run that was resumed from an earlier step replaces the later ones.
            self.checkpointer.delete_newer(record.step)
        self.reporter.write_step(line, batch.groups, result)

        # Only now: a step that could not be written is not finished; the last checkpoint stands.
        record.step = step.number
        record.accuracy_after = None
        record.cursor = self.runtime.cursor.state()
        record.lost_batches = self._guard.lost_batches
        record.role_baselines = role_baselines_after(
            record.role_baselines, batch.groups, config.algorithm
        )
        self.learner_idle_seconds = 0.0
        self.reporter.show_step(line)

    def select(self, groups: Sequence[Group]) -> Selection:
        """Select what is worth a gradient; count the rest as dropped, by reason."""
        algorithm = self.runtime.config.algorithm
        selection = select_step(groups, algorithm, self.record.role_baselines)
        for reason, ids in selection.dropped.items():
            self.runtime.collector.accounting.drop(ids, reason)
        return selection

    async def update(self, step: Step, selection: Selection) -> UpdateResult:
        """Run the learner's update in a thread, so that the event loop goes on.

        Without any group to learn from, the result is empty.
        """
        self.checkpointer.check()
        if not selection.groups:
            return UpdateResult(metrics={}, skipped=False)

        groups = selection.groups
        if self.runtime.teach is not None:
            self.progress.phase(f"step {step.number}: teachers")
            with self.phases.measure("teach"):
                groups = await self.runtime.teach(groups)
            if step.batch is not None:
                step.batch = step.batch.with_members(groups)  # their records hold the scores

        tick = self.reporter.show_learning(selection, self.rollout_status)
        async with self.runtime.room_for_learning():
            with self.phases.measure("learn"):
                result = await asyncio.to_thread(
                    self.agreement.update,
                    groups,
                    masked=selection.masked,
                    tick=tick,
                    cancellation=step.cancellation,
                    step=step.number,
                    version=self._version(step.number),
                    loop=asyncio.get_running_loop(),
                )

        account(self.runtime.collector.accounting, selection, result)
        is_policy_trained = "loss" in result.metrics  # not while only a critic learns
        if is_policy_trained and not self.record.learner_programs:
            self.record.learner_programs = self._learner_programs()
        return result

    async def push_weights(self, version: int, *, mode: PauseMode | None = None) -> float:
        """Send new weights to every engine; version and prefix cache change with them.

        Args:
            version: the step whose weights they are; see :meth:`_version`.
            mode: what becomes of running generations; see :meth:`AsyncServer.update_weights`.

        Returns:
            seconds until every engine serves them: export, transfer, loading, proof.
        """
        began = self.clock()
        await self._push(self.runtime.learner, self._version(version), mode)
        return self.clock() - began

    async def _push(
        self,
        source: WeightSource,
        version: int,
        mode: PauseMode | None = None,
    ) -> None:
        transport = self.runtime.transport
        pool = self.runtime.client.pool

        async def offer() -> WeightUpdate:
            return await asyncio.to_thread(transport.offer, source, version)

        with self.phases.measure("publish"):
            if transport.takes_engines_memory:
                await pool.update_weights_in_place(offer, mode=mode)
            else:
                await pool.update_weights(await offer(), mode=mode)

    def _version(self, step: int) -> int:
        """Return the policy version of a step's weights.

        It is the step's number, plus the versions that were published for evaluations.
        """
        return step + self.record.extra_versions

    @asynccontextmanager
    async def _serving_average(self) -> AsyncIterator[None]:
        """Let the engines serve the average of the weights (``learner.ema_decay``) meanwhile.

        Versions only grow: the average and the step's weights after it get a new one each. If the
        context fails, the run ends, and the engines still serve the average.
        """
        is_untrained = not self.record.step  # the average equals the weights
        if is_untrained or not self.runtime.config.learner.ema_decay:
            yield
            return

        self.record.extra_versions += 1
        await self._push(self.runtime.learner.averaged(), self._version(self.record.step))
        yield
        self.record.extra_versions += 1
        await self._push(self.runtime.learner, self._version(self.record.step))

    async def evaluate(self) -> float | None:
        """Return the mean reward on the held-out rows (None without rows), and record it."""
        runtime = self.runtime
        step = self.record.step
        if not runtime.heldout:
            self.record.evaluated = step
            return None

        began = self.clock()
        async with self._serving_average():
            with self.phases.measure("evaluate"):
                groups = await self.gather(
                    runtime.evaluator,
                    runtime.heldout,
                    group_size=1,
                    sampling=evaluation_sampling(runtime.config),
                    step=step,
                    label="heldout",
                    phase=f"held-out evaluation after step {step}",
                )
        runtime.evaluator.accounting.train(t.trajectory_id for t in all_trajectories(groups))
        seconds = self.clock() - began
        await self.reporter.store_attachments(step, groups, learned=False)
        return self.reporter.report_evaluation(groups, seconds=seconds)

    def save(self) -> None:
        """Save a checkpoint of the last finished step, if there is none yet."""
        self.record.accounting = self.runtime.collector.accounting.state(continued=self.continued)
        with self.phases.measure("save"):
            state = self.runtime.learner.state
            self.checkpointer.save(self.record.step, state, self.record.to_json())

    def _learner_recompilations(self) -> int:
        """Return the number of programs compiled since the first update of the policy."""
        warmup_programs = self.record.learner_programs
        if not warmup_programs:
            return 0
        return max(0, self._learner_programs() - warmup_programs)

    def _learner_programs(self) -> int:
        return self.runtime.learner.programs_compiled - self.agreement.programs

    async def shape_rewards(
        self, groups: Sequence[Group], collect_greedy: Callable[..., Awaitable[list[Group]]]
    ) -> list[Group]:
        """Return groups with shaped rewards, see :func:`~jax_agent_rl.trainer.step.shaped`.

        For ReMax, each prompt also gets a greedy rollout, whose reward is the baseline. It is not
        trained on.

        Args:
            collect_greedy: collects a group for each prompt of ``groups``, given ``group_size`` and
                ``sampling``.
        """
        config = self.runtime.config
        if config.algorithm.adv_estimator != "remax":
            return [shaped(group, config) for group in groups]

        sampling = replace(training_sampling(config), temperature=0.0)
        greedy_groups = await collect_greedy(group_size=1, sampling=sampling)
        greedy_ids = [t.trajectory_id for t in all_trajectories(greedy_groups)]
        self.runtime.collector.accounting.drop(greedy_ids, DropReason.GREEDY)

        shaped_groups = []
        for group, greedy in zip(groups, greedy_groups, strict=True):
            shaped_groups.append(shaped(group, config, greedy))
        return shaped_groups

    async def gather(
        self,
        collector: RolloutCollector,
        rows: Sequence[dict],
        *,
        group_size: int,
        sampling: SamplingParams,
        step: int,
        label: str,
        phase: str,
    ) -> list[Group]:
        """Collect one group per row while the display shows ``phase``.

        Raises:
            EngineDiedError: no server is left; lost groups would look like failures of the policy.
        """
        total = len(rows) * group_size
        finished = 0

        def arrived(_: Group) -> None:
            nonlocal finished
            finished += group_size

        self.progress.phase(phase, lambda: f"{finished}/{counted(total, 'trajectory')}")
        groups = await collector.collect(
            rows,
            group_size=group_size,
            sampling=sampling,
            step=step,
            label=label,
            arrived=arrived,
        )
        self.runtime.client.require_server()
        self._guard.check(groups, collector.latest_losses)
        return groups
