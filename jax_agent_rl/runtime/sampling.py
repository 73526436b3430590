"""The half of a run that samples: rows, tools, rewards, agents, engines. Training adds a learner to it
(:mod:`~jax_agent_rl.runtime.build`); evaluation and collection do without one (:func:`open_rollouts`).

::

    prepare ──► open_places ──► open_agents ──► preflight ──► open_manager ──► its engines start
    (cheap checks)  (Ray)       (judge, too)    (servers)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.agents import EnvironmentAgent, agent_names, load_agents
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.config.default_agent import report_idle_tools
from jax_agent_rl.data.rows import Row, load_rows
from jax_agent_rl.environments import load_environments, require_environments
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.lifecycle import LLMServerManager
from jax_agent_rl.runtime.agents import AgentSide, make_agents
from jax_agent_rl.runtime.engines import backend_factories, check_engine, load_model, read_model, recovery_seconds
from jax_agent_rl.runtime.placement import open_places, place_engines
from jax_agent_rl.runtime.scoring import needed_services, open_scorer, reward_server
from jax_agent_rl.tools.loading import open_tools
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.tracing import Tracer

logger = logging.getLogger(__name__)

Source = tuple[str, int | None]
"""A file of rows, and how many of its first ones are used (None: all)."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the cheap checks of a configuration found.

    Attributes:
        tools: those of the ``tools`` section, open.
        rows: of each source.
        services: what the rows' reward functions ask for.
        codec: messages to ids and back.
    """

    tools: ToolRegistry
    rows: list[list[Row]]
    services: set[str]
    codec: ChatCodec


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Everything that samples, started.

    Attributes:
        config: the resolved configuration.
        client: generation over all engines.
        agents: the collectors.
        codec: ids to text and back.
        rows: to sample for.
    """

    config: Config
    client: LLMServerClient
    agents: AgentSide
    codec: ChatCodec
    rows: list[Row]


@asynccontextmanager
async def prepare(config: Config, sources: Sequence[Source]) -> AsyncIterator[Prepared]:
    """Imports what the configuration names and reads the rows; tools and the reward server are closed in the end.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: what a user has to fix.
    """
    async with open_tools(config.tools) as tools, reward_server(config):
        load_agents(config.agent.module)
        load_environments(config.environments.path)
        rows = [_load(config, tools, source) for source in sources]
        services = needed_services(config, [row for part in rows for row in part])
        codec = open_codec(config)
        check_engine(config)
        yield Prepared(tools=tools, rows=rows, services=services, codec=codec)


def open_codec(config: Config) -> ChatCodec:
    """The model's tokenizer and chat template as the run uses them; ModelError if they cannot be read."""
    return ChatCodec.from_pretrained(
        config.model.path,
        tool_format=config.agent.tool_format,
        tool_prompt=config.agent.tool_prompt,
        pixels=config.model.pixels,
    )


@asynccontextmanager
async def open_agents(
    config: Config, prepared: Prepared, *, tracer: Tracer | None = None
) -> AsyncIterator[tuple[LLMServerClient, AgentSide]]:
    """The client, without engines as yet, and the agents that speak to it; closed in the end.

    Args:
        tracer: takes the spans of trajectories.

    Raises:
        ConfigError, ModelError: a service, the default agent or an interaction is missing or wrong.
    """
    client = LLMServerClient(
        decode_text=functools.partial(prepared.codec.decode, skip_special_tokens=False),
        max_in_flight_per_server=config.rollout.max_in_flight_per_server,
        wait_for_server_seconds=config.rollout.wait_for_server_seconds,
    )
    async with open_scorer(config, prepared.services, client=client, codec=prepared.codec) as score:
        agents = make_agents(
            config, client=client, codec=prepared.codec, tools=prepared.tools, score=score, tracer=tracer
        )
        try:
            yield client, agents
        finally:
            await agents.close()


@asynccontextmanager
async def open_manager(config: Config, client: LLMServerClient) -> AsyncIterator[LLMServerManager]:
    """What starts the engines, looks after them and closes them in the end."""
    manager = LLMServerManager(
        client,
        recovery_seconds=recovery_seconds(config),
        stall_seconds=config.rollout.stall_seconds,
        seed=config.seed,
    )
    try:
        yield manager
    finally:
        await manager.close()


@asynccontextmanager
async def open_rollouts(
    config: Config, source: Source, *, version: int, say: Callable[[str], None]
) -> AsyncIterator[Rollouts]:
    """Loads, compiles and starts all that samples from the model's files; closes it in the end.

    Args:
        source: the rows to sample for.
        version: policy version of the model's files, for an engine in this process.
        say: takes a line of progress.

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: what a user has to fix.
    """
    async with AsyncExitStack() as stack:
        prepared = await stack.enter_async_context(prepare(config, [source]))
        (rows,), codec = prepared.rows, prepared.codec
        places = await stack.enter_async_context(open_places(config, learner=False))
        client, agents = await stack.enter_async_context(open_agents(config, prepared))
        await agents.preflight(rows)
        say(f"loading {config.model.path}")
        if config.rollout.backend != "remote":
            read_model(config, codec, codec.encode_prompt(rows[0]["prompt"]) if rows[0]["prompt"] else ())
        here = backend_factories(
            config, codec, weights=functools.partial(load_model, config, codec), say=say, version=version
        )
        manager = await stack.enter_async_context(open_manager(config, client))
        say(f"starting the {config.rollout.backend} engine")
        await manager.start(place_engines(config, places, here))
        yield Rollouts(config=config, client=client, agents=agents, codec=codec, rows=rows)


def known_adapters(config: Config) -> list[str] | None:
    """Names that rows may give; only rollout servers know those that they serve."""
    return None if config.rollout.backend == "remote" else list(config.rollout.adapters)


def _load(config: Config, tools: ToolRegistry, source: Source) -> list[dict[str, Any]]:
    """Rows of a file, every name in them checked; warns of tools that no row will use."""
    file, limit = source
    rows = load_rows(file, agents=agent_names(), tools=list(tools), adapters=known_adapters(config))[:limit]
    names = ((row.get("agent_name") or config.agent.default_agent, row) for row in rows)
    require_environments([row for name, row in names if name == EnvironmentAgent.name])
    if idle := report_idle_tools(config, rows):
        logger.warning("TOOLS ARE CONFIGURED BUT NOT USED: %s: %s. What to do: %s", file, *idle)
    return rows
