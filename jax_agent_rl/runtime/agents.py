"""The agents' side of a run: what their loops share, and the collectors that drive them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.agents import AgentContext, get_agent
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
from jax_agent_rl.errors import DataError
from jax_agent_rl.interactions import EngineChat, InteractionRegistry
from jax_agent_rl.rewards import score
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.collect import RolloutCollector
from jax_agent_rl.tools.registry import ToolRegistry


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Training and held-out rollouts.

    Attributes:
        collector: training rollouts, with the run's accounting.
        evaluator: held-out rollouts, counted apart, with the ``agent.val_`` settings.
        interactions: the simulated users.
    """

    collector: RolloutCollector
    evaluator: RolloutCollector
    interactions: InteractionRegistry

    async def close(self) -> None:
        """Closes connections, after the last trajectory."""
        for part in (self.collector, self.evaluator, self.interactions):
            await part.close()


async def make_agents(
    config: Config,
    *,
    client: LLMServerClient,
    codec: ChatCodec,
    tools: ToolRegistry,
    rows: Sequence[Mapping[str, Any]],
) -> Agents:
    """Builds what the rows need and asks the servers among it whether they are ready; engines may be added later.

    Raises:
        ConfigError: an agent, interaction or server is missing or wrong.
        DataError: a row names an interaction there is not.
    """
    if config.agent.default_agent:
        get_agent(config.agent.default_agent)
    users = config.interactions
    interactions = InteractionRegistry.from_path(users.interaction_config_path, timeout=users.timeout)
    interactions.attach(EngineChat(client, codec, max_model_len=config.rollout.max_model_len))
    context = AgentContext(
        client=client,
        codec=codec,
        tools=tools,
        limits=config.agent,
        max_model_len=config.rollout.max_model_len,
        tool_config=config.tool_config,
        search=config.search,
        interactions=interactions,
    )
    parts = {
        "score": functools.partial(score, timeout=config.reward.timeout),
        "max_in_flight": config.rollout.max_in_flight,
        "seed": config.seed,
    }
    agents = Agents(
        collector=RolloutCollector(context, **parts),
        evaluator=RolloutCollector(replace(context, limits=config.agent.for_validation()), **parts),
        interactions=interactions,
    )
    _check_interactions(rows, interactions)
    await agents.collector.preflight(rows)
    return agents


def _check_interactions(rows: Sequence[Mapping[str, Any]], known: InteractionRegistry) -> None:
    """Rows that name a simulated user there is not."""
    for row in rows:
        name = ((row.get("extra_info") or {}).get("interaction_kwargs") or {}).get("name")
        if name is not None and name not in known:
            raise DataError(
                f"a row's extra_info.interaction_kwargs.name={name!r} is not known; there are {sorted(known)} "
                "(interactions.interaction_config_path)"
            )
