"""The synchronous trainer: the algorithm, top to bottom.

::

    evaluate ─► repeat: rows ─► groups of trajectories ─► select ─► update ─► publish ─► record ─► checkpoint
                   ▲      (engine, agents, tools)          │ (learner)  (learner → engine)
                   └──── refill: too few groups are left ──┘
             ─► evaluate ─► summary

    time ─►   engine   [ rollout 1 ]            [ rollout 2 ]            [ rollout 3 ]
              learner               [ learn 1 ]^             [ learn 2 ]^             …        ^ weights

Every trajectory of a step is sampled from the weights of the step before, so it is on-policy;
:mod:`~jax_agent_rl.trainer.asynchronous` relaxes exactly that. What follows the rollout is the same everywhere:
:mod:`~jax_agent_rl.trainer.base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax_agent_rl.collect.filters import Selection, select
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.step import RolloutBatch, all_trajectories, shaped, training_sampling
from jax_agent_rl.types import DropReason, Group


class SyncTrainer(Trainer):
    """Rolls out, learns, publishes; one after the other."""

    async def rollout(self) -> RolloutBatch:
        began = self.clock()
        with self.phases.measure("rollout"):
            groups, engine = await self.collect(self.record.step + 1)
        self.learner_idle_seconds = self.clock() - began
        self.phases.ended("engine", self.learner_idle_seconds)
        return RolloutBatch(groups=groups, engine=engine, seconds=self.learner_idle_seconds)

    async def publish(self, version: int, selection: Selection) -> float:
        """Publish if anything was learned."""
        return await self.push_weights(version) if selection.groups else 0.0

    async def collect(self, step: int) -> tuple[list[Group], BackendMetrics]:
        """Collect ``prompts_per_step`` groups; also return what the engines did for them.

        With ``algorithm.max_resample_rounds``, new prompts replace groups that the filters will leave out.
        """
        config, algorithm = self.runtime.config.rollout, self.runtime.config.algorithm
        before = await self.runtime.metrics()
        groups: list[Group] = []
        for round_ in range(1 + algorithm.max_resample_rounds):
            missing = config.prompts_per_step - len(select(groups, algorithm).groups)
            if not missing:
                break
            rows = self.runtime.cursor.next_rows(missing)
            groups += await self.collect_round(rows, step, f"refill{round_}" if round_ else "train")
        return groups, (await self.runtime.metrics()).since(before)

    async def collect_round(self, rows: Sequence[dict], step: int, label: str) -> list[Group]:
        """Collect one group per row, with shaped rewards and, for ReMax, the reward of a greedy rollout."""
        config, collector, phase = self.runtime.config, self.runtime.collector, f"step {step}: rollout"
        sampling = training_sampling(config)
        groups = await self._gather(collector, rows, config.rollout.group_size, sampling, step, label, phase)
        if config.algorithm.adv_estimator != "remax":
            return [shaped(group, config) for group in groups]
        greedy = await self._gather(
            collector, rows, 1, replace(sampling, temperature=0.0), step, f"greedy-{label}", f"{phase}, greedy"
        )
        collector.accounting.drop([t.trajectory_id for t in all_trajectories(greedy)], DropReason.GREEDY)
        return [shaped(group, config, baseline) for group, baseline in zip(groups, greedy, strict=True)]
