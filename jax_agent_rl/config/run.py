"""A whole run: the root of the configuration tree, the checks between its sections and of its rows, and loading."""

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
        """True if training samples from parts of the vocabulary, over which the learner then normalizes."""
        return self.rollout.restricts_sampling or self.agent.constrain_tool_calls

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """Take ``rollout.group_size`` from ``agent.n`` if not set; add correction for stale tokens, teachers' KL."""
        if not isinstance(tree, Mapping):
            return tree
        tree = with_teachers(with_correction(tree))
        sections = {
            "tool_config": {},
            **tree,
        }  # validated even if not given: the environment may hold some of it
        agent, rollout = sections.get("agent"), sections.get("rollout") or {}
        n = agent.get("n") if isinstance(agent, Mapping) else None
        if n is None or not isinstance(rollout, Mapping):
            return sections
        return {**sections, "rollout": {"group_size": n, **rollout}}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """Refuse inconsistencies, all at once."""
        if found := [problem for check in CHECKS for problem in check(self)]:
            raise ValueError("\n".join(found))
        return self


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``a.b=c`` overrides and validate.

    Args:
        path: the YAML file. With a key ``base``, the path of another (from its folder), it says
            only what differs.
        overrides: ``key.path=value``; the value is parsed as YAML (``true``, ``1e-5``, ``[1, 2]``,
            ``null``).

    Raises:
        ConfigError: with all problems at once.
    """
    return load_tree(Config, path, overrides)


def build(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validate a nested mapping plus overrides into a :class:`Config`; raise :class:`ConfigError`."""
    return build_tree(Config, tree, overrides)


def _group_problems(config: Config) -> Iterator[str]:
    rollout, agent, algorithm, learner = (
        config.rollout,
        config.agent,
        config.algorithm,
        config.learner,
    )
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
            f"learner.num_minibatches={learner.num_minibatches} cuts the batch finer than its "
            f"rollout.prompts_per_step={rollout.prompts_per_step} groups; lower it"
        )


def _schedule_problems(config: Config) -> Iterator[str]:
    steps = config.trainer.steps
    policy_steps = steps - config.critic.critic_warmup
    for name, optimizer, total in (
        ("learner", config.learner, policy_steps),
        ("critic", config.critic, steps),
    ):
        kind, warm_up = optimizer.lr_scheduler_type, optimizer.lr_warmup_steps
        yield from optimizer.problems(name)
        if kind != "constant" and warm_up >= total:
            yield (
                f"{name}.lr_scheduler_type={kind} has no steps left:"
                f" {name}.lr_warmup_steps={warm_up} of {total} (trainer.steps, for the policy less"
                " critic.critic_warmup); lower it, or raise trainer.steps"
            )


def _length_problems(config: Config) -> Iterator[str]:
    agent, longest = config.agent, config.rollout.max_model_len
    if agent.max_model_len is not None and agent.max_model_len > longest:
        yield (
            f"agent.max_model_len={agent.max_model_len} is more than the engine's"
            f" rollout.max_model_len={longest}; raise the latter"
        )
    if (evaluated := agent.max_prompt_length + (agent.val_max_response_length or 0)) > longest:
        yield (
            f"agent.max_prompt_length + agent.val_max_response_length = {evaluated} does not fit "
            f"rollout.max_model_len={longest}; raise the latter or lower the former"
        )
    need = agent.max_prompt_length + agent.max_response_length
    if agent.history_window is not None:  # a response may be longer than any of its contexts
        need = min(need, longest)
    if need > longest:
        yield (
            f"agent.max_prompt_length + agent.max_response_length = {need} does not fit "
            f"rollout.max_model_len={longest}; raise the latter or lower the former"
        )
    if need > config.learner.pack_length:
        yield (
            f"agent.max_prompt_length + agent.max_response_length = {need} does not fit one packed"
            f" row; set learner.pack_length >= {need}"
        )


def _logprob_problems(config: Config) -> Iterator[str]:
    rollout, learner = config.rollout, config.learner
    if not config.agent.mask_observations and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "agent.mask_observations=false trains on observations, of which the engine has no"
            " log-probs: set algorithm.rollout_correction.bypass_mode=false"
        )
    if learner.lora and learner.lora.quantize != "none" and rollout.backend != "jetstream":
        yield (
            f"learner.lora.quantize={learner.lora.quantize} trains on quantized weights, which"
            f" rollout.backend={rollout.backend} would not start from; set"
            " rollout.backend=jetstream, or quantize=none"
        )


def _adapter_problems(config: Config) -> Iterator[str]:
    adapter, known = config.agent.adapter, config.rollout.adapters
    if adapter is not None and config.rollout.backend != "remote" and adapter not in known:
        yield (
            f"agent.adapter={adapter!r} is not in rollout.adapters, which has {sorted(known)}; add"
            " its folder there"
        )
    if config.agent.role_adapters:
        yield from _role_adapter_problems(config)


def _role_adapter_problems(config: Config) -> Iterator[str]:
    rollout, roles = config.rollout, config.agent.role_adapters
    if both := sorted(roles.keys() & config.agent.role_models.keys()):
        yield (
            f"agent.role_adapters and agent.role_models both name {both}; a role is played by one"
            " of them"
        )
    if config.learner.lora is None:
        yield (
            "agent.role_adapters trains LoRA adapters; set learner.lora, e.g. learner.lora.rank=16"
        )
    for key, value, fits in (
        ("rollout.backend", rollout.backend, rollout.backend == "jetstream"),
        ("rollout.placement", rollout.placement, rollout.placement == "colocated"),
        ("rollout.deterministic", rollout.deterministic, not rollout.deterministic),
        (
            "rollout.jetstream.engine_factory",
            rollout.jetstream.engine_factory,
            not rollout.jetstream.engine_factory,
        ),
        ("rollout.adapters", dict(rollout.adapters), not rollout.adapters),
        (
            "algorithm.adv_estimator",
            config.algorithm.adv_estimator,
            config.algorithm.adv_estimator != "gae",
        ),
    ):
        if not fits:
            yield f"agent.role_adapters does not go with {key}={value}; leave one of them out"


def _deterministic_problems(config: Config) -> Iterator[str]:
    rollout, engine = config.rollout, config.rollout.jetstream
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
    spread = (
        config.learner.mesh != MeshConfig() or engine.mesh.devices > 1 or engine.device_offset > 0
    )
    if spread or config.algorithm.rollout_correction.bypass_mode:
        yield (
            "rollout.deterministic runs on one device and compares the learner's own log-probs:"
            " remove learner.mesh, rollout.jetstream.mesh and device_offset, and"
            " algorithm.rollout_correction.bypass_mode, or set rollout.deterministic=false"
        )


def _placement_problems(config: Config) -> Iterator[str]:
    """Yield inconsistencies of the engines' placement with the backend and ``trainer.mode``."""
    rollout, mode = config.rollout, config.trainer.mode
    where, backend = rollout.placement, rollout.backend
    if where == "colocated":
        if rollout.sleep_during_update and mode != "sync":
            yield (
                "rollout.sleep_during_update: with rollout.placement=colocated and"
                f" trainer.mode={mode} the engine samples while the learner updates; set"
                " trainer.mode=sync, rollout.placement=hybrid, or"
                " rollout.sleep_during_update=false"
            )
    elif backend == "remote":
        yield (
            f"rollout.placement={where} places engines that the run starts, but"
            " rollout.backend=remote runs where its servers are; remove rollout.placement, or set"
            " rollout.backend=jetstream or vllm"
        )
    elif rollout.deterministic:
        yield (
            "rollout.deterministic shares one program with the learner, but"
            f" rollout.placement={where} runs engines in other processes; set"
            " rollout.placement=colocated, or rollout.deterministic=false"
        )
    if rollout.sleep_during_update and (where == "separate" or backend == "remote"):
        yield "rollout.sleep_during_update: no engine shares the learner's devices; remove it"
    key, mesh = "rollout.jetstream.mesh", rollout.jetstream.mesh
    devices, is_open = mesh.devices, mesh.data is None or mesh.tensor is None
    if backend == "vllm":
        key, devices, is_open = (
            "rollout.vllm.tensor_parallel_size",
            rollout.vllm.tensor_parallel_size,
            False,
        )
    if rollout.gpus_per_engine not in (0, devices) and (
        rollout.gpus_per_engine % devices or not is_open
    ):
        yield (
            f"rollout.gpus_per_engine={rollout.gpus_per_engine}: set {devices}, which {key} needs,"
            " or 0 for CPUs"
        )


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
"""Each yields the inconsistencies of one kind, within a section or between several, each with its
fix."""


# --- rows that name no agent ----------------------------------------------------------------------

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


_KEYS_OF_AGENTS = {
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
"""Keys of the configuration, and fields of rows, that plain generation does not read, with what
selects an agent."""


def report_idle_tools(
    config: Config, rows: Collection[Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Report rows that run as plain generation although the configuration or the rows ask for tools.

    With ``agent.default_agent`` set, plain generation is taken as intended.

    Returns:
        The observation and its fix; None if nothing is wrong.
    """
    unnamed = [row for row in rows if not row.get("agent_name")]
    if (
        not unnamed
        or config.agent.default_agent
        or default_agent(config.agent, config.tool_config) != PLAIN_AGENT
    ):
        return None
    fields = {
        key for row in unnamed for key, value in (row.get("extra_info") or {}).items() if value
    }

    def is_set(key: str) -> bool:
        section, _, field = key.partition(".")
        return field in fields if section == "extra_info" else bool(value_at(config, key))

    idle = {key: fix for key, fix in _KEYS_OF_AGENTS.items() if is_set(key)}
    if not idle:
        return None
    seen = (
        f"{len(unnamed)} of {len(rows)} rows have no agent_name, so they run as {PLAIN_AGENT} and"
        f" never use {', '.join(idle)}"
    )
    fixes = " or ".join(dict.fromkeys(idle.values()))
    return (
        seen,
        (
            f"set {fixes}, or agent_name in the rows; if that is intended, set"
            f" agent.default_agent={PLAIN_AGENT}"
        ),
    )


def uses_tools(config: Config, rows: Collection[Mapping[str, Any]]) -> bool:
    """Return whether trajectories are expected to call tools: functions are configured, or rows use a tool server.

    Environment steps need not be tool calls.
    """
    default = default_agent(config.agent, config.tool_config)
    served = {"text_tool_agent", "search_agent"} | (
        {"server_tool_agent"} if config.agent.enable_agent else set()
    )
    named = {row.get("agent_name") or default for row in rows}
    return bool(config.tools.function_tool_path or config.tools.tool_config_path or named & served)


def has_own_devices(config: Config) -> bool:
    """Return whether engines compute without taking time from the learner."""
    rollout = config.rollout
    beside = (
        rollout.backend == "jetstream"
        and rollout.jetstream.device_offset >= config.learner.mesh.devices
    )
    return rollout.placement != "colocated" or rollout.backend == "remote" or beside
