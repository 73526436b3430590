"""The configuration: one frozen tree, loaded from YAML plus ``a.b=c`` overrides.

``load("configs/quickstart.yaml", ["learner.learning_rate=1e-5"])`` returns a :class:`Config` or raises one
:class:`~jax_agent_rl.errors.ConfigError` that lists *every* problem with its path and, for an unknown key, the
nearest valid name. Every key below is read somewhere; a key that does nothing must not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from jax_agent_rl.config.agents import InteractionsConfig, SearchConfig, ServerToolConfig, ToolClientConfig
from jax_agent_rl.config.algorithm import AlgorithmConfig, CriticConfig
from jax_agent_rl.config.base import LoraConfig, NonNegative, OptimizerSection, Positive, Section
from jax_agent_rl.config.conditions import Unless, UsedByAgents, WhenCommand, WhenKey, WhenModelHasVision
from jax_agent_rl.config.cross_checks import problems
from jax_agent_rl.config.loading import build_tree, read_tree
from jax_agent_rl.config.logger import LoggerSection
from jax_agent_rl.config.mesh import MeshConfig, MultihostConfig
from jax_agent_rl.config.reward import RewardConfig
from jax_agent_rl.config.rollout import RolloutConfig
from jax_agent_rl.config.trace import TraceConfig
from jax_agent_rl.config.trainer import OverlapSection, with_correction

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


class ModelConfig(Section):
    """The policy."""

    path: str = Field(
        description="Folder with config.json, model.safetensors and tokenizer files, or owner/name[@revision] on the "
        "Hugging Face Hub, downloaded into its cache."
    )
    min_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description="Fewest pixels an image or a frame is scaled to, by the engine and where ids are counted; null: as "
        "the model's processor files say. Set it together with max_pixels.",
    )
    max_pixels: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None, description="Most pixels an image or a frame is scaled to."
    )

    @property
    def pixels(self) -> tuple[int, int] | None:
        """``(min_pixels, max_pixels)``; None leaves both to the model's processor files."""
        return None if self.min_pixels is None or self.max_pixels is None else (self.min_pixels, self.max_pixels)

    @model_validator(mode="after")
    def _both_bounds(self) -> Self:
        low, high = self.min_pixels, self.max_pixels
        if (low is None) != (high is None):
            raise ValueError(f"min_pixels={low}, max_pixels={high}: set both or neither")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_pixels={low} exceeds max_pixels={high}; lower it")
        return self


class DataConfig(Section):
    """Rows: JSON Lines or Parquet with `prompt`, `agent_name`, `data_source`, `reward_model.ground_truth`."""

    train: str = Field(description="Rows to train on (.jsonl or .parquet).")
    eval: str | None = Field(default=None, description="Rows to evaluate on; never trained on.")
    eval_limit: Annotated[Positive | None, WhenKey("data.eval")] = Field(
        default=None, description="Evaluate on the first this many rows."
    )


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


class ToolsConfig(Section):
    """Where tools come from."""

    function_tool_path: Annotated[str | None, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=None, description="Python file or module with @function_tool functions."
    )
    tool_config_path: Annotated[str | None, UsedByAgents("tool_agent", "react_agent")] = Field(
        default=None,
        description="YAML file with `tools: [{class_name, config, tool_schema}]`, native and MCP; may be both.",
    )


class EnvironmentsConfig(Section):
    """Environments that rows with agent_name `environment_agent` live in, by `extra_info.environment_kwargs.name`."""

    path: str | None = Field(default=None, description="Python file or module with @register_environment classes.")
    scope: Literal["rollout", "global"] = Field(
        default="rollout", description="rollout: a new instance each; global: instances are reset and used again."
    )
    max_instances: Positive = Field(default=64, description="Instances of one environment at the same time; more wait.")
    timeout: float = Field(default=30.0, gt=0, description="Seconds one reset, step, score or close may take.")


class LearnerConfig(OptimizerSection):
    """The optimizer step."""

    num_minibatches: Positive = Field(
        default=1, description="Mini-batches (optimizer updates) one rollout batch is cut into."
    )
    ppo_epochs: Positive = Field(default=1, description="Passes over one rollout batch.")
    pack_length: Positive = Field(
        default=1024, description="Tokens per packed row; a row is one gradient micro-batch's unit."
    )
    micro_batch_size: Positive = Field(default=1, description="Packed rows in one forward/backward (per data shard).")
    share_prefixes: bool = Field(
        default=True, description="Compute tokens common to several trajectories of a row once."
    )
    row_patches: Annotated[Positive | None, WhenModelHasVision()] = Field(
        default=None,
        description="Most patches of the pictures in a packed row, for models that see; null: as many as its tokens "
        "can show. Fewer take less memory, but a trajectory that shows more ends the run.",
    )
    freeze_vision: Annotated[bool, WhenModelHasVision()] = Field(
        default=False, description="Leave what reads pictures as it is, and train the decoder alone."
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="dots",
        description="What the backward pass recomputes: nothing; all but matrix products (and attention, on CPUs); "
        "whole layers.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Of matrix products and activations. Parameters, gradient sums and optimizer stay in float32, "
        "log-probs and losses, too.",
    )
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the load-balancing loss of mixture-of-experts models; each update then begins with a "
        "forward pass that counts how its tokens are routed.",
    )
    max_nonfinite_steps: Positive = Field(default=3, description="Stop after this many non-finite steps in a row.")
    lora: LoraConfig | None = Field(
        default=None, description="Train adapters and freeze the model; null trains all of it."
    )
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    multihost: MultihostConfig = Field(default_factory=MultihostConfig)

    @model_validator(mode="after")
    def _rows_divide(self) -> LearnerConfig:
        """Tokens of a row are dealt out in equal parts."""
        rest = -self.pack_length % self.mesh.context
        if rest:
            raise ValueError(
                f"learner.pack_length={self.pack_length} is not divisible by learner.mesh.context={self.mesh.context}; "
                f"set learner.pack_length={self.pack_length + rest}, or lower learner.mesh.context"
            )
        return self


class TrainerConfig(OverlapSection, LoggerSection):
    """The run."""

    steps: Positive = Field(default=100, description="Training steps.")
    eval_every: Annotated[NonNegative, WhenKey("data.eval")] = Field(
        default=0, description="Evaluate every this many steps; 0: before and after only."
    )
    checkpoint_every: NonNegative = Field(default=10, description="Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: Positive = Field(default=2, description="Newest checkpoints kept.")
    checkpoint_dir: str | None = Field(
        default=None,
        description="Folder of this run's checkpoints, the same for all processes; gs://… is one in a bucket. null: "
        "checkpoints in run_dir.",
    )
    keep_trajectories: NonNegative | None = Field(
        default=256,
        description="Most trajectories of a step written to trajectories.jsonl: the best, the worst, their groups, and "
        "other groups by chance. null: all.",
    )
    max_failed_batches: Positive = Field(
        default=2,
        description="Stop after this many batches in a row that lost every trajectory (rewards that fail, say).",
    )
    on_disagreement: Literal["stop", "warn"] = Field(
        default="stop",
        description="When engine and learner give tokens of the same weights log-probs further apart than their "
        "precision explains: a diagnosis is made, then stop ends the run before it learns from them, warn goes on. See "
        "docs/agreement.md.",
    )
    agreement_tolerance: tuple[float, float] | None = Field(
        default=None,
        description="How far apart, in nats: [of one token, on average]; null: by engine and precision, see "
        "docs/agreement.md.",
    )
    target_accuracy: Annotated[float | None, WhenKey("data.eval") & WhenKey("trainer.eval_every")] = Field(
        default=None, gt=0, le=1, description="Stop early once an evaluation during training reaches this."
    )

    @field_validator("agreement_tolerance")
    @classmethod
    def _positive(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not 0 < value[1] <= value[0]:
            raise ValueError(f"must be [largest of one token, largest mean], both over 0, got {list(value)}")
        return value


class Config(Section):
    """A whole run."""

    seed: NonNegative = Field(default=0, description="Seeds the data order, sampling and everything else.")
    run_dir: str = Field(description="Folder of the run: config, metrics, trajectories, checkpoints.")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    tool_config: ToolClientConfig = Field(default_factory=ToolClientConfig)
    search: Annotated[SearchConfig, UsedByAgents("search_agent")] = Field(default_factory=SearchConfig)
    interactions: Annotated[InteractionsConfig, UsedByAgents("interaction_agent")] = Field(
        default_factory=InteractionsConfig
    )
    reward: RewardConfig = Field(default_factory=RewardConfig)
    environments: Annotated[EnvironmentsConfig, UsedByAgents("environment_agent")] = Field(
        default_factory=EnvironmentsConfig
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    critic: Annotated[CriticConfig, WhenKey("algorithm.adv_estimator", "gae")] = Field(default_factory=CriticConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    trace: TraceConfig = Field(default_factory=TraceConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """``agent.n`` gives ``rollout.group_size`` where that is not set; stale tokens are corrected for."""
        if not isinstance(tree, Mapping):
            return tree
        tree = with_correction(tree)
        sections = {"tool_config": {}, **tree}  # validated even if not given: the environment may hold some of it
        agent, rollout = sections.get("agent"), sections.get("rollout") or {}
        n = agent.get("n") if isinstance(agent, Mapping) else None
        if n is None or not isinstance(rollout, Mapping):
            return sections
        return {**sections, "rollout": {"group_size": n, **rollout}}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """All problems at once, so a user fixes them in one go."""
        if found := list(problems(self)):
            raise ValueError("\n".join(found))
        return self


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, applies ``a.b=c`` overrides and validates.

    Args:
        path: the YAML file. With a key ``base``, the path of another (from its own folder), it says only what differs.
        overrides: ``key.path=value``; the value is parsed as YAML (``true``, ``1e-5``, ``[1, 2]``, ``null``).

    Raises:
        ConfigError: with all problems at once.
    """
    return build(read_tree(Path(path)), overrides)


def build(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validates a nested mapping plus overrides into a :class:`Config`; raises :class:`ConfigError`."""
    return build_tree(Config, tree, overrides)
