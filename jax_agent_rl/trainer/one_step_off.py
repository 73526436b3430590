"""The one-step-off trainer: the next batch is rolled out while this one is learnt from.

::

    time ─►   engine   [ rollout 1 ][ rollout 2   ]  [ rollout 3 ]    [ rollout 4
              learner               [ learn 1 ]   ^  [ learn 2      ]^[ learn 3         ^ weights
              sampled by         0             0              1               2

    rollout          consumes: the complete batch.      produces: the next batch, begun.     waits for: nothing.
    publish_weights  consumes: the learner's weights.   produces: a version in every engine. waits for: that batch.

Weights change only between rollouts, so a trajectory is of one version, the one before the weights it trains: staleness
is 1 (0 in the first step). It needs nothing of the engine that the synchronous trainer does not. A step lasts as long
as the slower of the two.
"""

from __future__ import annotations

from jax_agent_rl.collect.filters import Selection
from jax_agent_rl.trainer.base import Collected
from jax_agent_rl.trainer.streaming import StreamTrainer


class OneStepOffTrainer(StreamTrainer):
    """Rollout of step k + 1 overlaps the learning of step k."""

    async def rollout(self) -> Collected:
        batch = self.buffer.batch
        self.stream.want(batch)
        collected = await self.take_batch()
        self.stream.want(min(batch, self.wanted_after(self.record.step + 1)))
        return collected

    async def publish_weights(self, version: int, selection: Selection) -> float:
        """Publish once the next batch is complete."""
        began = self.clock()
        self.progress.phase(f"step {version}: learner waits for the next rollout", self.rollout_status)
        with self.phases.of("wait"):
            await self.stream.idle()
        self.learner_idle_seconds += self.clock() - began
        return await self.publish(version)

    def on_step_end(self, version: int) -> None:
        self.stream.finish_step(version, want=0)
