"""GRPO in one function: trains the calculator agent on exact tokens, without a trainer.

    jax-agent-rl fetch-model && jax-agent-rl prepare calculator --out data/calculator
    python examples/minimal_grpo.py trainer.steps=8

``build`` assembles the parts that a configuration describes: an engine, agents with their tools and
rewards, a learner. The loop below is the algorithm. What a trainer adds to it is checkpoints,
evaluation, metrics, interruption and overlap (``jax_agent_rl/trainer``).
"""

import asyncio
import sys

from jax_agent_rl.config import Config, load
from jax_agent_rl.runtime.build import build
from jax_agent_rl.types import DropReason, SamplingParams

RECIPE = "examples/calculator/config.yaml"


async def train(config: Config) -> list[float]:
    """Run GRPO for ``trainer.steps`` steps and return the mean reward of each."""
    mean_rewards = []
    sampling = SamplingParams(
        max_tokens=config.rollout.max_model_len, temperature=config.rollout.temperature
    )
    async with build(config, print_line=print) as run:
        for step in range(1, config.trainer.steps + 1):
            # 1. Rollout: every row is played group_size times. Trajectories hold the sampled ids,
            # their log-probs and
            #    the inserted tool results; a reward function has scored each of them.
            rows = run.cursor.next_rows(config.rollout.prompts_per_step)
            group_size = config.rollout.group_size
            groups = await run.collector.collect(
                rows, group_size=group_size, sampling=sampling, step=step, label="train"
            )

            # 2. Select: where all rewards of a group are equal, all its advantages are zero.
            learnable = [group for group in groups if len(set(group.rewards)) > 1]
            accounting = run.collector.accounting
            for group in groups:
                ids = [trajectory.trajectory_id for trajectory in group.trajectories]
                if group in learnable:
                    accounting.train(ids)
                else:
                    accounting.drop(ids, DropReason.ZERO_VARIANCE)

            # 3. Update: group-relative advantages, the clipped policy loss over packed rows, AdamW.
            loss = float("nan")
            if learnable:
                result = await asyncio.to_thread(run.learner.update, learnable)
                loss = result.metrics["loss"]

                # 4. Publish: the engine serves the new weights, and every token it samples now
                # carries this version.
                update = await asyncio.to_thread(run.transport.offer, run.learner, step)
                await run.client.pool.update_weights(update)

            rewards = [reward for group in groups for reward in group.rewards]
            mean_rewards.append(sum(rewards) / max(len(rewards), 1))
            print(
                f"step {step}: reward {mean_rewards[-1]:.3f}, loss {loss:+.4f}, {len(learnable)}"
                " groups learnt from"
            )
    return mean_rewards


if __name__ == "__main__":
    asyncio.run(train(load(RECIPE, sys.argv[1:])))
