"""The configuration: one frozen tree, loaded from YAML plus ``a.b=c`` overrides.

``load("configs/quickstart.yaml", ["learner.learning_rate=1e-5"])`` returns a :class:`Config` or raises one
:class:`~jax_agent_rl.errors.ConfigError` that lists *every* problem with its path and, for an unknown key, the
nearest valid name. Every key below is read somewhere; a key that does nothing must not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from jax_agent_rl import config_algorithm, config_placement, config_rollout, config_strategy, config_trainer
from jax_agent_rl.config_agents import InteractionsConfig, SearchConfig, ServerToolConfig, ToolClientConfig
from jax_agent_rl.config_algorithm import AlgorithmConfig, CriticConfig
from jax_agent_rl.config_base import LoraConfig, NonNegative, OptimizerSection, Positive, Section
from jax_agent_rl.config_mesh import MeshConfig, MultihostConfig
from jax_agent_rl.config_rollout import RolloutConfig
from jax_agent_rl.config_trainer import OverlapSection
from jax_agent_rl.config_tree import build_tree, read_tree

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

    path: str = Field(description="Folder with config.json, model.safetensors and tokenizer files (Hugging Face).")
    pixels: tuple[Positive, Positive] | None = Field(
        None,
        description="Fewest and most pixels an image or a frame is scaled to, by the engine and where ids are counted; "
        "null: as the model's processor files say.",
    )

    @field_validator("pixels")
    @classmethod
    def _pixels_ascend(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value and value[0] > value[1]:
            raise ValueError(f"must be [fewest, most], got {list(value)}")
        return value


class DataConfig(Section):
    """Rows: JSON Lines or Parquet with `prompt`, `agent_name`, `data_source`, `reward_model.ground_truth`."""

    train: str = Field(description="Rows to train on (.jsonl or .parquet).")
    heldout: str | None = Field(None, description="Rows to evaluate on; never trained on.")
    heldout_limit: Positive | None = Field(None, description="Evaluate on the first this many rows.")


class EndpointConfig(Section):
    """The OpenAI-compatible endpoint, in training and under `jax-agent-rl serve`."""

    request_timeout: float = Field(300.0, gt=0, description="Seconds one request may take, its queueing included.")
    max_body_bytes: Positive = Field(8_000_000, description="Largest request body; larger ones are answered 413.")
    max_concurrent_requests: Positive = Field(1024, description="Requests served at once; more are answered 429.")
    max_choices: Positive = Field(16, description="Largest `n` of a request.")
    max_sessions: Positive = Field(4096, description="Sessions kept at once; more are answered 429.")
    session_ttl: float = Field(3600.0, gt=0, description="Seconds after which an idle session of `serve` is forgotten.")


class AgentConfig(ServerToolConfig):
    """Limits of the agent loop. Budgets are counted in tokens, here and nowhere else."""

    default_agent: str | None = Field(
        None,
        description="Loop for rows without `agent_name`; null: search_agent with enable_search, else text_tool_agent "
        "with tool_config.enabled, else single_turn_agent.",
    )
    enable_search: bool = Field(False, description="Rows without `agent_name` run as search_agent.")
    tool_format: ToolFormatName = Field(
        "auto",
        description="How the model writes tool calls; auto: as its chat template says (hermes if it knows none).",
    )
    tool_prompt: Literal["template", "none"] = Field(
        "template",
        description="template: tool schemas go into the prompt (by the chat template, or as a system section when "
        "it has none). none: the rows' own prompts explain the tools.",
    )
    max_prompt_length: Positive = Field(512, description="A longer prompt drops the trajectory, with its reason.")
    max_response_length: Positive = Field(512, description="Sampled plus inserted ids after the prompt.")
    max_assistant_turns: Positive = Field(8, description="Most generations in one trajectory.")
    max_user_turns: NonNegative = Field(8, description="Most turns of tool results or a simulated user.")
    history_window: Positive | None = Field(
        None,
        description="Earlier turns a turn is sampled after, besides the prompt; null: all. Each turn that no longer "
        "sees all is trained on as a sample of its own. Loops that hold messages (LangGraph, OpenAI clients) manage "
        "their history themselves.",
    )
    max_parallel_calls: Positive = Field(1, description="Calls run per turn; further ones answer with an error.")
    max_tool_response_length: Positive = Field(256, description="Most tokens of one tool result.")
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        "middle", description="The side that is cut when a tool result is too long."
    )
    tool_timeout: float = Field(10.0, gt=0, description="Seconds one tool call may take.")
    path: str | None = Field(None, description="Python file or module that registers more agents.")
    run_timeout: float = Field(
        600.0, gt=0, description="Seconds a LangGraph or OpenAI-client agent may take; then it is dropped."
    )
    edited_history: Literal["segment", "drop"] = Field(
        "segment",
        description="When a LangGraph or OpenAI-client agent asks for a turn that does not extend its last one: "
        "segment trains on both contexts, drop loses the trajectory with its reason.",
    )
    endpoint: EndpointConfig = Field(default_factory=EndpointConfig)


class ToolsConfig(Section):
    """Where tools come from."""

    function_tool_path: str | None = Field(None, description="Python file or module with @function_tool functions.")
    tool_config_path: str | None = Field(
        None, description="YAML file with `tools: [{class_name, config, tool_schema}]`, native and MCP; may be both."
    )


class RemoteRewardConfig(Section):
    """A reward server for some data sources."""

    url: str = Field(description="Where each trajectory is POSTed as JSON; answers a number or {score: …}.")
    data_sources: tuple[str, ...] = Field(min_length=1, description="Rows it scores, by data_source (* matches).")
    timeout: float = Field(30.0, gt=0, description="Seconds one attempt may take.")
    max_retries: NonNegative = Field(3, description="Further attempts after connection errors, 429 and 5xx.")
    retry_delay: float = Field(1.0, ge=0, description="Seconds before the first of them; doubled each time.")
    max_concurrency: Positive = Field(16, description="Requests at the same time.")
    requests_per_second: float | None = Field(None, gt=0, description="Most requests a second; null is no limit.")


class JudgeConfig(Section):
    """The model behind the `judge` that reward functions may ask for."""

    model: str = Field(description="Folder of a frozen model (Hugging Face), or `policy`: the one being trained.")
    max_tokens: Positive = Field(256, description="Most tokens of one opinion.")
    temperature: float = Field(0.0, ge=0, description="0 gives the same opinion every time.")
    max_model_len: Positive = Field(2048, description="Most ids of question and opinion (a frozen model's engine).")
    max_in_flight: Positive = Field(16, description="Questions at the same time.")


class RewardConfig(Section):
    """How trajectories are scored; the function is chosen by each row's `data_source`."""

    path: str | None = Field(None, description="Python file or module that registers more reward functions.")
    timeout: float = Field(60.0, gt=0, description="Seconds scoring may take; then the trajectory is dropped.")
    remote: RemoteRewardConfig | None = Field(None, description="A reward server.")
    sandbox: Literal["bubblewrap", "unsafe_local"] = Field(
        "bubblewrap", description="Where programs that are scored by tests run; unsafe_local is no sandbox at all."
    )
    judge: JudgeConfig | None = Field(None, description="A model whose opinion reward functions may ask for.")


class EnvironmentsConfig(Section):
    """Environments that rows with agent_name `environment_agent` live in, by `extra_info.environment_kwargs.name`."""

    path: str | None = Field(None, description="Python file or module with @register_environment classes.")
    scope: Literal["rollout", "global"] = Field(
        "rollout", description="rollout: a new instance each; global: instances are reset and used again."
    )
    max_instances: Positive = Field(64, description="Instances of one environment at the same time; more wait.")
    timeout: float = Field(30.0, gt=0, description="Seconds one reset, step, score or close may take.")


class LearnerConfig(OptimizerSection):
    """The optimizer step."""

    updates_per_step: Positive = Field(1, description="Mini-batches (optimizer updates) one rollout batch is cut into.")
    ppo_epochs: Positive = Field(1, description="Passes over one rollout batch.")
    row_length: Positive = Field(1024, description="Tokens per packed row; a row is one gradient micro-batch's unit.")
    rows_per_micro_batch: Positive = Field(1, description="Packed rows in one forward/backward (per data shard).")
    share_prefixes: bool = Field(True, description="Compute tokens common to several trajectories of a row once.")
    row_patches: Positive | None = Field(
        None,
        description="Most patches of the pictures in a packed row, for models that see; null: as many as its tokens "
        "can show. Fewer take less memory, but a trajectory that shows more ends the run.",
    )
    freeze_vision: bool = Field(False, description="Leave what reads pictures as it is, and train the decoder alone.")
    remat: Literal["none", "dots", "full"] = Field(
        "dots", description="What the backward pass recomputes: nothing; all but matrix products; whole layers."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of matrix products and activations. Parameters, gradient sums and optimizer stay in float32, "
        "log-probs and losses, too.",
    )
    router_aux_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Weight of the load-balancing loss of mixture-of-experts models; each update then begins with a "
        "forward pass that counts how its tokens are routed.",
    )
    max_nonfinite_steps: Positive = Field(3, description="Stop after this many non-finite steps in a row.")
    lora: LoraConfig | None = Field(None, description="Train adapters and freeze the model; null trains all of it.")
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    multihost: MultihostConfig = Field(default_factory=MultihostConfig)

    @model_validator(mode="after")
    def _rows_divide(self) -> LearnerConfig:
        """Tokens of a row are dealt out in equal parts."""
        rest = -self.row_length % self.mesh.context
        if rest:
            raise ValueError(
                f"learner.row_length={self.row_length} is not divisible by learner.mesh.context={self.mesh.context}; "
                f"set learner.row_length={self.row_length + rest}, or lower learner.mesh.context"
            )
        return self


class TrainerConfig(OverlapSection):
    """The run."""

    steps: Positive = Field(100, description="Training steps.")
    eval_every: NonNegative = Field(0, description="Evaluate every this many steps; 0: before and after only.")
    checkpoint_every: NonNegative = Field(10, description="Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: Positive = Field(2, description="Newest checkpoints kept.")
    max_lost_batches: Positive = Field(
        2, description="Stop after this many batches in a row that lost every trajectory (rewards that fail, say)."
    )
    target_accuracy: float | None = Field(
        None, gt=0, le=1, description="Stop early once an evaluation during training reaches this."
    )


class Config(Section):
    """A whole run."""

    seed: NonNegative = Field(0, description="Seeds the data order, sampling and everything else.")
    run_dir: str = Field(description="Folder of the run: config, metrics, trajectories, checkpoints.")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    tool_config: ToolClientConfig = Field(default_factory=ToolClientConfig)
    search: SearchConfig = Field(default_factory=SearchConfig)
    interactions: InteractionsConfig = Field(default_factory=InteractionsConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    environments: EnvironmentsConfig = Field(default_factory=EnvironmentsConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """``agent.n`` gives ``rollout.group_size`` where that is not set; stale tokens are corrected for."""
        if not isinstance(tree, Mapping):
            return tree
        tree = config_trainer.with_correction(tree)
        sections = {"tool_config": {}, **tree}  # validated even if not given: the environment may hold some of it
        agent, rollout = sections.get("agent"), sections.get("rollout") or {}
        n = agent.get("n") if isinstance(agent, Mapping) else None
        if n is None or not isinstance(rollout, Mapping):
            return sections
        return {**sections, "rollout": {"group_size": n, **rollout}}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """Checks that span sections. Raises them together, so a user fixes them in one go."""
        rollout, agent, algorithm, learner = self.rollout, self.agent, self.algorithm, self.learner
        problems = list(config_algorithm.problems(algorithm, max_response_length=agent.max_response_length))
        problems += config_strategy.problems(
            rollout.strategy, group_size=rollout.group_size, adv_estimator=algorithm.adv_estimator
        )
        problems += config_trainer.problems(self.trainer)
        problems += config_placement.problems(
            rollout,
            backend=rollout.backend,
            mode=self.trainer.mode,
            deterministic=rollout.deterministic,
            devices=rollout.vllm.tensor_parallel_size if rollout.backend == "vllm" else rollout.jetstream.mesh.devices,
            first_device=rollout.jetstream.first_device,
        )
        if agent.history_window is not None and rollout.strategy.name == "treerl":
            problems.append(
                "agent.history_window does not go with rollout.strategy.name=treerl, whose forks within a turn are "
                "found in the whole history; leave it out, or set rollout.strategy.name=tree_grpo or arpo"
            )
        if rollout.group_size == 1 and algorithm.needs_group:
            problems.append(
                f"rollout.group_size=1 gives zero {algorithm.adv_estimator} advantages; set rollout.group_size >= 2, "
                "or algorithm.adv_estimator=reinforce_plus_plus, remax or gae"
            )
        if self.critic != CriticConfig() and algorithm.adv_estimator != "gae":
            problems.append(
                f"critic.* is read only with algorithm.adv_estimator=gae, which is {algorithm.adv_estimator!r}; "
                "remove it or change that"
            )
        if agent.n not in (None, rollout.group_size):
            problems.append(f"agent.n={agent.n} is another name of rollout.group_size={rollout.group_size}; set one")
        if not agent.mask_observations and algorithm.rollout_correction.bypass_mode:
            problems.append(
                "agent.mask_observations=false trains on observations, of which the engine has no log-probs: set "
                "algorithm.rollout_correction.bypass_mode=false"
            )
        if agent.max_model_len is not None and agent.max_model_len > rollout.max_model_len:
            problems.append(
                f"agent.max_model_len={agent.max_model_len} is more than the engine's "
                f"rollout.max_model_len={rollout.max_model_len}; raise the latter"
            )
        if agent.max_prompt_length + (agent.val_max_response_length or 0) > rollout.max_model_len:
            problems.append(
                f"agent.max_prompt_length + agent.val_max_response_length = "
                f"{agent.max_prompt_length + (agent.val_max_response_length or 0)} does not fit "
                f"rollout.max_model_len={rollout.max_model_len}; raise the latter or lower the former"
            )
        need = agent.max_prompt_length + agent.max_response_length
        if agent.history_window is not None:  # a response may be longer than any of its contexts
            need = min(need, rollout.max_model_len)
        if need > rollout.max_model_len:
            problems.append(
                f"agent.max_prompt_length + agent.max_response_length = {need} does not fit "
                f"rollout.max_model_len={rollout.max_model_len}; raise the latter or lower the former"
            )
        if need > learner.row_length:
            problems.append(
                f"agent.max_prompt_length + agent.max_response_length = {need} does not fit one packed row; "
                f"set learner.row_length >= {need}"
            )
        if rollout.top_p < 1 or rollout.top_k > 0:
            problems.append(
                f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: the learner's log-probs are of the "
                "full distribution and would not match; train with top_p=1 and top_k=0"
            )
        problems += config_rollout.problems(rollout)
        if learner.lora and learner.lora.quantize != "none" and rollout.backend != "jetstream":
            problems.append(
                f"learner.lora.quantize={learner.lora.quantize} trains over rounded weights, which rollout.backend="
                f"{rollout.backend} would not start from; set rollout.backend=jetstream, or quantize=none"
            )
        if rollout.deterministic and rollout.backend != "jetstream":
            problems.append(
                f"rollout.deterministic needs the learner and the engine in one program, but rollout.backend is "
                f"{rollout.backend!r}; set it to jetstream, or rollout.deterministic=false"
            )
        engine = rollout.jetstream
        spread = learner.mesh != MeshConfig() or engine.mesh.devices > 1 or engine.first_device > 0
        if rollout.deterministic and (spread or algorithm.rollout_correction.bypass_mode):
            problems.append(
                "rollout.deterministic runs on one device and compares the learner's own log-probs: remove "
                "learner.mesh, rollout.jetstream.mesh and first_device, and "
                "algorithm.rollout_correction.bypass_mode, or set rollout.deterministic=false"
            )
        if learner.updates_per_step > rollout.prompts_per_step:
            problems.append(
                f"learner.updates_per_step={learner.updates_per_step} cuts the batch finer than its "
                f"rollout.prompts_per_step={rollout.prompts_per_step} groups; lower it"
            )
        if problems:
            raise ValueError("\n".join(problems))
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
