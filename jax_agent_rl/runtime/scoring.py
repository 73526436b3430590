"""Scoring of a run's trajectories: the ``reward`` section, and the services of reward functions.

Frozen models in engines of their own are here as well: judges, and players of roles that are not
trained.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

from jax_agent_rl.agents import FrozenModel
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.chat.feedback import with_teacher_prompt
from jax_agent_rl.collect.collector import Score
from jax_agent_rl.config import Config, JudgeConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.shapes import EngineShapes, kv_cache_tokens
from jax_agent_rl.models.hf import load_hf
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
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.types import SamplingParams, Trajectory

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

    With ``algorithm.adv_estimator=none`` nothing is learned from rewards: rows may have no
    function, and get 0.

    Raises:
        ConfigError: a row has no reward function, or its function needs a missing service.
    """
    if config.algorithm.adv_estimator == "none":
        data_sources = {str(row.get("data_source")) for row in rows}
        without_reward = [name for name in sorted(data_sources) if find_reward(name) is None]
        register_reward(*without_reward)(_zero_reward)

    services = {"sandbox"}
    if config.reward.judge:
        services.add("judge")
    return require_rewards(rows, services=services)


def _zero_reward() -> float:
    return 0.0


@asynccontextmanager
async def open_scorer(
    config: Config,
    needed: set[str],
    *,
    client: LLMServerClient | None = None,
    codec: ChatCodec | None = None,
) -> AsyncIterator[Score]:
    """Start the needed services and yield the function that scores one trajectory.

    Args:
        needed: from :func:`needed_services`.
        client: the policy's engines, for ``reward.judge.model: policy``; None: there are none.
        codec: the policy's, for the same judge, and for the prompts of
            ``algorithm.kl.reference=feedback``; None: there are none.

    Raises:
        ConfigError: the sandbox does not work on this machine, or the policy should judge and has
            no engines.
        ModelError: the judge's model cannot be loaded.
    """
    services: dict[str, Any] = {}
    if "sandbox" in needed:
        services["sandbox"] = await open_sandbox(config.reward.sandbox)

    async with AsyncExitStack() as stack:
        workers = None
        if config.reward.path and config.reward.workers:
            # Its processes start when the first reward is computed.
            workers = FunctionWorkers(config.reward.path, size=config.reward.workers)
            stack.enter_context(closing(workers))

        if "judge" in needed and config.reward.judge is not None:
            services["judge"] = await stack.enter_async_context(
                _open_judge(
                    config.reward.judge,
                    client=client,
                    codec=codec,
                    stall_seconds=config.rollout.stall_seconds,
                )
            )
        score_one = functools.partial(
            score, timeout=config.reward.timeout, workers=workers, services=services
        )
        # Without a codec, trajectories are scored that nobody trains on.
        if config.algorithm.kl.reads_feedback and codec is not None:
            yield _with_teacher_prompts(config, score_one, codec)
        else:
            yield score_one


def _with_teacher_prompts(config: Config, score_one: Score, codec: ChatCodec) -> Score:
    """Let a scorer add the prompt under which the policy teaches itself."""
    feedback = config.algorithm.feedback

    async def score_and_prompt(trajectory: Trajectory) -> Trajectory:
        return with_teacher_prompt(
            await score_one(trajectory),
            codec,
            template=feedback.template,
            max_feedback_length=feedback.max_length,
            max_length=config.learner.pack_length,
        )

    return score_and_prompt


@asynccontextmanager
async def _open_judge(
    config: JudgeConfig,
    *,
    client: LLMServerClient | None,
    codec: ChatCodec | None,
    stall_seconds: float | None,
) -> AsyncIterator[ModelJudge]:
    """Yield the policy as its own judge, or a frozen model in its own engine."""
    sampling = SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature)
    if config.model == POLICY:
        if client is None or codec is None:
            raise ConfigError(
                "reward.judge.model=policy, but no engine of the policy runs here; set"
                " reward.judge.model to the folder of a model"
            )
        codec = codec.with_template_kwargs(config.chat_template_kwargs)
        yield ModelJudge(client, codec, sampling=sampling, max_in_flight=config.max_in_flight)
        return

    codec = ChatCodec.from_pretrained(
        config.model,
        tool_format="hermes",
        tool_prompt="none",
        template_kwargs=config.chat_template_kwargs,
    )
    async with open_frozen_model(
        config.model,
        codec,
        max_model_len=config.max_model_len,
        max_concurrent=config.max_in_flight,
        stall_seconds=stall_seconds,
    ) as judge_client:
        yield ModelJudge(judge_client, codec, sampling=sampling, max_in_flight=config.max_in_flight)


@asynccontextmanager
async def open_frozen_model(
    folder: str,
    codec: ChatCodec,
    *,
    max_model_len: int,
    max_concurrent: int,
    stall_seconds: float | None,
) -> AsyncIterator[LLMServerClient]:
    """Load a model, start an engine of its own, and yield its client; close both in the end.

    Args:
        folder: of the model (Hugging Face).
        codec: the model's, not the policy's.
        max_model_len: longest context, in tokens.
        max_concurrent: requests that decode at the same time.
        stall_seconds: ``rollout.stall_seconds``: an engine without progress for so long is lost.

    Raises:
        ModelError: the model cannot be loaded.
    """
    model, params = load_hf(folder)
    shapes = EngineShapes(
        max_model_len=max_model_len,
        max_concurrent_decodes=max_concurrent,
        kv_cache_tokens=kv_cache_tokens(max_model_len, max_concurrent, max_concurrent),
        decode_steps=16,
        prefill_buckets=(128, 512),
    )
    decode = functools.partial(codec.decode, skip_special_tokens=False)
    make_engine = functools.partial(
        JetStreamBackend, model, params, shapes, seed=0, decode_text=decode
    )
    client = LLMServerClient(decode_text=decode, stall_seconds=stall_seconds)
    try:
        await client.pool.start({f"frozen {folder}": make_engine})
        yield client
    finally:
        await client.pool.close()


@asynccontextmanager
async def open_role_models(config: Config) -> AsyncIterator[dict[str, FrozenModel]]:
    """Yield the models of ``agent.role_models`` by role; roles of one folder share an engine.

    Raises:
        ModelError: a model cannot be loaded.
    """
    rollout = config.rollout
    max_concurrent = min(rollout.max_in_flight, rollout.jetstream.max_concurrent_decodes)
    models: dict[str, FrozenModel] = {}  # by folder
    async with AsyncExitStack() as stack:
        for folder in config.agent.role_models.values():
            if folder in models:
                continue
            codec = ChatCodec.from_pretrained(
                folder,
                tool_format=config.agent.tool_format,
                tool_prompt=config.agent.tool_prompt,
                template_kwargs=config.agent.chat_template_kwargs,
            )
            client = await stack.enter_async_context(
                open_frozen_model(
                    folder,
                    codec,
                    max_model_len=rollout.max_model_len,
                    max_concurrent=max_concurrent,
                    stall_seconds=rollout.stall_seconds,
                )
            )
            models[folder] = FrozenModel(client=client, codec=codec)
        yield {role: models[folder] for role, folder in config.agent.role_models.items()}
