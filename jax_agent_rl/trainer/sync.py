"""The synchronous trainer: the algorithm, top to bottom.

::

    evaluate ─► repeat: rows ─► groups of trajectories ─► filter ─► update ─► publish weights ─► record ─► checkpoint
                   ▲      (engine, agents, tools)          │ (learner)        (learner → engine)
                   └──── refill: too few groups are left ──┘
             ─► evaluate ─► summary

Every trajectory of a step is sampled from the weights of the step before, so it is on-policy; asynchronous trainers
relax exactly that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.gate import UpdateGate
from jax_agent_rl.learner.state import UpdateResult
from jax_agent_rl.observe.metrics import RunFolder
from jax_agent_rl.observe.progress import Progress
from jax_agent_rl.rollout.collect import RolloutCollector
from jax_agent_rl.rollout.filters import Selection, select
from jax_agent_rl.rollout.futility import FutilityGuard
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.rollout.shaping import shape
from jax_agent_rl.runtime.in_process import Runtime
from jax_agent_rl.runtime.multihost import LeadingCheckpointer
from jax_agent_rl.trainer.record import RunRecord, evaluation_record, step_record
from jax_agent_rl.types import DropReason, Group, SamplingParams, Trajectory


@dataclass(kw_only=True)
class SyncTrainer:
    """Trains until ``trainer.steps`` (or ``trainer.target_accuracy``), from wherever ``record`` stands.

    Attributes:
        runtime: engine, agents, learner.
        folder: where results go.
        checkpointer: where states go.
        record: progress that survives a restart.
        progress: the display.
        clock: seconds, monotonic.
    """

    runtime: Runtime
    folder: RunFolder
    checkpointer: Checkpointer | LeadingCheckpointer
    record: RunRecord
    progress: Progress
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard = FutilityGuard(self.runtime.config.trainer.max_lost_batches, self.record.lost_batches)
        self._gate = UpdateGate()
        self._half_done = False

    async def run(self) -> None:
        """Runs to the end. Cancelling it (Ctrl-C, SIGTERM) leaves a checkpoint of the last finished step."""
        begin = self.clock() - self.record.train_seconds
        try:
            if self.record.evaluated < 0:
                self.record.accuracy_before = await self.evaluate()
                begin = self.clock()
            while not await self.reached_target() and self.record.step < self.runtime.config.trainer.steps:
                await self.train_step(begin)
            self.record.train_seconds = self.clock() - begin
            if self.record.accuracy_after is None:
                self.record.accuracy_after = await self.evaluate()
        finally:
            if not self._half_done:  # else the parameters are those of no step: the checkpoint before stands
                self.save()
            self.checkpointer.wait()

    async def reached_target(self) -> bool:
        """Evaluates if ``trainer.eval_every`` says so (and it was not done before a restart), and looks at the goal."""
        config, step = self.runtime.config.trainer, self.record.step
        if not step or not config.eval_every or step % config.eval_every or self.record.evaluated == step:
            return False
        accuracy = await self.evaluate()
        if accuracy is None or not config.target_accuracy or accuracy < config.target_accuracy:
            return False
        self.record.accuracy_after = accuracy
        return True

    async def train_step(self, begin: float) -> None:
        """One step of the algorithm. Cancelled before its first update, it undoes itself; later, it finishes first."""
        step_began, step_before, self._gate = self.clock(), self.record.step, UpdateGate()
        groups, engine = await self.collect(self.record.step + 1)
        rollout_seconds = self.clock() - step_began
        rest = asyncio.ensure_future(self.finish_step(groups, engine, begin, step_began, rollout_seconds))
        try:
            await asyncio.shield(rest)
        except asyncio.CancelledError:
            if self._gate.close():
                rest.cancel()
                await asyncio.gather(rest, return_exceptions=True)
            else:
                self.progress.say("  interrupted: finishing this learner step before saving")
                await rest
            raise
        finally:
            self._half_done = self._gate.passed and self.record.step == step_before

    async def finish_step(
        self, groups: list[Group], engine: BackendMetrics, begin: float, step_began: float, rollout_seconds: float
    ) -> None:
        """What follows the rollout: filter, update, publish, record."""
        runtime, record, step = self.runtime, self.record, self.record.step + 1
        self.checkpointer.check()
        selection = self.filter(groups)
        metrics = await self.learn(selection) if selection.groups else {}
        weight_update_seconds = await self.publish(step) if selection.groups else 0.0
        record.step = step
        record.cursor = runtime.cursor.state()
        record.lost_batches = self._guard.lost_batches
        record.train_seconds = self.clock() - begin
        record.recompilations = engine.recompilations + self._learner_recompilations()
        record.max_logprob_gap = max(record.max_logprob_gap, metrics.get("logprob_gap_max", 0.0))
        line = step_record(
            step,
            groups,
            metrics,
            engine,
            accounting=runtime.collector.accounting.summary(),
            rollout_seconds=rollout_seconds,
            weight_update_seconds=weight_update_seconds,
            step_seconds=self.clock() - step_began,
            recompilations=record.recompilations,
        )
        self.folder.add_metrics(line)
        self.folder.add_trajectories(step, "train", all_trajectories(groups))
        left = (runtime.config.trainer.steps - step) * record.train_seconds / step
        self.progress.step(line | {"accuracy": record.latest_accuracy}, seconds_left=left)
        record.latest_accuracy = None
        every = runtime.config.trainer.checkpoint_every
        if every and step % every == 0:
            self.save()

    async def collect(self, step: int) -> tuple[list[Group], BackendMetrics]:
        """``prompts_per_step`` groups of ``group_size`` trajectories, and what the engine did for them.

        With ``algorithm.max_refills``, new prompts replace groups that the filters will leave out.
        """
        config, algorithm = self.runtime.config.rollout, self.runtime.config.algorithm
        before = await self.runtime.metrics()
        groups: list[Group] = []
        for round_ in range(1 + algorithm.max_refills):
            missing = config.prompts_per_step - len(select(groups, algorithm).groups)
            if not missing:
                break
            rows = self.runtime.cursor.next_rows(missing)
            groups += await self.collect_round(rows, step, f"refill{round_}" if round_ else "train")
        return groups, _difference(await self.runtime.metrics(), before)

    async def collect_round(self, rows: Sequence[dict], step: int, label: str) -> list[Group]:
        """One group per row, with shaped rewards and, for ReMax, the reward of a greedy rollout."""
        config, algorithm = self.runtime.config.rollout, self.runtime.config.algorithm
        sampling = SamplingParams(
            max_tokens=config.max_model_len,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
        )
        collector, phase = self.runtime.collector, f"step {step}: rollout"
        groups = await self._gather(collector, rows, config.group_size, sampling, step, label, phase)
        limit = self.runtime.config.agent.max_response_length
        groups = [shape(group, algorithm.shaping, max_response_length=limit) for group in groups]
        if algorithm.adv_estimator != "remax":
            return groups
        greedy = await self._gather(
            collector, rows, 1, replace(sampling, temperature=0.0), step, f"greedy-{label}", f"{phase}, greedy"
        )
        greedy = [shape(group, algorithm.shaping, max_response_length=limit) for group in greedy]
        collector.accounting.drop([t.trajectory_id for t in all_trajectories(greedy)], DropReason.GREEDY)
        return [
            replace(group, greedy_reward=baseline.rewards[0] if baseline.rewards else None)
            for group, baseline in zip(groups, greedy, strict=True)
        ]

    def filter(self, groups: Sequence[Group]) -> Selection:
        """What is worth a gradient; the rest is counted as dropped, by reason."""
        selection = select(groups, self.runtime.config.algorithm)
        for reason, ids in selection.dropped.items():
            self.runtime.collector.accounting.drop(ids, reason)
        return selection

    async def learn(self, selection: Selection) -> dict[str, float]:
        """One learner step in a thread, so that the loop (display, tools) goes on."""
        ticks = [0, 0]

        def tick(done: int, total: int) -> None:
            ticks[:] = done, total

        self.progress.phase(
            f"step {self.record.step + 1}: learner", lambda: f"{ticks[0]}/{ticks[1] or '?'} micro-batches"
        )
        update = self.runtime.learner.update
        result = await asyncio.to_thread(update, selection.groups, masked=selection.masked, tick=tick, gate=self._gate)
        self._account(selection, result)
        if not self.record.learner_programs and "loss" in result.metrics:  # not while only a critic learns
            self.record.learner_programs = self.runtime.learner.programs_compiled
        return result.metrics

    async def publish(self, version: int) -> float:
        """New weights to every engine; version and prefix cache change with them.

        Returns:
            seconds from the learner's parameters to engines that serve them: export, transfer, loading, proof.
        """
        begin = self.clock()
        update = await asyncio.to_thread(self.runtime.publisher.make, self.runtime.learner.params, version)
        await self.runtime.client.update_weights(update)
        return self.clock() - begin

    async def evaluate(self) -> float | None:
        """Mean reward on the held-out rows (None if there are none), recorded as a line of metrics."""
        runtime = self.runtime
        if not runtime.heldout:
            self.record.evaluated = self.record.step
            return None
        config = runtime.config.rollout
        sampling = SamplingParams(max_tokens=config.max_model_len, temperature=config.eval_temperature)
        begin = self.clock()
        step = self.record.step
        label = f"held-out evaluation after step {step}"
        groups = await self._gather(runtime.evaluator, runtime.heldout, 1, sampling, step, "heldout", label)
        trajectories = all_trajectories(groups)
        runtime.evaluator.accounting.train(t.trajectory_id for t in trajectories)
        line = evaluation_record(step, groups, seconds=self.clock() - begin)
        self.folder.add_metrics(line)
        self.folder.add_trajectories(step, "heldout", trajectories)
        self.record.latest_accuracy, self.record.evaluated = line["accuracy"], step
        self.progress.say(
            f"  held-out accuracy after step {step}: {line['accuracy']:.1%} of {len(groups)} ({line['seconds']:.0f} s)"
        )
        return line["accuracy"]

    def save(self) -> None:
        """A checkpoint of the last finished step, if there is none yet."""
        self.record.accounting = self.runtime.collector.accounting.state()
        self.checkpointer.save(self.record.step, self.runtime.learner.state, self.record.to_json())

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
        total, done, groups = len(rows) * group_size, 0, []
        self.progress.phase(phase, lambda: f"{done}/{total} trajectories")
        stream = collector.collect(rows, group_size=group_size, sampling=sampling, step=step, label=label)
        async with aclosing(stream):
            async for group in stream:
                groups.append(group)
                done += group_size
        self.runtime.client.require_server()  # else what was lost would look like the policy's failure
        self._guard.check(groups, collector.latest_losses)
        # Groups arrive as they finish; batches must not depend on that.
        return sorted(groups, key=lambda g: int(g.group_id.rsplit("-", 1)[1]))

    def _account(self, selection: Selection, result: UpdateResult) -> None:
        """Books every trajectory that was handed to the learner."""
        accounting = self.runtime.collector.accounting
        for trajectory in all_trajectories(selection.groups):
            mine = trajectory.trajectory_id
            if mine in selection.masked:
                accounting.drop([mine], selection.masked[mine])
            elif result.skipped:
                accounting.drop([mine], DropReason.NON_FINITE)
            elif mine in result.rejected:
                accounting.drop([mine], DropReason.REJECTED)
            else:
                accounting.train([mine])

    def _learner_recompilations(self) -> int:
        known = self.record.learner_programs
        return max(0, self.runtime.learner.programs_compiled - known) if known else 0


def _difference(after: BackendMetrics, before: BackendMetrics) -> BackendMetrics:
    """What happened between two readings; ``recompilations`` stays the total."""
    names = [name for name in BackendMetrics.__dataclass_fields__ if name != "recompilations"]
    return BackendMetrics(
        **{name: getattr(after, name) - getattr(before, name) for name in names}, recompilations=after.recompilations
    )


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Members of all groups, in order."""
    return [t for g in groups for t in g.trajectories]
