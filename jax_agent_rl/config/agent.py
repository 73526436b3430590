"""The ``agent`` section: limits of agent loops, `server_tool_agent`, and the endpoint.

The keys of `server_tool_agent` are named as in verl-tool's ``AgentActorConfig``, so that command
lines can be reused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jax_agent_rl.config.base import (
    NonNegative,
    Positive,
    Section,
    SwitchedOff,
    Unless,
    UsedByAgents,
    WhenCommand,
    WhenKey,
    WhenModelHasVision,
)
from jax_agent_rl.utils.files import read_regular_file

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
    "pythonic",
    "qwen3_coder",
    "seed",
    "text_tag",
]


Side = Literal["left", "middle", "right"]

_SERVER_TOOL = UsedByAgents("server_tool_agent")
_WITH_TOOLS = _SERVER_TOOL | SwitchedOff("agent.enable_agent")
_TURNS = UsedByAgents("tool_agent", "environment_agent", "react_agent", "openai_agent")
_TOOL_RESULTS = UsedByAgents(
    "tool_agent", "react_agent", "environment_agent", "text_tool_agent", "search_agent"
)


_MAX_TEXT_BYTES = 2**20


def _text_or_file(value: str) -> str:
    """Return the text of the file that a value names, or the value itself if it names none.

    Raises:
        ValueError: the file cannot be read as text.
    """
    try:
        path = Path(value).expanduser()
        if not value or not path.is_file():
            return value
    except (OSError, ValueError, RuntimeError):  # the value cannot be the name of a file
        return value

    try:
        return read_regular_file(path, _MAX_TEXT_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"names the file {value!r}, which cannot be read as text in UTF-8: {error}"
        ) from None


class ServerToolConfig(Section):
    """Keys of `server_tool_agent`.

    `n`, `max_model_len` and `val_max_response_length` apply to every agent.
    """

    enable_agent: Annotated[bool, _SERVER_TOOL | WhenKey("agent.tool_server_url")] = Field(
        default=True,
        description=(
            "With tool_server_url, rows without `agent_name` run as server_tool_agent. false: they"
            " run as plain generation, and server_tool_agent generates once and calls no tool."
        ),
    )
    tool_server_url: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description=(
            "Address of the tool server, e.g. http://localhost:5000; /get_observation is appended."
        ),
    )
    tool_server_token_env: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description=(
            "Environment variable with the token of the tool server (Authorization: Bearer)."
        ),
    )
    tool_call_timeout: Annotated[float, _WITH_TOOLS] = Field(
        default=30.0, gt=0, description="Timeout of a request to the tool server, in seconds."
    )
    tool_call_max_retries: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=5,
        description=(
            "Retries of a request that did not reach the tool server, or that it was too busy to"
            " accept, after 1, 2, 4, … s: five outlast a restart of the server."
        ),
    )
    max_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=5, description="Maximum number of tool calls in a server_tool_agent trajectory."
    )
    min_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=0,
        description=(
            "Number of turns that are sent to the tool server even without an action stop token."
        ),
    )
    action_stop_tokens: Annotated[tuple[str, ...], _WITH_TOOLS] = Field(
        default=(),
        description=(
            "Texts that end a turn and make it an action, except in a think block. A list, `a,b`,"
            " or a file that contains `a,b`."
        ),
        json_schema_extra={"type": ["array", "string"]},
    )
    max_action_length: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None,
        description="Maximum number of tokens per turn; null: limited by the other budgets only.",
    )
    max_obs_length: Annotated[Positive, _WITH_TOOLS] = Field(
        default=256, description="Maximum number of tokens per observation of the tool server."
    )
    truncate_obs_side: Annotated[Side, _WITH_TOOLS] = Field(
        default="middle", description="Side that is cut from an observation that is too long."
    )
    truncate_response_side: Annotated[Literal["left", "right"], _WITH_TOOLS] = Field(
        default="right",
        description=(
            "Where to cut a response that an observation would overflow. right: before the"
            " observation, and the trajectory ends. left: in the observation, which keeps its end,"
            " up to half of the tokens left."
        ),
    )
    mask_observations: Annotated[bool, _WITH_TOOLS] = Field(
        default=True, description="Exclude observations from the loss; false trains on them."
    )
    enable_mtrl: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description=(
            "Make observations separate chat turns; false: they continue the assistant's text."
        ),
    )
    mtrl_role: Annotated[str, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default="user", description="Role of those chat turns."
    )
    mtrl_sep: Annotated[str | None, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default=None,
        description=(
            "Text around an observation in the mtrl format, with `{obs}`; null: from the chat"
            " template."
        ),
    )
    turn_end_token: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description=(
            "Token that ends a turn, besides EOS; inserted where mtrl_sep follows a turn"
            " without it."
        ),
    )
    additional_eos_token_ids: Annotated[tuple[NonNegative, ...], _WITH_TOOLS] = Field(
        default=(), description="Token ids that end a turn, besides EOS."
    )
    call_tool_first: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="Ask the tool server for an observation before the first turn."
    )
    force_finish_for_last_turn: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description="The turn after the last tool call does not stop at action stop tokens.",
    )
    mask_overlong_loss: Annotated[bool, _SERVER_TOOL] = Field(
        default=False,
        description=(
            "Exclude trajectories cut by a limit from the loss; their rewards still count in their"
            " groups."
        ),
    )
    mask_void_traj: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description=(
            "Exclude trajectories without a valid action or an answer from the loss; their rewards"
            " still count."
        ),
    )
    rollout_mode: Annotated[Literal["async", "sync"], _WITH_TOOLS] = Field(
        default="async",
        description=(
            "async: call a tool as soon as a turn asks for it. sync: call tools when all"
            " trajectories in flight have finished their turn."
        ),
    )
    max_concurrent_trajectories: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None,
        description=(
            "Maximum number of concurrent server_tool_agent trajectories, besides"
            " rollout.max_in_flight."
        ),
    )
    max_model_len: Positive | None = Field(
        default=None,
        description="Maximum context length of an agent in tokens; null: the engine's.",
    )
    n: Positive | None = Field(
        default=None, description="Trajectories per row: an alias of rollout.group_size."
    )
    val_max_turns: Annotated[NonNegative | None, _SERVER_TOOL] = Field(
        default=None, description="max_turns in evaluations; null: the same as in training."
    )
    val_max_response_length: Positive | None = Field(
        default=None,
        description="max_response_length in evaluations; null: the same as in training.",
    )

    @field_validator("action_stop_tokens", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Split a text, or the file it names, at commas."""
        if not isinstance(value, str):
            return value
        tokens = [part.strip() for part in _text_or_file(value).split(",")]
        return tuple(filter(None, tokens))

    @field_validator("mtrl_sep")
    @classmethod
    def _one_placeholder(cls, value: str | None) -> str | None:
        if value is not None and value.count("{obs}") != 1:
            raise ValueError("must hold {obs} exactly once")
        return value

    @model_validator(mode="after")
    def _turn_limits_ascend(self) -> Self:
        if self.min_turns > self.max_turns:
            raise ValueError(
                f"min_turns={self.min_turns} is more than max_turns={self.max_turns}; raise the"
                " latter"
            )
        return self

    def for_validation(self) -> Self:
        """Return these settings with the overrides for evaluations applied."""
        update = {}
        if self.val_max_response_length is not None:
            update["max_response_length"] = self.val_max_response_length
        if self.val_max_turns is not None:
            update["max_turns"] = self.val_max_turns
            update["min_turns"] = min(self.min_turns, self.val_max_turns)
        return self.model_copy(update=update)


class EndpointConfig(Section):
    """The OpenAI-compatible endpoint, in training and under `jax-agent-rl serve`."""

    request_timeout: float = Field(
        default=300.0, gt=0, description="Timeout of one request in seconds, queueing included."
    )
    max_body_bytes: Positive = Field(
        default=8_000_000,
        description="Maximum size of a request body; larger ones are answered with 413.",
    )
    max_concurrent_requests: Positive = Field(
        default=1024,
        description="Maximum number of concurrent requests; more are answered with 429.",
    )
    max_choices: Positive = Field(default=16, description="Maximum `n` of a request.")
    max_sessions: Positive = Field(
        default=4096, description="Maximum number of sessions kept; more are answered with 429."
    )
    max_session_tokens: Annotated[Positive, WhenCommand("serve")] = Field(
        default=4_000_000,
        description=(
            "Maximum number of ids that one session of `serve` records, every context counted in"
            " full; further requests are refused."
        ),
    )
    max_session_pixels: Annotated[Positive, WhenModelHasVision()] = Field(
        default=64_000_000,
        description=(
            "Maximum pixels of the images in one session, each image counted once; requests with"
            " more are refused."
        ),
    )
    session_ttl: Annotated[float, WhenCommand("serve")] = Field(
        default=3600.0, gt=0, description="Seconds after which `serve` forgets an idle session."
    )


class CommandConfig(Section):
    """The agent `command`: a program that runs once per trajectory, with the endpoint as its model.

    It finds the endpoint in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, and the task in
    TASK_INSTRUCTION.
    """

    argv: tuple[str, ...] = Field(
        default=(),
        description=(
            "Program and arguments, run in the task's working folder; `{instruction}` is the task's"
            " text."
        ),
    )
    program_dir: str | None = Field(
        default=None,
        description="Folder with the program, copied into the sandbox or container as /tmp/agent.",
    )
    container: Literal["docker", "podman"] | None = Field(
        default=None,
        description=(
            "Command of a container runtime. Programs and tests run in containers without network,"
            " whose images are built from the tasks' Dockerfiles and contain python3. The tests"
            " start on all that the program left, as in Harbor. null: the sandbox."
        ),
    )
    image: Annotated[str | None, WhenKey("agent.command.container")] = Field(
        default=None, description="Image of tasks without a Dockerfile or an image of their own."
    )
    verifier_timeout: float = Field(
        default=60.0,
        gt=0,
        description="Seconds the tests of a task may take, unless the task says so.",
    )
    cpu_seconds: Positive = Field(default=120, description="CPU time of each process.")
    memory_mb: Positive = Field(
        default=1024, description="Memory of all processes of a program together."
    )
    processes: Positive = Field(
        default=64, description="Maximum number of processes and threads at the same time."
    )
    disk_mb: Positive = Field(
        default=64, description="Size of the working folder (it is in memory)."
    )
    workspace_mb: Annotated[Positive, Unless("agent.command.container")] = Field(
        default=8,
        description=(
            "Size of the working folder in the end that is handed to the tests, names included; a"
            " larger one gives reward 0."
        ),
    )
    workspace_entries: Annotated[Positive, Unless("agent.command.container")] = Field(
        default=4096,
        description="Maximum number of files, folders and links that are handed to the tests.",
    )
    max_running: Positive = Field(
        default=16, description="Maximum number of concurrent programs; further ones wait."
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
    run_timeout: Annotated[float, UsedByAgents("react_agent", "openai_agent")] = Field(
        default=600.0,
        gt=0,
        description=(
            "Seconds a LangGraph or OpenAI-client agent may take; then its trajectory is dropped."
        ),
    )
    edited_history: Annotated[
        Literal["segment", "drop"], UsedByAgents("react_agent", "openai_agent")
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
