"""Everything of a run, built in one process: engine and learner on its devices, agents on one asyncio loop."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from jax_agent_rl.agents import agent_names
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.data.rows import load_rows
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.engine import EngineShapes
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.rewards import load_rewards, require_rewards
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.collect import RolloutCollector
from jax_agent_rl.rollout.protocol import RolloutBackend
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.runtime.agents import make_agents
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
    names = {"agents": agent_names(), "tools": list(tools)}
    train = load_rows(config.data.train, **names)
    heldout = load_rows(config.data.heldout, **names)[: config.data.heldout_limit] if config.data.heldout else []
    require_rewards([*train, *heldout])
    codec = ChatCodec.from_pretrained(
        config.model.path, tool_format=config.agent.tool_format, tool_prompt=config.agent.tool_prompt
    )
    _check_devices(config)
    client = LLMServerClient(decode_text=functools.partial(codec.decode, skip_special_tokens=False))
    agents = await make_agents(config, client=client, codec=codec, tools=tools, rows=[*train, *heldout])
    say(f"loading {config.model.path}")
    model, params = load_hf(config.model.path)
    if not model.eos_token_ids:  # the files name none; the tokenizer does
        model = replace(model, eos_token_ids=codec.eos_token_ids)
    learner = Learner(
        model,
        params,
        algorithm=config.algorithm,
        config=config.learner,
        temperature=config.rollout.temperature,
    )
    backend = _make_backend(config, model, params, codec, say)
    del params
    say("compiling the engine's programs")
    await backend.start()
    try:
        client.add_server(AsyncServer(backend, name="engine-0"))
        yield Runtime(
            config=config,
            codec=codec,
            backend=backend,
            client=client,
            collector=agents.collector,
            evaluator=agents.evaluator,
            learner=learner,
            cursor=DataCursor(train, seed=config.seed),
            heldout=heldout,
        )
    finally:
        try:
            await agents.close()
        finally:
            await backend.close()


def _make_backend(
    config: Config, model: Any, params: Any, codec: ChatCodec, say: Callable[[str], None]
) -> RolloutBackend:
    if config.rollout.backend != "jetstream":
        raise ConfigError(f"rollout.backend={config.rollout.backend!r} is not available in this version; use jetstream")
    engine = config.rollout.jetstream
    lanes = min(engine.max_concurrent_decodes, config.rollout.max_in_flight)
    shapes = EngineShapes(
        max_model_len=config.rollout.max_model_len,
        max_concurrent_decodes=lanes,
        # A row for every trajectory in flight: none loses its KV while a tool runs.
        cache_rows=max(lanes, config.rollout.max_in_flight),
        decode_steps=engine.decode_steps,
        prefill_buckets=engine.prefill_buckets,
    )

    def progress(done: int, total: int) -> None:
        if done == total or done % 5 == 0:
            say(f"compiled {done} of {total} engine programs")

    return JetStreamBackend(
        model,
        params,
        shapes,
        seed=config.seed,
        decode_text=functools.partial(codec.decode, skip_special_tokens=False),
        progress=progress,
    )


def _check_devices(config: Config) -> None:
    mesh = config.learner.mesh
    need, have = mesh.data * mesh.fsdp * mesh.tensor, jax.device_count()
    if need > have:
        raise ConfigError(
            f"learner.mesh data*fsdp*tensor = {need}, but this machine has {have} device(s); lower learner.mesh"
        )
