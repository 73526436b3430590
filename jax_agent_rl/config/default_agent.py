"""The agent of rows that name none, and configured tools that no row will use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jax_agent_rl.config import AgentConfig, Config, ToolClientConfig

PLAIN_AGENT = "single_turn_agent"  # generates once and calls no tools


def default_agent(agent: AgentConfig, tool_config: ToolClientConfig) -> str:
    """Return the agent loop of rows without ``agent_name``: the named default, or what the enabled tools imply."""
    if agent.default_agent:
        return agent.default_agent
    if agent.enable_search:
        return "search_agent"
    if tool_config.enabled:
        return "text_tool_agent"
    return "server_tool_agent" if agent.enable_agent and agent.tool_server_url else PLAIN_AGENT


def report_idle_tools(config: Config, rows: Collection[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Report rows that run as plain generation although the configuration or the rows ask for tools.

    With ``agent.default_agent`` set, plain generation is taken as intended.

    Returns:
        The observation and its fix; None if nothing is wrong.
    """
    unnamed = [row for row in rows if not row.get("agent_name")]
    if not unnamed or config.agent.default_agent or default_agent(config.agent, config.tool_config) != PLAIN_AGENT:
        return None
    idle = {key: fix for key, fix in [*_configured(config), *_requested(unnamed)]}
    if not idle:
        return None
    seen = (
        f"{len(unnamed)} of {len(rows)} rows have no agent_name, so they run as {PLAIN_AGENT} and never use "
        f"{', '.join(idle)}"
    )
    fixes = " or ".join(dict.fromkeys(idle.values()))
    return seen, f"set {fixes}, or agent_name in the rows; if that is intended, set agent.default_agent={PLAIN_AGENT}"


def _configured(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys that are set but read only by other agents, each with the override that selects one."""
    tools = config.tools
    settings = (
        ("tools.function_tool_path", tools.function_tool_path, "agent.default_agent=tool_agent"),
        ("tools.tool_config_path", tools.tool_config_path, "agent.default_agent=tool_agent"),
        ("tool_config.server_url", config.tool_config.server_url, "tool_config.enabled=true"),
        ("search.server_url", config.search.server_url, "agent.enable_search=true"),
        ("environments.path", config.environments.path, "agent.default_agent=environment_agent"),
        (
            "interactions.interaction_config_path",
            config.interactions.interaction_config_path,
            "agent.default_agent=interaction_agent",
        ),
    )
    return ((key, fix) for key, value, fix in settings if value)


def _requested(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield fields of rows that only other agents read, each with the override that selects one."""
    agents = {
        "tools_kwargs": "tool_agent",
        "tool_selection": "tool_agent",
        "environment_kwargs": "environment_agent",
        "interaction_kwargs": "interaction_agent",
    }
    present = {key for row in rows for key, value in (row.get("extra_info") or {}).items() if key in agents and value}
    return ((f"extra_info.{key}", f"agent.default_agent={agents[key]}") for key in agents if key in present)
