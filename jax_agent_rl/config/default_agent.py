"""Which agent loop plays a row, and the tools that no loop of a run would use."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jax_agent_rl.config.agent import AgentConfig
from jax_agent_rl.config.base import value_at
from jax_agent_rl.config.run import Config
from jax_agent_rl.config.task import ToolClientConfig
from jax_agent_rl.utils.text import counted

PLAIN_AGENT = "single_turn_agent"  # generates once and calls no tools


def default_agent(agent: AgentConfig, tool_config: ToolClientConfig) -> str:
    """Return the agent loop of rows without ``agent_name``.

    It is the one that the configuration names, or that the enabled tools imply.
    """
    if agent.default_agent:
        return agent.default_agent
    if agent.enable_search:
        return "search_agent"
    if tool_config.enabled:
        return "text_tool_agent"
    if agent.enable_agent and agent.tool_server_url:
        return "server_tool_agent"
    return PLAIN_AGENT


_TOOL_KEYS = {
    "tools.function_tool_path": "agent.default_agent=tool_agent",
    "tools.tool_config_path": "agent.default_agent=tool_agent",
    "tool_config.server_url": "tool_config.enabled=true",
    "search.server_url": "agent.enable_search=true",
    "environments.path": "agent.default_agent=environment_agent",
    "interactions.interaction_config_path": "agent.default_agent=interaction_agent",
    "extra_info.tools_kwargs": "agent.default_agent=tool_agent",
    "extra_info.tool_selection": "agent.default_agent=tool_agent",
    "extra_info.environment_kwargs": "agent.default_agent=environment_agent",
    "extra_info.interaction_kwargs": "agent.default_agent=interaction_agent",
}
"""What plain generation does not read -> the setting that selects an agent which does.

The keys are keys of the configuration, and ``extra_info.*`` fields of rows.
"""


def report_idle_tools(
    config: Config, rows: Collection[Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Report rows that generate plainly although the configuration or the rows ask for tools.

    With ``agent.default_agent`` set, plain generation is taken as intended.

    Returns:
        The observation and its fix; None if nothing is wrong.
    """
    plain_rows = [row for row in rows if not row.get("agent_name")]
    if not plain_rows or config.agent.default_agent:
        return None
    if default_agent(config.agent, config.tool_config) != PLAIN_AGENT:
        return None

    row_fields = set()
    for row in plain_rows:
        for field, value in (row.get("extra_info") or {}).items():
            if value:
                row_fields.add(f"extra_info.{field}")

    idle = {}
    for key, fix in _TOOL_KEYS.items():
        if key.startswith("extra_info."):
            is_set = key in row_fields
        else:
            is_set = bool(value_at(config, key))
        if is_set:
            idle[key] = fix
    if not idle:
        return None

    observation = (
        f"no agent_name in {len(plain_rows)} of {counted(len(rows), 'row')}: plain generation"
        f" ({PLAIN_AGENT}) never uses {', '.join(idle)}"
    )
    fixes = " or ".join(dict.fromkeys(idle.values()))
    fix = (
        f"set {fixes}, or agent_name in the rows; if that is intended, set"
        f" agent.default_agent={PLAIN_AGENT}"
    )
    return observation, fix


def uses_tools(config: Config, rows: Collection[Mapping[str, Any]]) -> bool:
    """Return whether trajectories are expected to call tools.

    They are if tools are configured, or if rows use a tool server. Environment steps need not be
    tool calls.
    """
    if config.tools.function_tool_path or config.tools.tool_config_path:
        return True

    agents_with_server = {"text_tool_agent", "search_agent"}
    if config.agent.enable_agent:
        agents_with_server.add("server_tool_agent")
    default = default_agent(config.agent, config.tool_config)
    selected_agents = {row.get("agent_name") or default for row in rows}
    return not agents_with_server.isdisjoint(selected_agents)
