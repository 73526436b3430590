"""What scores the trajectories of a run: the config's reward section as one function."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.config import Config, RemoteRewardConfig
from jax_agent_rl.rewards import OverlongPenalty, RemoteReward, load_rewards, register_reward, score
from jax_agent_rl.rollout.collect import Score


def register_rewards(config: Config) -> list[str]:
    """Registers the user's reward functions and the reward server; returns the services functions may ask for.

    Raises:
        ConfigError: ``reward.path`` cannot be imported, or a data source has a function already.
    """
    load_rewards(config.reward.path)
    if config.reward.remote is not None:
        _register_remote(config.reward.remote)
    return [] if config.reward.judge is None else ["judge"]


def make_scorer(config: Config, services: Mapping[str, Any]) -> Score:
    """Scores one trajectory as the config says."""
    overlong = None
    if config.reward.overlong_buffer_length:
        overlong = OverlongPenalty(
            max_response_length=config.agent.max_response_length,
            buffer_length=config.reward.overlong_buffer_length,
            factor=config.reward.overlong_penalty_factor,
        )
    return functools.partial(score, timeout=config.reward.timeout, services=services, overlong=overlong)


def _register_remote(config: RemoteRewardConfig) -> None:
    settings = config.model_dump(exclude={"data_sources"})
    # It may take the place of a built-in rule: the config asks for it by name.
    register_reward(*config.data_sources, override=True)(RemoteReward(**settings))
