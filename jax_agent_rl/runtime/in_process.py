"""Everything of a run, built in one process: engine and learner on its devices, agents on one asyncio loop."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.agents import EnvironmentAgent, agent_names, load_agents
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.data.cursor import DataCursor
from jax_agent_rl.data.rows import load_rows
from jax_agent_rl.environments import load_environments, require_environments
from jax_agent_rl.learner.sharding import make_mesh
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.collect import RolloutCollector
from jax_agent_rl.rollout.manager import LLMServerManager
from jax_agent_rl.rollout.protocol import BackendMetrics
from jax_agent_rl.runtime.agents import make_agents
from jax_agent_rl.runtime.engines import backend_factories, check_engine, one_program, read_model, recovery_seconds
from jax_agent_rl.runtime.fleet import FleetMetrics
from jax_agent_rl.runtime.learners import make_learner
from jax_agent_rl.runtime.multihost import LeadingLearner, Line
from jax_agent_rl.runtime.publishers import Publisher, make_publisher
from jax_agent_rl.runtime.scoring import needed_services, open_scorer, reward_server
from jax_agent_rl.tools.loading import open_tools
from jax_agent_rl.tools.registry import ToolRegistry


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The parts a trainer drives.

    Attributes:
        config: the resolved configuration.
        codec: ids to text and back.
        metrics: what all engines did so far.
        publisher: turns the learner's parameters into updates the engines take.
        client: generation and weight updates over all engines.
        collector: training rollouts, with the run's accounting.
        evaluator: held-out rollouts, counted apart.
        learner: parameters and optimizer.
        cursor: the order of the training rows.
        heldout: rows to evaluate on.
    """

    config: Config
    codec: ChatCodec
    metrics: Callable[[], Awaitable[BackendMetrics]]
    client: LLMServerClient
    collector: RolloutCollector
    evaluator: RolloutCollector
    learner: Learner | LeadingLearner
    publisher: Publisher
    cursor: DataCursor
    heldout: list[dict[str, Any]]


@asynccontextmanager
async def build(config: Config, *, say: Callable[[str], None], line: Line | None = None) -> AsyncIterator[Runtime]:
    """Loads, compiles and starts everything; closes it in the end.

    Cheap checks come first, so that a wrong path is reported before minutes of loading.

    Args:
        say: takes a line of progress.
        line: to the other processes of the learner, if there are any (``runtime.multihost``).

    Raises:
        ConfigError, DataError, ModelError, ToolDefinitionError: what a user has to fix.
    """
    async with AsyncExitStack() as stack:
        tools = await stack.enter_async_context(open_tools(config.tools))
        await stack.enter_async_context(reward_server(config))
        load_agents(config.agent.path)
        load_environments(config.environments.path)
        train, heldout = _load_data(config, tools)
        services = needed_services(config, [*train, *heldout])
        codec = ChatCodec.from_pretrained(
            config.model.path,
            tool_format=config.agent.tool_format,
            tool_prompt=config.agent.tool_prompt,
            pixels=config.model.pixels,
        )
        make_mesh(config.learner.mesh)  # or a ConfigError, before anything is loaded
        check_engine(config)
        client = LLMServerClient(
            decode_text=functools.partial(codec.decode, skip_special_tokens=False),
            max_in_flight_per_server=config.rollout.max_in_flight_per_server,
            wait_for_server_seconds=config.rollout.wait_for_server_seconds,
        )
        score = await stack.enter_async_context(open_scorer(config, services, client=client, codec=codec))
        agents = make_agents(config, client=client, codec=codec, tools=tools, score=score)
        stack.push_async_callback(agents.close)
        agents.collector.require_branching(train)
        await agents.preflight([*train, *heldout])
        say(f"loading {config.model.path}")
        probe_ids = codec.encode_prompt(train[0]["prompt"])
        model = read_model(config, codec, probe_ids)
        shared = one_program(config, model)
        learner = make_learner(config, model, score_by=shared and shared.score, line=line)
        publisher = make_publisher(config, model, probe_ids=probe_ids)
        stack.callback(publisher.close)
        factories = backend_factories(
            config,
            codec,
            weights=lambda: (model, learner.params),  # as the learner keeps them: under adapters rounded, perhaps
            say=say,
            table=shared and shared.table,
        )
        manager = LLMServerManager(
            client,
            recovery_seconds=recovery_seconds(config),
            stall_seconds=config.rollout.stall_seconds,
            seed=config.seed,
        )
        stack.push_async_callback(manager.close)
        say(f"starting the {config.rollout.backend} engine")
        await manager.start(factories)
        yield Runtime(
            config=config,
            codec=codec,
            metrics=FleetMetrics(lambda: manager.backends).read,
            client=client,
            collector=agents.collector,
            evaluator=agents.evaluator,
            learner=learner,
            publisher=publisher,
            cursor=DataCursor(train, seed=config.seed),
            heldout=heldout,
        )


def _load_data(config: Config, tools: ToolRegistry) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out rows, every name in them checked."""
    names = {"agents": agent_names(), "tools": list(tools)}
    train = load_rows(config.data.train, **names)
    heldout = load_rows(config.data.heldout, **names)[: config.data.heldout_limit] if config.data.heldout else []
    names_of = ((row.get("agent_name") or config.agent.default_agent, row) for row in (*train, *heldout))
    require_environments([row for name, row in names_of if name == EnvironmentAgent.name])
    return train, heldout
