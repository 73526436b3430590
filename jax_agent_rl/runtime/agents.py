"""The agents' side of a run: what their loops share, and the collectors that drive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.agents import AgentContext, get_agent
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.collect.collector import RolloutCollector, Score
from jax_agent_rl.collect.strategies import make_strategy
from jax_agent_rl.config import Config
from jax_agent_rl.environments import EnvironmentPools
from jax_agent_rl.environments.users import EngineChat, InteractionRegistry
from jax_agent_rl.errors import DataError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.tracing import Tracer


@dataclass(frozen=True, kw_only=True)
class AgentSide:
    """Training and held-out rollouts.

    Attributes:
        collector: training rollouts, with the run's accounting.
        evaluator: held-out rollouts, counted apart, with the ``agent.val_`` settings.
        interactions: the simulated users.
        environments: what ``environment_agent`` lives in.
    """

    collector: RolloutCollector
    evaluator: RolloutCollector
    interactions: InteractionRegistry
    environments: EnvironmentPools

    async def preflight(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Checks, before a run, what these rows need: simulated users, and the servers of their loops.

        Raises:
            ConfigError: a server or setting is missing or wrong.
            DataError: a row names an interaction there is not.
        """
        _check_interactions(rows, self.interactions)
        await self.collector.preflight(rows)

    async def close(self) -> None:
        """Closes connections, after the last trajectory."""
        for part in (self.collector, self.evaluator, self.interactions, self.environments):
            await part.close()


def make_agents(
    config: Config,
    *,
    client: LLMServerClient,
    codec: ChatCodec,
    tools: ToolRegistry,
    score: Score,
    tracer: Tracer | None = None,
) -> AgentSide:
    """Builds them; the client's engines may be added later.

    Raises:
        ConfigError: the default agent or an interaction is missing or wrong.
    """
    if config.agent.default_agent:
        get_agent(config.agent.default_agent)
    users = config.interactions
    interactions = InteractionRegistry.from_path(users.interaction_config_path, timeout=users.timeout)
    interactions.attach(EngineChat(client, codec, max_model_len=config.rollout.max_model_len))
    environments = EnvironmentPools(**config.environments.model_dump(exclude={"path"}))
    context = AgentContext(
        client=client,
        codec=codec,
        tools=tools,
        limits=config.agent,
        max_model_len=config.rollout.max_model_len,
        tool_config=config.tool_config,
        search=config.search,
        interactions=interactions,
        environments=environments,
    )
    parts = {"score": score, "max_in_flight": config.rollout.max_in_flight, "seed": config.seed, "tracer": tracer}
    return AgentSide(
        collector=RolloutCollector(context, strategy=make_strategy(config.rollout.strategy), **parts),
        evaluator=RolloutCollector(replace(context, limits=config.agent.for_validation()), validate=True, **parts),
        interactions=interactions,
        environments=environments,
    )


def _check_interactions(rows: Sequence[Mapping[str, Any]], known: InteractionRegistry) -> None:
    """Rows that name a simulated user there is not."""
    for row in rows:
        name = ((row.get("extra_info") or {}).get("interaction_kwargs") or {}).get("name")
        if name is not None and name not in known:
            raise DataError(
                f"a row's extra_info.interaction_kwargs.name={name!r} is not known; there are {sorted(known)} "
                "(interactions.interaction_config_path)"
            )
