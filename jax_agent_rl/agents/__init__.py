"""Agent loops, chosen per row by ``agent_name``.

- ``request``: what a loop is asked to play.
- ``loop``: the interface and the registry.
- ``context``: what all loops share.
- ``episode``: a trajectory as it grows.
- ``turn_loop``: the loop of all agents here, its replay on branches, and ``single_turn_agent``.
- ``tool_agent``, ``environment_agent``, ``marker_agent``: what answers the policy's turns.
- ``markers``, ``observations``: how a marker agent reads turns, and writes answers after them.

Agents of other frameworks:

- ``recorder``: records their requests as ids.
- ``conversation``: the messages they send and read.
- ``session_tree``: a session as a trajectory.
- ``frameworks``: any OpenAI client, through ``endpoint``; any LangGraph graph, through
  ``langgraph``.
- ``command``: any program; also the environment ``shell``.
- ``harbor``: trials of Harbor.
- ``inspect_tasks``: tasks of Inspect.
"""

from jax_agent_rl.agents.command import shell as _shell  # it registers an environment
from jax_agent_rl.agents.command.agent import CommandAgent
from jax_agent_rl.agents.context import (
    AgentContext,
    AgentEvent,
    FrozenModel,
    TokenClient,
)
from jax_agent_rl.agents.environment_agent import EnvironmentAgent
from jax_agent_rl.agents.episode import Episode
from jax_agent_rl.agents.frameworks import OpenAIAgentLoop, ReactAgentLoop, openai_agent
from jax_agent_rl.agents.harbor.agent import HarborAgent
from jax_agent_rl.agents.inspect_tasks import InspectAgentLoop
from jax_agent_rl.agents.loop import (
    AgentLoop,
    AgentSelector,
    agent_names,
    branching_agents,
    get_agent,
    load_agents,
    register_agent,
    select_agents,
)
from jax_agent_rl.agents.marker_agent import SearchAgent, ServerToolAgent, TextToolAgent
from jax_agent_rl.agents.request import EpisodeRequest, Prefix, derive_seed, role_id
from jax_agent_rl.agents.tool_agent import InteractionAgent, ToolAgent
from jax_agent_rl.agents.turn_loop import SingleTurnAgent

__all__ = [
    "AgentContext",
    "AgentEvent",
    "AgentLoop",
    "AgentSelector",
    "CommandAgent",
    "EnvironmentAgent",
    "Episode",
    "EpisodeRequest",
    "FrozenModel",
    "HarborAgent",
    "InspectAgentLoop",
    "InteractionAgent",
    "OpenAIAgentLoop",
    "Prefix",
    "ReactAgentLoop",
    "SearchAgent",
    "ServerToolAgent",
    "SingleTurnAgent",
    "TextToolAgent",
    "TokenClient",
    "ToolAgent",
    "agent_names",
    "branching_agents",
    "derive_seed",
    "get_agent",
    "load_agents",
    "openai_agent",
    "register_agent",
    "role_id",
    "select_agents",
]

del _shell
