"""The sections of what agents use: tools, retrieval, environments and simulated users.

The keys of ``tool_config`` are named as in the ToolClient, so that command lines carry over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import Unless, UsedByAgents

_TEXT_TOOL = UsedByAgents("text_tool_agent")
_ENVIRONMENT = {"enabled": "ENABLE_TOOLS", "server_url": "TOOL_SERVER_URL", "max_tool_turns": "MAX_TOOL_TURNS"}


class ToolsConfig(Section):
    """Sources of tools."""

    function_tool_path: Annotated[str | None, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=None, description="Python file or module with @function_tool functions."
    )
    tool_config_path: Annotated[str | None, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=None,
        description="YAML file with `tools: [{class_name, config, tool_schema}]`, native and MCP; may be set together "
        "with function_tool_path.",
    )


class ToolClientConfig(Section):
    """`tool_config`: the ToolClient of `text_tool_agent`, in which text between <tool> and </tool> is code.

    The environment variables ENABLE_TOOLS, TOOL_SERVER_URL and MAX_TOOL_TURNS set ``enabled``, ``server_url`` and
    ``max_tool_turns`` unless the configuration does.
    """

    enabled: Annotated[bool, Unless("agent.default_agent") & Unless("agent.enable_search")] = Field(
        default=False, description="Run rows without `agent_name` as text_tool_agent."
    )
    server_url: Annotated[str | None, _TEXT_TOOL] = Field(
        default=None, description="Address of the tool server, e.g. http://localhost:5000."
    )
    token_env: Annotated[str | None, _TEXT_TOOL] = Field(
        default=None, description="Environment variable with the token of the server."
    )
    max_tool_turns: Annotated[NonNegative, _TEXT_TOOL] = Field(
        default=3, description="Maximum number of tool calls in one trajectory."
    )
    max_retries: Annotated[NonNegative, _TEXT_TOOL] = Field(
        default=3, description="Retries of a request that failed or timed out."
    )
    retry_delay: Annotated[float, _TEXT_TOOL] = Field(default=1.0, ge=0, description="Seconds before each retry.")
    timeout: Annotated[float, _TEXT_TOOL] = Field(
        default=30.0, gt=0, description="Timeout of a request in seconds; each retry has its own."
    )
    max_workers: Annotated[Positive, _TEXT_TOOL] = Field(
        default=10, description="Maximum number of concurrent requests."
    )
    request_interval: Annotated[float, _TEXT_TOOL] = Field(
        default=0.1,
        ge=0,
        description="Minimum number of seconds between the starts of two requests: 0.1 is at most ten per second. Use "
        "0 for a server of your own.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        return {key: os.environ[name] for key, name in _ENVIRONMENT.items() if os.environ.get(name)} | dict(tree)

    def changed(self, key: str) -> bool:
        """Return whether a key differs from its default and from the environment's value, which is for any run."""
        given = os.environ.get(_ENVIRONMENT.get(key, ""), "")
        return super().changed(key) and str(getattr(self, key)).lower() != given.lower()


class SearchConfig(Section):
    """`search`: the retrieval server of `search_agent`, in which text between <search> and </search> is a query."""

    server_url: str | None = Field(
        default=None, description="Address of a server that accepts {queries, topk, return_scores}."
    )
    token_env: str | None = Field(default=None, description="Environment variable with the token of the server.")
    topk: Positive = Field(default=3, description="Passages per query.")
    max_turns: NonNegative = Field(default=3, description="Maximum number of queries in one trajectory.")
    timeout: float = Field(default=30.0, gt=0, description="Timeout of a request in seconds; each retry has its own.")
    max_retries: NonNegative = Field(default=3, description="Retries of a request that failed or timed out.")
    retry_delay: float = Field(default=1.0, ge=0, description="Seconds before each retry.")


class InteractionsConfig(Section):
    """`interactions`: the simulated users of `interaction_agent`."""

    interaction_config_path: str | None = Field(
        default=None, description="YAML file: interaction: [{name, class_name, config}]."
    )
    timeout: float = Field(default=60.0, gt=0, description="Timeout of one reply of a simulated user, in seconds.")


class EnvironmentsConfig(Section):
    """Environments of rows with agent_name `environment_agent`; `extra_info.environment_kwargs.name` selects one."""

    path: str | None = Field(default=None, description="Python file or module with @register_environment classes.")
    scope: Literal["rollout", "global"] = Field(
        default="rollout",
        description="rollout: a new instance for each rollout. global: instances are reset and reused.",
    )
    max_instances: Positive = Field(
        default=64, description="Maximum number of concurrent instances of one environment; further rollouts wait."
    )
    timeout: float = Field(default=30.0, gt=0, description="Timeout of one reset, step, score or close, in seconds.")
