"""Everything of a run, built in one process: engine and learner on its devices, agents on one asyncio loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jax_agent_rl.agents import AgentContext
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.data.rows import load_rows
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rewards import load_rewards, require_rewards, score
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.collect import RolloutCollector
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.engines import Publisher, make_engine
from jax_agent_rl.tools.registry import ToolRegistry


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts a trainer drives.

    Attributes:
        config: the resolved configuration.
        codec: ids to text and back.
        backend: the engine, for its metrics.
        client: generation and weight updates over all engines.
        collector: training rollouts, with the run's accounting.
        evaluator: held-out rollouts, counted apart.
        learner: parameters and optimizer.
        publisher: turns the learner's parameters into updates the engine takes.
        cursor: the order of the training rows.
        heldout: rows to evaluate on.
    """

    config: Config
    codec: ChatCodec
    backend: RolloutBackend
    client: LLMServerClient
    collector: RolloutCollector
    evaluator: RolloutCollector
    learner: Learner
    publisher: Publisher
    cursor: DataCursor
    heldout: list[dict[str, Any]]


@asynccontextmanager
async def build(config: Config, *, say: Callable[[str], None]) -> AsyncIterator[Runtime]:
    """Loads, compiles and starts everything; closes it in the end.

    Cheap checks come first, so that a wrong path is reported before minutes of loading.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: what a user has to fix.
    """
    load_rewards(config.reward.path)
    tools = ToolRegistry.from_path(config.tools.function_tool_path)
    train = load_rows(config.data.train)
    heldout = load_rows(config.data.heldout)[: config.data.heldout_limit] if config.data.heldout else []
    require_rewards([*train, *heldout])
    codec = ChatCodec.from_pretrained(
        config.model.path, tool_format=config.agent.tool_format, tool_prompt=config.agent.tool_prompt
    )
    _check_devices(config)
    say(f"loading {config.model.path}")
    model, params = load_hf(config.model.path)
    learner = Learner(
        model,
        params,
        algorithm=config.algorithm,
        config=config.learner,
        temperature=config.rollout.temperature,
    )
    probe_ids = codec.encode_prompt(train[0]["prompt"])
    backend, publisher = make_engine(config, model, params, codec, probe_ids=probe_ids, say=say)
    del params
    say(f"starting the {config.rollout.backend} engine")
    await backend.start()
    try:
        client = LLMServerClient([AsyncServer(backend, name="engine-0")])
        context = AgentContext(
            client=client, codec=codec, tools=tools, limits=config.agent, max_model_len=config.rollout.max_model_len
        )
        parts = {"score": score, "max_in_flight": config.rollout.max_in_flight, "seed": config.seed}
        yield Runtime(
            config=config,
            codec=codec,
            backend=backend,
            client=client,
            collector=RolloutCollector(context, **parts),
            evaluator=RolloutCollector(context, **parts),
            learner=learner,
            publisher=publisher,
            cursor=DataCursor(train, seed=config.seed),
            heldout=heldout,
        )
    finally:
        await backend.close()
        publisher.close()


def _check_devices(config: Config) -> None:
    mesh = config.learner.mesh
    need, have = mesh.data * mesh.fsdp * mesh.tensor, jax.device_count()
    if need > have:
        raise ConfigError(
            f"learner.mesh data*fsdp*tensor = {need}, but this machine has {have} device(s); lower learner.mesh"
        )
