"""The ``agent`` section: the limits of agent loops, `server_tool_agent`, and the OpenAI-compatible endpoint.

The keys of `server_tool_agent` are named as in verl-tool's ``AgentActorConfig``, so that command lines carry over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jax_agent_rl.config.base import NonNegative, Positive, Section
from jax_agent_rl.config.conditions import SwitchedOff, Unless, UsedByAgents, WhenCommand, WhenKey

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


class ServerToolConfig(Section):
    """`agent` keys of `server_tool_agent`; `n`, `max_model_len` and `val_max_response_length` hold for every agent."""

    enable_agent: Annotated[bool, _SERVER_TOOL | WhenKey("agent.tool_server_url")] = Field(
        default=True,
        description="With tool_server_url, rows without `agent_name` run as server_tool_agent. false: they run as "
        "plain generation, and server_tool_agent generates once and calls no tool.",
    )
    tool_server_url: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None, description="Address of the tool server, e.g. http://localhost:5000; /get_observation is added."
    )
    tool_server_token_env: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None,
        description="Environment variable with the secret the tool server asks for (Authorization: Bearer).",
    )
    tool_call_timeout: Annotated[float, _WITH_TOOLS] = Field(
        default=30.0, gt=0, description="Seconds the tool server may take for one request."
    )
    tool_call_max_retries: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=3,
        description="Repetitions of a request that did not reach the tool server, or that it was too busy to take.",
    )
    max_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=5, description="Most tool calls of a server_tool_agent trajectory."
    )
    min_turns: Annotated[NonNegative, _WITH_TOOLS] = Field(
        default=0, description="Turns that are sent to the tool server even if they hold no action stop token."
    )
    action_stop_tokens: Annotated[tuple[str, ...], _WITH_TOOLS] = Field(
        default=(),
        description="Texts that end a turn and make it an action; not in a think block, where the turn goes on. "
        "A list, `a,b`, or a file that holds `a,b`.",
        json_schema_extra={"type": ["array", "string"]},
    )
    max_action_length: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None, description="Most tokens of one turn; null: the budgets alone."
    )
    max_obs_length: Annotated[Positive, _WITH_TOOLS] = Field(
        default=256, description="Most tokens of one observation of the tool server."
    )
    truncate_obs_side: Annotated[Side, _WITH_TOOLS] = Field(
        default="middle", description="The side that is cut when an observation is too long."
    )
    truncate_response_side: Annotated[Literal["left", "right"], _WITH_TOOLS] = Field(
        default="right",
        description="Where a response is cut that an observation would overflow. right: before the observation, and "
        "the trajectory ends. left: in the observation, whose end is given half of the tokens left.",
    )
    mask_observations: Annotated[bool, _WITH_TOOLS] = Field(
        default=True, description="Observations carry no loss; false trains on them, too."
    )
    enable_mtrl: Annotated[bool, _WITH_TOOLS] = Field(
        default=False,
        description="Observations are chat turns of their own; false: they continue the assistant's text.",
    )
    mtrl_role: Annotated[str, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default="user", description="Role of those chat turns."
    )
    mtrl_sep: Annotated[str | None, _WITH_TOOLS & WhenKey("agent.enable_mtrl")] = Field(
        default=None,
        description="Text around an observation in the mtrl format, with `{obs}`; null: the chat template's.",
    )
    turn_end_token: Annotated[str | None, _WITH_TOOLS] = Field(
        default=None, description="Ends a turn, besides EOS; inserted where mtrl_sep follows a turn without it."
    )
    additional_eos_token_ids: Annotated[tuple[NonNegative, ...], _WITH_TOOLS] = Field(
        default=(), description="Token ids that end a turn, besides EOS."
    )
    call_tool_first: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="Ask the tool server for an observation before the first turn."
    )
    force_finish_for_last_turn: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="The turn after the last tool call does not stop at action stop tokens."
    )
    mask_overlong_loss: Annotated[bool, _SERVER_TOOL] = Field(
        default=False, description="A trajectory cut by a limit carries no loss; its reward counts in its group."
    )
    mask_void_traj: Annotated[bool, _WITH_TOOLS] = Field(
        default=False, description="A trajectory with no valid action and no answer carries no loss; its reward counts."
    )
    rollout_mode: Annotated[Literal["async", "sync"], _WITH_TOOLS] = Field(
        default="async", description="sync: tools are called when all trajectories in flight have finished their turn."
    )
    max_concurrent_trajectories: Annotated[Positive | None, _SERVER_TOOL] = Field(
        default=None, description="Most server_tool_agent trajectories at the same time, besides rollout.max_in_flight."
    )
    max_model_len: Positive | None = Field(
        default=None, description="Most ids of an agent's context; null: the engine's."
    )
    n: Positive | None = Field(default=None, description="Trajectories per row: another name of rollout.group_size.")
    val_max_turns: Annotated[NonNegative | None, _SERVER_TOOL] = Field(
        default=None, description="max_turns in evaluations; null: the same."
    )
    val_max_response_length: Positive | None = Field(
        default=None, description="max_response_length in evaluations; null: the same."
    )

    @field_validator("action_stop_tokens", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Split a text, or the file it names, at commas."""
        if not isinstance(value, str):
            return value
        path = Path(value).expanduser()
        text = path.read_text(encoding="utf-8") if value and path.is_file() else value
        return tuple(token for part in text.split(",") if (token := part.strip()))

    @field_validator("mtrl_sep")
    @classmethod
    def _one_placeholder(cls, value: str | None) -> str | None:
        if value is not None and value.count("{obs}") != 1:
            raise ValueError("must hold {obs} exactly once")
        return value

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.min_turns > self.max_turns:
            raise ValueError(f"min_turns={self.min_turns} is more than max_turns={self.max_turns}; raise the latter")
        return self

    def for_validation(self) -> Self:
        """Return these settings with the overrides for evaluations applied."""
        named = {"max_turns": self.val_max_turns, "max_response_length": self.val_max_response_length}
        changed = {key: value for key, value in named.items() if value is not None}
        if "max_turns" in changed:
            changed["min_turns"] = min(self.min_turns, changed["max_turns"])
        return self.model_copy(update=changed)


class EndpointConfig(Section):
    """The OpenAI-compatible endpoint, in training and under `jax-agent-rl serve`."""

    request_timeout: float = Field(
        default=300.0, gt=0, description="Seconds one request may take, its queueing included."
    )
    max_body_bytes: Positive = Field(
        default=8_000_000, description="Largest request body; larger ones are answered 413."
    )
    max_concurrent_requests: Positive = Field(
        default=1024, description="Requests served at once; more are answered 429."
    )
    max_choices: Positive = Field(default=16, description="Largest `n` of a request.")
    max_sessions: Positive = Field(default=4096, description="Sessions kept at once; more are answered 429.")
    max_session_tokens: Annotated[Positive, WhenCommand("serve")] = Field(
        default=4_000_000,
        description="Ids that one session of `serve` records, every context counted in full; then it is refused more.",
    )
    session_ttl: Annotated[float, WhenCommand("serve")] = Field(
        default=3600.0, gt=0, description="Seconds after which an idle session of `serve` is forgotten."
    )


class CommandConfig(Section):
    """The agent `command`: a program that runs in the sandbox once per trajectory, with the endpoint as its model.

    It finds the endpoint in OPENAI_BASE_URL and ANTHROPIC_BASE_URL, and the task in TASK_INSTRUCTION.
    """

    argv: tuple[str, ...] = Field(
        default=(),
        description="Program and arguments, run in the task's working folder; `{instruction}` is the task's text.",
    )
    program_dir: str | None = Field(
        default=None, description="Folder with the program, copied into the sandbox as /tmp/agent."
    )
    verifier_timeout: float = Field(
        default=60.0, gt=0, description="Seconds the tests of a task may take, unless the task says so."
    )
    cpu_seconds: Positive = Field(default=120, description="CPU time of each process.")
    memory_mb: Positive = Field(default=1024, description="Memory of all processes of a program together.")
    processes: Positive = Field(default=64, description="Most processes and threads at the same time.")
    disk_mb: Positive = Field(default=64, description="Size of the working folder (it is in memory).")
    max_running: Positive = Field(default=16, description="Most programs at the same time; further ones wait.")


class AgentConfig(ServerToolConfig):
    """Limits of the agent loop. Budgets are counted in tokens, here and nowhere else."""

    default_agent: str | None = Field(
        default=None,
        description="Loop for rows without `agent_name`; null: search_agent with enable_search, else text_tool_agent "
        "with tool_config.enabled, else server_tool_agent with enable_agent and tool_server_url, else "
        "single_turn_agent.",
    )
    enable_search: Annotated[bool, Unless("agent.default_agent")] = Field(
        default=False, description="Rows without `agent_name` run as search_agent."
    )
    tool_format: ToolFormatName = Field(
        default="auto",
        description="How the model writes tool calls; auto: as its chat template says (hermes if it knows none).",
    )
    tool_prompt: Annotated[
        Literal["template", "none"],
        UsedByAgents("tool_agent", "environment_agent", "react_agent", "openai_agent") | WhenCommand("serve"),
    ] = Field(
        default="template",
        description="template: tool schemas go into the prompt (by the chat template, or as a system section when "
        "it has none). none: the rows' own prompts explain the tools.",
    )
    max_prompt_length: Positive = Field(
        default=512, description="A longer prompt drops the trajectory, with its reason."
    )
    max_response_length: Positive = Field(default=512, description="Sampled plus inserted ids after the prompt.")
    max_assistant_turns: Annotated[
        Positive, UsedByAgents("tool_agent", "environment_agent", "react_agent", "openai_agent")
    ] = Field(default=8, description="Most generations in one trajectory.")
    max_user_turns: Annotated[
        NonNegative, UsedByAgents("tool_agent", "environment_agent", "react_agent", "openai_agent")
    ] = Field(default=8, description="Most turns of tool results or a simulated user.")
    history_window: Annotated[
        Positive | None,
        UsedByAgents("tool_agent", "environment_agent", "server_tool_agent", "text_tool_agent", "search_agent"),
    ] = Field(
        default=None,
        description="Earlier turns a turn is sampled after, besides the prompt; null: all. Each turn that no longer "
        "sees all is trained on as a sample of its own. Loops that hold messages (LangGraph, OpenAI clients) manage "
        "their history themselves.",
    )
    max_parallel_calls: Annotated[Positive, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=1, description="Calls run per turn; further ones answer with an error."
    )
    max_tool_response_length: Annotated[
        Positive, UsedByAgents("tool_agent", "react_agent", "environment_agent", "text_tool_agent", "search_agent")
    ] = Field(default=256, description="Most tokens of one tool result.")
    tool_response_truncate_side: Annotated[
        Literal["left", "middle", "right"],
        UsedByAgents("tool_agent", "react_agent", "environment_agent", "text_tool_agent", "search_agent"),
    ] = Field(default="middle", description="The side that is cut when a tool result is too long.")
    tool_timeout: Annotated[float, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=10.0, gt=0, description="Seconds one tool call may take."
    )
    module: str | None = Field(default=None, description="Python file or module that registers more agents.")
    adapter: str | None = Field(
        default=None,
        description="Name in rollout.adapters of the LoRA adapter to sample with; a row's `adapter` takes precedence. "
        "null: the plain model.",
    )
    run_timeout: Annotated[float, UsedByAgents("react_agent", "openai_agent")] = Field(
        default=600.0, gt=0, description="Seconds a LangGraph or OpenAI-client agent may take; then it is dropped."
    )
    edited_history: Annotated[Literal["segment", "drop"], UsedByAgents("react_agent", "openai_agent")] = Field(
        default="segment",
        description="When a LangGraph or OpenAI-client agent asks for a turn that does not extend its last one: "
        "segment trains on both contexts, drop loses the trajectory with its reason.",
    )
    endpoint: Annotated[EndpointConfig, UsedByAgents("openai_agent") | WhenCommand("serve")] = Field(
        default_factory=EndpointConfig
    )
    command: Annotated[CommandConfig, UsedByAgents("command")] = Field(default_factory=CommandConfig)
