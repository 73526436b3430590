"""Scoring of a run's trajectories: the ``reward`` section, and the services that reward functions need."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.collect.collector import Score
from jax_agent_rl.config import Config, JudgeConfig, RewardConfig
from jax_agent_rl.rewards import (
    ModelJudge,
    RemoteReward,
    load_rewards,
    register_reward,
    require_rewards,
    score,
)
from jax_agent_rl.rewards.registry import find_reward
from jax_agent_rl.rewards.workers import FunctionWorkers
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.runtime.frozen_models import open_frozen_model
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.types import SamplingParams

POLICY = "policy"
"""Value of ``reward.judge.model`` for the model being trained."""


@asynccontextmanager
async def reward_server(config: Config) -> AsyncIterator[None]:
    """Register the user's reward functions and ``reward.remote``; close its connections in the end.

    Raises:
        ConfigError: ``reward.path`` cannot be imported, or a data source already has a function.
    """
    load_rewards(config.reward.path)
    if config.reward.remote is None:
        yield
        return
    remote = RemoteReward(**config.reward.remote.model_dump(exclude={"data_sources"}))
    # It may replace a built-in rule: the configuration names its data sources.
    register_reward(*config.reward.remote.data_sources, override=True)(remote)
    try:
        yield
    finally:
        await remote.close()


def needed_services(config: Config, rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the services that the rows' reward functions need, and check that they exist.

    With ``algorithm.adv_estimator=none`` nothing is learned from rewards: rows may have no function, and get 0.

    Raises:
        ConfigError: a row has no reward function, or its function needs a missing service.
    """
    if config.algorithm.adv_estimator == "none":
        sources = {str(row.get("data_source")) for row in rows}
        register_reward(*sorted(s for s in sources if find_reward(s) is None))(_no_reward)
    offered = {"sandbox", *(["judge"] if config.reward.judge else [])}
    return require_rewards(rows, services=offered)


def _no_reward() -> float:
    return 0.0


@asynccontextmanager
async def open_scorer(
    config: Config, needed: set[str], *, client: LLMServerClient, codec: ChatCodec
) -> AsyncIterator[Score]:
    """Start the needed services and yield the function that scores one trajectory.

    Args:
        config: the run's configuration.
        needed: see :func:`needed_services`.
        client: the policy's engines, for ``reward.judge.model: policy``.
        codec: the policy's codec.

    Raises:
        ConfigError: the sandbox does not work on this machine.
        ModelError: the judge's model cannot be loaded.
    """
    services: dict[str, Any] = {}
    if "sandbox" in needed:
        services["sandbox"] = await open_sandbox(config.reward.sandbox)
    with _function_workers(config.reward) as workers:
        scorer = functools.partial(score, timeout=config.reward.timeout, workers=workers)
        if "judge" not in needed or config.reward.judge is None:
            yield functools.partial(scorer, services=services)
            return
        stall_seconds = config.rollout.stall_seconds
        async with _open_judge(config.reward.judge, client=client, codec=codec, stall_seconds=stall_seconds) as judge:
            yield functools.partial(scorer, services=services | {"judge": judge})


@contextmanager
def _function_workers(config: RewardConfig) -> Iterator[FunctionWorkers | None]:
    """Yield the workers for the user's synchronous functions; they start when first needed."""
    if config.path is None or config.workers == 0:
        yield None
        return
    workers = FunctionWorkers(config.path, size=config.workers)
    try:
        yield workers
    finally:
        workers.close()


@asynccontextmanager
async def _open_judge(
    config: JudgeConfig, *, client: LLMServerClient, codec: ChatCodec, stall_seconds: float | None
) -> AsyncIterator[ModelJudge]:
    """Yield the policy as its own judge, or a frozen model in its own engine."""
    sampling = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature)
    if config.model == POLICY:
        yield ModelJudge(client, codec, sampling=sampling, max_in_flight=config.max_in_flight)
        return
    codec = ChatCodec.from_pretrained(config.model, tool_format="hermes", tool_prompt="none")
    async with open_frozen_model(
        config.model,
        codec,
        max_model_len=config.max_model_len,
        max_concurrent=config.max_in_flight,
        stall_seconds=stall_seconds,
    ) as judge_client:
        yield ModelJudge(judge_client, codec, sampling=sampling, max_in_flight=config.max_in_flight)
