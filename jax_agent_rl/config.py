"""The configuration: one frozen tree, loaded from YAML plus ``a.b=c`` overrides.

``load("configs/quickstart.yaml", ["learner.learning_rate=1e-5"])`` returns a :class:`Config` or raises one
:class:`~jax_agent_rl.errors.ConfigError` that lists *every* problem with its path and, for an unknown key, the
nearest valid name. Every key below is read somewhere; a key that does nothing must not exist.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from jax_agent_rl.config_agents import InteractionsConfig, SearchConfig, ServerToolConfig, ToolClientConfig
from jax_agent_rl.config_base import NonNegative, Positive
from jax_agent_rl.config_base import Section as _Section
from jax_agent_rl.errors import ConfigError


class ModelConfig(_Section):
    """The policy."""

    path: str = Field(description="Folder with config.json, model.safetensors and tokenizer files (Hugging Face).")


class DataConfig(_Section):
    """Rows: JSON Lines or Parquet with `prompt`, `agent_name`, `data_source`, `reward_model.ground_truth`."""

    train: str = Field(description="Rows to train on (.jsonl or .parquet).")
    heldout: str | None = Field(None, description="Rows to evaluate on; never trained on.")
    heldout_limit: Positive | None = Field(None, description="Evaluate on the first this many rows.")


class JetStreamConfig(_Section):
    """The embedded JAX engine (rollout.backend: jetstream)."""

    max_concurrent_decodes: Positive = Field(32, description="Decode slots; each holds one context's KV.")
    decode_steps: Positive = Field(16, description="Most decode steps per device dispatch.")
    prefill_buckets: tuple[Positive, ...] = Field(
        (32, 128, 512), description="Padded prompt-chunk lengths, in tokens; longer prompts go in several chunks."
    )

    @field_validator("prefill_buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or list(value) != sorted(set(value)):
            raise ValueError(f"must be ascending and not empty, got {list(value)}")
        return value


class RolloutConfig(_Section):
    """How trajectories are collected."""

    backend: Literal["jetstream", "vllm"] = Field("jetstream", description="The engine that samples.")
    prompts_per_step: Positive = Field(8, description="Dataset rows per training step.")
    group_size: Positive = Field(8, description="Trajectories per row (a GRPO group).")
    max_in_flight: Positive = Field(64, description="Trajectories that run at the same time.")
    max_model_len: Positive = Field(1024, description="Most ids of prompt + response in one context.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature in training; log-probs are of it.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass in training.")
    top_k: NonNegative = Field(0, description="Most likely ids kept in training; 0 is off.")
    eval_temperature: float = Field(0.0, ge=0, description="Temperature for held-out evaluation; 0 is greedy.")
    jetstream: JetStreamConfig = Field(default_factory=JetStreamConfig)


class AgentConfig(ServerToolConfig):
    """Limits of the agent loop. Budgets are counted in tokens, here and nowhere else."""

    default_agent: str | None = Field(
        None,
        description="Loop for rows without `agent_name`; null: search_agent with enable_search, else text_tool_agent "
        "with tool_config.enabled, else single_turn_agent.",
    )
    enable_search: bool = Field(False, description="Rows without `agent_name` run as search_agent.")
    tool_format: Literal["hermes"] = Field("hermes", description="How tool calls are written in text.")
    tool_prompt: Literal["template", "none"] = Field(
        "template",
        description="template: tool schemas go into the prompt (by the chat template, or as a system section when "
        "it has none). none: the rows' own prompts explain the tools.",
    )
    max_prompt_length: Positive = Field(512, description="A longer prompt drops the trajectory, with its reason.")
    max_response_length: Positive = Field(512, description="Sampled plus inserted ids after the prompt.")
    max_assistant_turns: Positive = Field(8, description="Most generations in one trajectory.")
    max_user_turns: NonNegative = Field(8, description="Most turns of tool results or a simulated user.")
    max_parallel_calls: Positive = Field(1, description="Calls run per turn; further ones answer with an error.")
    max_tool_response_length: Positive = Field(256, description="Most tokens of one tool result.")
    tool_response_truncate_side: Literal["left", "middle", "right"] = Field(
        "middle", description="The side that is cut when a tool result is too long."
    )
    tool_timeout: float = Field(10.0, gt=0, description="Seconds one tool call may take.")


class ToolsConfig(_Section):
    """Where tools come from."""

    function_tool_path: str | None = Field(None, description="Python file or module with @function_tool functions.")


class RewardConfig(_Section):
    """How trajectories are scored; the function is chosen by each row's `data_source`."""

    path: str | None = Field(None, description="Python file or module that registers more reward functions.")
    timeout: float = Field(60.0, gt=0, description="Seconds scoring may take; then the trajectory is dropped.")


class AlgorithmConfig(_Section):
    """The objective."""

    adv_estimator: Literal["grpo", "dr_grpo", "rloo"] = Field("grpo", description="Group advantage estimator.")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = Field(
        "token-mean", description="How token losses are averaged, over the whole batch however it is split."
    )
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="PPO clip below 1.")
    clip_ratio_high: float = Field(0.28, gt=0, description="PPO clip above 1 (clip-higher).")
    clip_ratio_c: float = Field(3.0, gt=1, description="Dual clip for negative advantages.")
    filter_zero_variance: bool = Field(True, description="Leave out groups whose rewards are all equal.")


class MeshConfig(_Section):
    """Learner mesh; the product must equal the number of devices."""

    data: Positive = Field(1, description="Data-parallel replicas.")
    fsdp: Positive = Field(1, description="Shards of every parameter (and of the batch).")
    tensor: Positive = Field(1, description="Tensor-parallel shards.")


class LearnerConfig(_Section):
    """The optimizer step."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: NonNegative = Field(0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    adam_b1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_b2: float = Field(0.95, ge=0, lt=1, description="AdamW second-moment decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient-norm clip.")
    updates_per_step: Positive = Field(1, description="Mini-batches (optimizer updates) one rollout batch is cut into.")
    row_length: Positive = Field(1024, description="Tokens per packed row; a row is one gradient micro-batch's unit.")
    rows_per_micro_batch: Positive = Field(1, description="Packed rows in one forward/backward (per data shard).")
    share_prefixes: bool = Field(True, description="Compute tokens common to several trajectories of a row once.")
    remat: Literal["none", "dots", "full"] = Field(
        "dots", description="What the backward pass recomputes: nothing; all but matrix products; whole layers."
    )
    max_nonfinite_steps: Positive = Field(3, description="Stop after this many non-finite steps in a row.")
    mesh: MeshConfig = Field(default_factory=MeshConfig)


class TrainerConfig(_Section):
    """The run."""

    steps: Positive = Field(100, description="Training steps.")
    eval_every: NonNegative = Field(0, description="Evaluate every this many steps; 0: before and after only.")
    checkpoint_every: NonNegative = Field(10, description="Steps between checkpoints; 0: at the end only.")
    keep_checkpoints: Positive = Field(2, description="Newest checkpoints kept.")
    target_accuracy: float | None = Field(
        None, gt=0, le=1, description="Stop early once an evaluation during training reaches this."
    )


class Config(_Section):
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
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """``agent.n`` gives ``rollout.group_size`` where that is not set."""
        if not isinstance(tree, Mapping):
            return tree
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
        problems = []
        if rollout.group_size == 1:
            problems.append(
                f"rollout.group_size=1 gives zero {algorithm.adv_estimator} advantages; set rollout.group_size >= 2"
            )
        if agent.n not in (None, rollout.group_size):
            problems.append(f"agent.n={agent.n} is another name of rollout.group_size={rollout.group_size}; set one")
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
        path: the YAML file.
        overrides: ``key.path=value``; the value is parsed as YAML (``true``, ``1e-5``, ``[1, 2]``, ``null``).

    Raises:
        ConfigError: with all problems at once.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {str(path)!r} does not exist (configs/quickstart.yaml is a good start)")
    try:
        tree = yaml.load(path.read_text(), _Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return build(tree, overrides)


def build(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validates a nested mapping plus overrides into a :class:`Config`; raises :class:`ConfigError`."""
    tree = _copy(tree)
    problems = [problem for item in overrides if (problem := _apply_override(tree, item))]
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [line for item in error.errors() for line in _explain(item)]
    if problems:
        raise ConfigError(problems)
    return config


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-5`` is a number (YAML 1.1 wants ``1.0e-5``)."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
for _first in "-+0123456789":
    _Loader.yaml_implicit_resolvers.setdefault(_first, []).insert(0, ("tag:yaml.org,2002:float", _EXPONENT))


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _apply_override(tree: dict[str, Any], item: str) -> str | None:
    """Sets one ``a.b=c`` in place; returns the problem, if any."""
    key, equals, text = item.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return f"override {item!r}: write key.path=value"
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        return f"override {item!r}: the value is not valid YAML ({error})"
    node = tree
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            return f"override {item!r}: {part!r} is a value, not a section"
        node = child
    node[parts[-1]] = value
    return None


def _explain(error: Mapping[str, Any]) -> list[str]:
    """One pydantic error as lines of our own: path, what is wrong, the value, the fix."""
    path = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        guess = _nearest(path)
        return [f"{path}: unknown key" + (f"; did you mean {guess}?" if guess else "")]
    if error["type"] == "missing":
        return [f"{path}: required, not set"]
    message = error["msg"].removeprefix("Value error, ")
    if not path:
        return message.split("\n")
    if isinstance(error["input"], Mapping):  # a check of the whole section, which names its keys
        return [f"{path}: {message}"]
    return [f"{path}={error['input']!r}: {message}"]


def valid_keys(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """Every key path of the tree with its description."""
    keys: dict[str, str] = {}
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys |= valid_keys(annotation, path + ".")
        else:
            keys[path] = info.description or ""
    return keys


def _nearest(path: str) -> str | None:
    """The valid key a user most likely meant: a near name in place first, then the same leaf elsewhere."""
    keys = list(valid_keys())
    sections = sorted({key.rpartition(".")[0] for key in keys} - {""})
    if close := difflib.get_close_matches(path, keys + sections, n=1, cutoff=0.75):
        return close[0]
    leaf = path.rpartition(".")[2]
    by_leaf = {key.rpartition(".")[2]: key for key in keys}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None
