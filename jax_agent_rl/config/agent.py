"""The ``agent`` section: which agent loop runs, and the limits of all loops.

Its parts are in ``server_tool``, ``endpoint``, ``command_agent`` and ``harbor_agent``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jax_agent_rl.config.base import NonNegative, Positive, Unless, UsedByAgents, WhenCommand
from jax_agent_rl.config.command_agent import CommandConfig
from jax_agent_rl.config.endpoint import EndpointConfig
from jax_agent_rl.config.harbor_agent import HarborConfig
from jax_agent_rl.config.server_tool import ServerToolConfig, Side

ToolFormatName = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "gemma",
    "gemma4",
    "glm",
    "harmony",
    "hermes",
    "kimi",
    "llama3_json",
    "minimax",
    "mistral",
    "olmo3",
    "pythonic",
    "qwen3_coder",
    "seed",
    "text_tag",
]

_TURNS = UsedByAgents(
    "tool_agent", "environment_agent", "react_agent", "openai_agent", "command", "harbor"
)
_TOOL_RESULTS = UsedByAgents(
    "tool_agent", "react_agent", "environment_agent", "text_tool_agent", "search_agent"
)


class AgentConfig(ServerToolConfig):
    """Limits of agent loops. Budgets are in tokens."""

    default_agent: str | None = Field(
        default=None,
        description=(
            "Loop for rows without `agent_name`; null: search_agent with enable_search, else"
            " text_tool_agent with tool_config.enabled, else server_tool_agent with enable_agent"
            " and tool_server_url, else single_turn_agent."
        ),
    )
    enable_search: Annotated[bool, Unless("agent.default_agent")] = Field(
        default=False, description="Rows without `agent_name` run as search_agent."
    )
    tool_format: ToolFormatName = Field(
        default="auto",
        description=(
            "Format of the model's tool calls; auto: derived from its chat template (hermes if the"
            " template has none)."
        ),
    )
    tool_prompt: Annotated[Literal["template", "none"], _TURNS | WhenCommand("serve")] = Field(
        default="template",
        description=(
            "template: put tool schemas into the prompt, by the chat template or, if it has no"
            " place for them, as a system section. none: the rows' own prompts explain the tools."
        ),
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Further arguments of the chat template, for every prompt and turn, such as"
            " `enable_thinking: false`. A row's column `chat_template_kwargs` and a request's"
            " parameter of that name add to them."
        ),
    )
    max_prompt_length: Positive = Field(
        default=512,
        description=(
            "Maximum prompt length in tokens; a trajectory with a longer prompt is dropped, with"
            " its reason."
        ),
    )
    max_response_length: Positive = Field(
        default=512, description="Maximum number of sampled and inserted tokens after the prompt."
    )
    max_assistant_turns: Annotated[Positive, _TURNS] = Field(
        default=8, description="Maximum number of generations in one trajectory."
    )
    max_user_turns: Annotated[NonNegative, _TURNS] = Field(
        default=8, description="Maximum number of turns with tool results or from a simulated user."
    )
    history_window: Annotated[
        Positive | None,
        UsedByAgents(
            "tool_agent",
            "environment_agent",
            "server_tool_agent",
            "text_tool_agent",
            "search_agent",
        ),
    ] = Field(
        default=None,
        description=(
            "Number of earlier turns in the context of a turn, besides the prompt; null: all. Each"
            " turn that no longer sees all turns is trained on as a separate sample. Loops that"
            " keep messages (LangGraph, OpenAI clients) manage their history themselves."
        ),
    )
    max_parallel_calls: Annotated[Positive, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=1, description="Maximum number of calls run per turn; further calls get an error."
    )
    constrain_tool_calls: Annotated[bool, UsedByAgents("tool_agent", "interaction_agent")] = Field(
        default=False,
        description=(
            "What begins as a tool call has to be valid JSON with the name of an existing tool and"
            " arguments of its schema. For tool formats with an opening tag (hermes, text_tag,"
            " kimi, deepseek, mistral) and engines that follow grammars and report what they left."
        ),
    )
    max_tool_response_length: Annotated[Positive, _TOOL_RESULTS] = Field(
        default=256, description="Maximum number of tokens per tool result."
    )
    tool_response_truncate_side: Annotated[Side, _TOOL_RESULTS] = Field(
        default="middle", description="Side that is cut from a tool result that is too long."
    )
    tool_timeout: Annotated[float, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=10.0, gt=0, description="Timeout of one tool call, in seconds."
    )
    module: str | None = Field(
        default=None, description="Python file or module that registers more agents."
    )
    adapter: str | None = Field(
        default=None,
        description=(
            "LoRA adapter to sample with, a name in rollout.adapters; a row's `adapter` takes"
            " precedence. null: the plain model."
        ),
    )
    role_models: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Of an agent of several roles, those that a frozen model plays: role to folder (Hugging"
            " Face). It gets an engine of its own, and its trajectories carry no loss."
        ),
    )
    role_adapters: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Of an agent of several roles, the LoRA adapter that plays and trains each: role to a"
            " name, which several roles may share. Needs learner.lora. Roles that are not named are"
            " then played by the model below the adapters, which is frozen. Empty: the policy plays"
            " all roles."
        ),
    )
    run_timeout: Annotated[
        float, UsedByAgents("react_agent", "openai_agent", "command", "harbor")
    ] = Field(
        default=600.0,
        gt=0,
        description=(
            "Seconds a LangGraph or OpenAI-client agent may take; then its trajectory is dropped."
            " A program (agent command) is ended then, and scored by the files that it left; a"
            " trial of Harbor is dropped."
        ),
    )
    edited_history: Annotated[
        Literal["segment", "drop"], UsedByAgents("react_agent", "openai_agent", "command", "harbor")
    ] = Field(
        default="segment",
        description=(
            "What happens when a LangGraph or OpenAI-client agent requests a turn that does not"
            " extend its last one. segment: train on both contexts. drop: drop the trajectory, with"
            " its reason."
        ),
    )
    endpoint: Annotated[EndpointConfig, UsedByAgents("openai_agent") | WhenCommand("serve")] = (
        Field(default_factory=EndpointConfig)
    )
    command: Annotated[CommandConfig, UsedByAgents("command")] = Field(
        default_factory=CommandConfig
    )
    harbor: Annotated[HarborConfig, UsedByAgents("harbor")] = Field(default_factory=HarborConfig)
