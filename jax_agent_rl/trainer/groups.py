"""How groups of trajectories are sampled and collected, and what is done to them before rewards are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from jax_agent_rl.collect.collector import RolloutCollector
from jax_agent_rl.collect.filters import shape
from jax_agent_rl.config import Config
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.types import Group, SamplingParams, Trajectory


def training_sampling(config: Config) -> SamplingParams:
    """Return the sampling of every turn of a training rollout."""
    return SamplingParams(max_tokens=config.rollout.max_model_len, temperature=config.rollout.temperature)


def evaluation_sampling(config: Config) -> SamplingParams:
    """Return the sampling of every turn of a held-out rollout."""
    return SamplingParams(max_tokens=config.rollout.max_model_len, temperature=config.rollout.eval_temperature)


async def gather(
    collector: RolloutCollector,
    client: LLMServerClient,
    rows: Sequence[dict],
    *,
    group_size: int,
    sampling: SamplingParams,
    step: int,
    label: str,
    arrived: Callable[[Group], None],
) -> list[Group]:
    """Collect one group per row, in the rows' order: groups arrive as they finish, and nothing may depend on that.

    Args:
        collector: runs the rollouts.
        client: of the engines.
        rows: of the dataset.
        group_size: trajectories of each group.
        sampling: of every turn.
        step: see :meth:`RolloutCollector.collect`.
        label: see :meth:`RolloutCollector.collect`.
        arrived: called with each complete group.

    Raises:
        EngineDiedError: no server is left; lost groups would look like failures of the policy.
    """
    groups = []
    async with aclosing(
        collector.collect(rows, group_size=group_size, sampling=sampling, step=step, label=label)
    ) as stream:
        async for group in stream:
            groups.append(group)
            arrived(group)
    client.require_server()
    return sorted(groups, key=lambda group: int(group.group_id.rsplit("-", 1)[1]))


def shaped(group: Group, config: Config) -> Group:
    """Apply ``algorithm.shaping`` to the rewards."""
    return shape(group, config.algorithm.shaping, max_response_length=config.agent.max_response_length)


def with_baseline(group: Group, greedy: Group) -> Group:
    """Add the reward of a greedy rollout of the same prompt, if there is one (ReMax)."""
    return replace(group, greedy_reward=greedy.rewards[0] if greedy.rewards else None)


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Return the members of all groups, in order."""
    return [t for g in groups for t in g.trajectories]
