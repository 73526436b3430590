"""The synchronous trainer: the algorithm, top to bottom.

::

    repeat: rows ─► groups of trajectories ─► select ─► update ─► publish ─► record ─► checkpoint
             ▲      (engine, agents, tools)     │     (learner) (learner → engine)
             └── refill: too few are left ──────┘

    time ─►   engine   [ rollout 1 ]            [ rollout 2 ]            [ rollout 3 ]
              learner               [ learn 1 ]^             [ learn 2 ]^             …
                                               weights                  weights

Every trajectory of a step is sampled from the weights that the step trains, so it is on-policy;
:mod:`~jax_agent_rl.trainer.asynchronous` relaxes exactly that. What follows the rollout is the same
everywhere: :mod:`~jax_agent_rl.trainer.base`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jax_agent_rl.collect.filters import Selection, select
from jax_agent_rl.trainer.base import Trainer
from jax_agent_rl.trainer.step import RolloutBatch, training_sampling
from jax_agent_rl.types import Group


class SyncTrainer(Trainer):
    """Rolls out, learns, publishes; one after the other."""

    async def rollout(self) -> RolloutBatch:
        """Collect ``prompts_per_step`` groups.

        With ``algorithm.max_resample_rounds``, new prompts replace groups that the filters will
        leave out.
        """
        start_time = self.clock()
        step = self.record.step + 1
        prompts_per_step = self.runtime.config.rollout.prompts_per_step
        algorithm = self.runtime.config.algorithm

        groups: list[Group] = []
        with self.phases.measure("rollout"):
            metrics_before = await self.runtime.metrics()
            for resample_round in range(1 + algorithm.max_resample_rounds):
                missing = prompts_per_step - len(select(groups, algorithm).groups)
                if not missing:
                    break
                rows = self.runtime.cursor.next_rows(missing)
                label = f"refill{resample_round}" if resample_round else "train"
                groups += await self.collect_round(rows, step, label)
            metrics_after = await self.runtime.metrics()

        seconds = self.clock() - start_time
        self.learner_idle_seconds = seconds
        self.phases.ended("engine", seconds)
        return RolloutBatch(
            groups=groups, engine=metrics_after.since(metrics_before), seconds=seconds
        )

    async def publish(self, version: int, selection: Selection) -> float:
        """Publish if anything was learned."""
        if not selection.groups:
            return 0.0
        return await self.push_weights(version)

    async def collect_round(self, rows: Sequence[dict], step: int, label: str) -> list[Group]:
        """Collect one group per row, with shaped rewards."""
        collect = functools.partial(self.gather, self.runtime.collector, rows, step=step)
        groups = await collect(
            group_size=self.runtime.config.rollout.group_size,
            sampling=training_sampling(self.runtime.config),
            label=label,
            phase=f"step {step}: rollout",
        )
        collect_greedy = functools.partial(
            collect, label=f"greedy-{label}", phase=f"step {step}: rollout, greedy"
        )
        return await self.shape_rewards(groups, collect_greedy)
