"""A whole run: the root of the configuration tree, its loading, and checks across sections."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from jax_agent_rl.config.agent import AgentConfig
from jax_agent_rl.config.algorithm import AlgorithmConfig, CriticConfig, algorithm_problems
from jax_agent_rl.config.base import NonNegative, Section, UsedByAgents, WhenKey, unused, value_at
from jax_agent_rl.config.kl import DistillConfig, distill_problems, with_teachers
from jax_agent_rl.config.learner import LearnerConfig, MeshConfig
from jax_agent_rl.config.loading import build_tree, load_tree
from jax_agent_rl.config.rollout import RolloutConfig, rollout_problems, strategy_problems
from jax_agent_rl.config.task import (
    DataConfig,
    EnvironmentsConfig,
    InteractionsConfig,
    ModelConfig,
    RewardConfig,
    SearchConfig,
    ToolClientConfig,
    ToolsConfig,
)
from jax_agent_rl.config.trainer import (
    TraceConfig,
    TrainerConfig,
    trainer_problems,
    with_correction,
)


class Config(Section):
    """A whole run."""

    seed: NonNegative = Field(
        default=0, description="Seed of the data order, sampling and everything else."
    )
    run_dir: str = Field(description="Run folder: config, metrics, trajectories, checkpoints.")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    tool_config: ToolClientConfig = Field(default_factory=ToolClientConfig)
    search: Annotated[SearchConfig, UsedByAgents("search_agent")] = Field(
        default_factory=SearchConfig
    )
    interactions: Annotated[InteractionsConfig, UsedByAgents("interaction_agent")] = Field(
        default_factory=InteractionsConfig
    )
    reward: RewardConfig = Field(default_factory=RewardConfig)
    environments: Annotated[EnvironmentsConfig, UsedByAgents("environment_agent")] = Field(
        default_factory=EnvironmentsConfig
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    distill: DistillConfig | None = Field(
        default=None, description="Teachers to distill from; null: none."
    )
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    critic: Annotated[CriticConfig, WhenKey("algorithm.adv_estimator", "gae")] = Field(
        default_factory=CriticConfig
    )
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    trace: TraceConfig = Field(default_factory=TraceConfig)

    @property
    def replays_supports(self) -> bool:
        """Whether training samples from a part of the vocabulary at each position.

        The learner then normalizes over the same part.
        """
        return self.rollout.restricts_sampling or self.agent.constrain_tool_calls

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """Fill in what other keys imply.

        These are the correction for stale tokens, the KL to teachers, and ``rollout.group_size``,
        whose other name is ``agent.n``.
        """
        if not isinstance(tree, Mapping):
            return tree
        tree = with_teachers(with_correction(tree))

        # tool_config is validated even if the tree lacks it: the environment may set its keys.
        sections = {"tool_config": {}, **tree}

        agent = sections.get("agent")
        rollout = sections.get("rollout") or {}
        n = agent.get("n") if isinstance(agent, Mapping) else None
        if n is None or not isinstance(rollout, Mapping):
            return sections
        return {**sections, "rollout": {"group_size": n, **rollout}}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """Refuse inconsistencies, all at once."""
        problems = []
        for check in CHECKS:
            problems += check(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``a.b=c`` overrides and validate.

    Args:
        path: the YAML file. With a key ``base``, the path of another file from its folder, it has
            only what differs from that file.
        overrides: ``key.path=value``; the value is parsed as YAML (``true``, ``1e-5``, ``[1, 2]``,
            ``null``).

    Raises:
        ConfigError: with all problems at once.
    """
    return load_tree(Config, path, overrides)


def build(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validate a nested mapping plus overrides.

    Raises:
        ConfigError: with all problems at once.
    """
    return build_tree(Config, tree, overrides)


def _group_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    agent = config.agent
    algorithm = config.algorithm
    learner = config.learner

    if agent.history_window is not None and rollout.strategy.name == "treerl":
        yield (
            "agent.history_window does not go with rollout.strategy.name=treerl, which finds its"
            " forks within a turn in the whole history; leave it out, or set"
            " rollout.strategy.name=tree_grpo or arpo"
        )
    if rollout.group_size == 1 and algorithm.needs_group:
        yield (
            f"rollout.group_size=1 gives zero {algorithm.adv_estimator} advantages; set"
            " rollout.group_size >= 2, or algorithm.adv_estimator=reinforce_plus_plus, remax, rae"
            " or gae"
        )
    if agent.n not in (None, rollout.group_size):
        yield (
            f"agent.n={agent.n} is another name of rollout.group_size={rollout.group_size}; set one"
        )
    if learner.num_minibatches > rollout.prompts_per_step:
        yield (
            f"learner.num_minibatches={learner.num_minibatches} cuts the batch finer than its"
            f" rollout.prompts_per_step={rollout.prompts_per_step} groups; lower it"
        )


def _schedule_problems(config: Config) -> Iterator[str]:
    steps = config.trainer.steps
    steps_of_policy = steps - config.critic.critic_warmup
    for name, optimizer, total in (
        ("learner", config.learner, steps_of_policy),
        ("critic", config.critic, steps),
    ):
        schedule = optimizer.lr_scheduler_type
        warmup = optimizer.lr_warmup_steps
        yield from optimizer.problems(name)
        if schedule != "constant" and warmup >= total:
            yield (
                f"{name}.lr_scheduler_type={schedule} has no steps left:"
                f" {name}.lr_warmup_steps={warmup} of {total} (trainer.steps, for the policy less"
                " critic.critic_warmup); lower it, or raise trainer.steps"
            )


def _length_problems(config: Config) -> Iterator[str]:
    agent = config.agent
    engine_length = config.rollout.max_model_len
    if agent.max_model_len is not None and agent.max_model_len > engine_length:
        yield (
            f"agent.max_model_len={agent.max_model_len} is more than the engine's"
            f" rollout.max_model_len={engine_length}; raise the latter"
        )

    eval_length = agent.max_prompt_length + (agent.val_max_response_length or 0)
    if eval_length > engine_length:
        yield (
            f"agent.max_prompt_length + agent.val_max_response_length = {eval_length} does not fit"
            f" rollout.max_model_len={engine_length}; raise the latter or lower the former"
        )

    train_length = agent.max_prompt_length + agent.max_response_length
    if agent.history_window is not None:  # a response may be longer than any of its contexts
        train_length = min(train_length, engine_length)
    if train_length > engine_length:
        yield (
            f"agent.max_prompt_length + agent.max_response_length = {train_length} does not fit"
            f" rollout.max_model_len={engine_length}; raise the latter or lower the former"
        )
    if train_length > config.learner.pack_length:
        yield (
            f"agent.max_prompt_length + agent.max_response_length = {train_length} does not fit one"
            f" packed row; set learner.pack_length >= {train_length}"
        )


def _logprob_problems(config: Config) -> Iterator[str]:
    if not config.agent.mask_observations and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "agent.mask_observations=false trains on observations, of which the engine has no"
            " log-probs: set algorithm.rollout_correction.bypass_mode=false"
        )

    lora = config.learner.lora
    backend = config.rollout.backend
    if lora is not None and lora.quantize != "none" and backend != "jetstream":
        yield (
            f"learner.lora.quantize={lora.quantize} trains on quantized weights, which"
            f" rollout.backend={backend} would not start from; set"
            " rollout.backend=jetstream, or quantize=none"
        )


def _adapter_problems(config: Config) -> Iterator[str]:
    adapter = config.agent.adapter
    rollout = config.rollout
    # The servers of a remote backend may have adapters that the configuration does not name.
    if adapter is not None and rollout.backend != "remote" and adapter not in rollout.adapters:
        yield (
            f"agent.adapter={adapter!r} is not in rollout.adapters, which has"
            f" {sorted(rollout.adapters)}; add its folder there"
        )
    if config.agent.role_adapters:
        yield from _role_adapter_problems(config)


def _role_adapter_problems(config: Config) -> Iterator[str]:
    agent = config.agent
    ambiguous_roles = sorted(agent.role_adapters.keys() & agent.role_models.keys())
    if ambiguous_roles:
        yield (
            f"agent.role_adapters and agent.role_models both name {ambiguous_roles}; a role is"
            " played by one of them"
        )
    if config.learner.lora is None:
        yield (
            "agent.role_adapters trains LoRA adapters; set learner.lora, e.g. learner.lora.rank=16"
        )

    rollout = config.rollout
    engine_factory = rollout.jetstream.engine_factory
    adv_estimator = config.algorithm.adv_estimator
    for key, value, is_compatible in (
        ("rollout.backend", rollout.backend, rollout.backend == "jetstream"),
        ("rollout.placement", rollout.placement, rollout.placement == "colocated"),
        ("rollout.deterministic", rollout.deterministic, not rollout.deterministic),
        ("rollout.jetstream.engine_factory", engine_factory, not engine_factory),
        ("rollout.adapters", dict(rollout.adapters), not rollout.adapters),
        ("algorithm.adv_estimator", adv_estimator, adv_estimator != "gae"),
    ):
        if not is_compatible:
            yield f"agent.role_adapters does not go with {key}={value}; leave one of them out"


def _deterministic_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    engine = rollout.jetstream
    if not rollout.deterministic:
        return

    if rollout.backend != "jetstream":
        yield (
            "rollout.deterministic needs the learner and the engine in one program, but"
            f" rollout.backend is {rollout.backend!r}; set it to jetstream, or"
            " rollout.deterministic=false"
        )
    if engine.kv_dtype != "auto" or engine.quantize != "none":
        yield (
            "rollout.deterministic has engine and learner compute alike, but"
            f" rollout.jetstream.kv_dtype={engine.kv_dtype} and quantize={engine.quantize} round"
            " what the learner does not; set kv_dtype=auto and quantize=none, or"
            " rollout.deterministic=false"
        )
    if rollout.restricts_sampling:
        yield (
            f"rollout.deterministic scores all ids, but rollout.top_p={rollout.top_p:g},"
            f" top_k={rollout.top_k} and min_p={rollout.min_p:g} sample from some; set top_p=1,"
            " top_k=0 and min_p=0, or deterministic=false"
        )
    uses_several_devices = (
        config.learner.mesh != MeshConfig() or engine.mesh.devices > 1 or engine.device_offset > 0
    )
    if uses_several_devices or config.algorithm.rollout_correction.bypass_mode:
        yield (
            "rollout.deterministic runs on one device and compares the learner's own log-probs:"
            " remove learner.mesh, rollout.jetstream.mesh and device_offset, and"
            " algorithm.rollout_correction.bypass_mode, or set rollout.deterministic=false"
        )


def _placement_problems(config: Config) -> Iterator[str]:
    """Yield inconsistencies of the engines' placement with the backend and ``trainer.mode``."""
    rollout = config.rollout
    placement = rollout.placement
    mode = config.trainer.mode
    is_remote = rollout.backend == "remote"
    if placement == "colocated":
        if rollout.sleep_during_update and mode != "sync":
            yield (
                "rollout.sleep_during_update: with rollout.placement=colocated and"
                f" trainer.mode={mode} the engine samples while the learner updates; set"
                " trainer.mode=sync, rollout.placement=hybrid, or"
                " rollout.sleep_during_update=false"
            )
    elif is_remote:
        yield (
            f"rollout.placement={placement} places engines that the run starts, but"
            " rollout.backend=remote runs where its servers are; remove rollout.placement, or set"
            " rollout.backend=jetstream or vllm"
        )
    elif rollout.deterministic:
        yield (
            "rollout.deterministic shares one program with the learner, but"
            f" rollout.placement={placement} runs engines in other processes; set"
            " rollout.placement=colocated, or rollout.deterministic=false"
        )
    if rollout.sleep_during_update and (placement == "separate" or is_remote):
        yield "rollout.sleep_during_update: no engine shares the learner's devices; remove it"
    yield from _gpu_count_problems(rollout)


def _gpu_count_problems(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.backend == "vllm":
        key = "rollout.vllm.tensor_parallel_size"
        devices = rollout.vllm.tensor_parallel_size
        may_grow = False
    else:
        mesh = rollout.jetstream.mesh
        key = "rollout.jetstream.mesh"
        devices = mesh.devices
        may_grow = mesh.data is None or mesh.tensor is None  # the engine fills the devices it has

    gpus = rollout.gpus_per_engine
    is_enough = gpus in (0, devices) or (may_grow and gpus % devices == 0)
    if not is_enough:
        yield (f"rollout.gpus_per_engine={gpus}: set {devices}, which {key} needs, or 0 for CPUs")


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    unused,
    algorithm_problems,
    strategy_problems,
    trainer_problems,
    _placement_problems,
    rollout_problems,
    _group_problems,
    _schedule_problems,
    _length_problems,
    _logprob_problems,
    _adapter_problems,
    distill_problems,
    _deterministic_problems,
)
"""Each yields the inconsistencies of one kind, within a section or across several, with fixes."""


# --- rows that name no agent ----------------------------------------------------------------------

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
        f"{len(plain_rows)} of {len(rows)} rows have no agent_name, so they run as {PLAIN_AGENT}"
        f" and never use {', '.join(idle)}"
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


def has_own_devices(config: Config) -> bool:
    """Return whether engines compute without taking time from the learner."""
    rollout = config.rollout
    if rollout.placement != "colocated" or rollout.backend == "remote":
        return True
    if rollout.backend != "jetstream":
        return False
    return rollout.jetstream.device_offset >= config.learner.mesh.devices
