"""The agents' side of a run: what their loops share, and the collectors that drive them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from jax_agent_rl.agents import AgentContext, get_agent
from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config import Config
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


def make_agents(
    config: Config,
    *,
    client: LLMServerClient,
    codec: ChatCodec,
    tools: ToolRegistry,
) -> Agents:
    """Builds them; the client's engines may be added later.

    Raises:
        ConfigError: the default agent or an interaction is missing or wrong.
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
    return Agents(
        collector=RolloutCollector(context, **parts),
        evaluator=RolloutCollector(replace(context, limits=config.agent.for_validation()), **parts),
        interactions=interactions,
    )
