"""How the trajectories of a group are sampled, and what is done to a group before anyone compares its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax_agent_rl.config import Config
from jax_agent_rl.rollout.shaping import shape
from jax_agent_rl.types import Group, SamplingParams, Trajectory


def training_sampling(config: Config) -> SamplingParams:
    """For every turn of a training rollout."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_model_len,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def shaped(group: Group, config: Config) -> Group:
    """With what ``algorithm.shaping`` takes off the rewards."""
    return shape(group, config.algorithm.shaping, max_response_length=config.agent.max_response_length)


def with_baseline(group: Group, greedy: Group) -> Group:
    """With the reward of a greedy rollout of the same prompt, if there is one (ReMax)."""
    return replace(group, greedy_reward=greedy.rewards[0] if greedy.rewards else None)


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Members of all groups, in order."""
    return [t for g in groups for t in g.trajectories]
