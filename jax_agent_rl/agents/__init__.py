"""Agent loops, chosen per row by ``agent_name``.

``loop`` the interface and the registry · ``context`` what a loop is given · ``episode`` the trajectory as it grows ·
``single_turn``, ``tool_agent`` and ``environment_agent`` the loops · ``seeds``.
"""

from jax_agent_rl.agents.context import AgentContext, AgentEvent, TokenClient
from jax_agent_rl.agents.environment_agent import EnvironmentAgent
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.loop import AgentLoop, AgentSelector, agent_names, get_agent, register_agent
from jax_agent_rl.agents.seeds import derive_seed
from jax_agent_rl.agents.single_turn import SingleTurnAgent
from jax_agent_rl.agents.tool_agent import ToolAgent

__all__ = [
    "AgentContext",
    "AgentEvent",
    "AgentLoop",
    "AgentSelector",
    "EnvironmentAgent",
    "Episode",
    "SingleTurnAgent",
    "TokenClient",
    "ToolAgent",
    "agent_names",
    "derive_seed",
    "get_agent",
    "register_agent",
]
