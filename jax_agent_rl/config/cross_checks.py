"""What one section of a configuration says against another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax_agent_rl.config.algorithm import algorithm_problems
from jax_agent_rl.config.conditions import unused
from jax_agent_rl.config.mesh import MeshConfig
from jax_agent_rl.config.placement import placement_problems
from jax_agent_rl.config.rollout import rollout_problems
from jax_agent_rl.config.strategy import strategy_problems
from jax_agent_rl.config.trace import trace_problems
from jax_agent_rl.config.trainer import trainer_problems

if TYPE_CHECKING:
    from jax_agent_rl.config import Config


def problems(config: Config) -> Iterator[str]:
    """Every inconsistency, within sections and between them, each with its fix."""
    yield from unused(config)
    yield from _within_sections(config)
    yield from _of_groups(config)
    yield from _of_schedules(config)
    yield from _of_lengths(config)
    yield from _of_log_probs(config)
    yield from _of_adapters(config)
    if config.rollout.deterministic:
        yield from _of_one_program(config)


def _within_sections(config: Config) -> Iterator[str]:
    rollout, algorithm = config.rollout, config.algorithm
    yield from algorithm_problems(algorithm, max_response_length=config.agent.max_response_length)
    yield from strategy_problems(rollout.strategy, group_size=rollout.group_size, adv_estimator=algorithm.adv_estimator)
    yield from trainer_problems(config.trainer)
    yield from trace_problems(config.trace)
    yield from placement_problems(
        rollout,
        backend=rollout.backend,
        mode=config.trainer.mode,
        deterministic=rollout.deterministic,
        devices=rollout.vllm.tensor_parallel_size if rollout.backend == "vllm" else rollout.jetstream.mesh.devices,
    )
    yield from rollout_problems(rollout)


def _of_groups(config: Config) -> Iterator[str]:
    rollout, agent, algorithm, learner = config.rollout, config.agent, config.algorithm, config.learner
    if agent.history_window is not None and rollout.strategy.name == "treerl":
        yield (
            "agent.history_window does not go with rollout.strategy.name=treerl, whose forks within a turn are "
            "found in the whole history; leave it out, or set rollout.strategy.name=tree_grpo or arpo"
        )
    if rollout.group_size == 1 and algorithm.needs_group:
        yield (
            f"rollout.group_size=1 gives zero {algorithm.adv_estimator} advantages; set rollout.group_size >= 2, "
            "or algorithm.adv_estimator=reinforce_plus_plus, remax or gae"
        )
    if agent.n not in (None, rollout.group_size):
        yield f"agent.n={agent.n} is another name of rollout.group_size={rollout.group_size}; set one"
    if learner.num_minibatches > rollout.prompts_per_step:
        yield (
            f"learner.num_minibatches={learner.num_minibatches} cuts the batch finer than its "
            f"rollout.prompts_per_step={rollout.prompts_per_step} groups; lower it"
        )


def _of_schedules(config: Config) -> Iterator[str]:
    """A decay of the learning rate has steps to decay over. The policy's begins once the critic is warm."""
    steps, waits = config.trainer.steps, config.critic.critic_warmup
    for name, optimizer, total in (("learner", config.learner, steps - waits), ("critic", config.critic, steps)):
        kind, warm_up = optimizer.lr_scheduler_type, optimizer.lr_warmup_steps
        if kind == "constant" and optimizer.changed("min_lr_ratio"):
            yield (
                f"{name}.min_lr_ratio is read only with {name}.lr_scheduler_type linear or cosine, which is "
                f"{kind!r}; remove it or change that"
            )
        if kind != "constant" and warm_up >= total:
            yield (
                f"{name}.lr_scheduler_type={kind} has no steps left: {name}.lr_warmup_steps={warm_up} of {total} "
                "(trainer.steps, for the policy less critic.critic_warmup); lower it, or raise trainer.steps"
            )


def _of_lengths(config: Config) -> Iterator[str]:
    """Contexts fit the engine, and packed rows."""
    agent, longest = config.agent, config.rollout.max_model_len
    if agent.max_model_len is not None and agent.max_model_len > longest:
        yield (
            f"agent.max_model_len={agent.max_model_len} is more than the engine's rollout.max_model_len={longest}; "
            "raise the latter"
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
            f"agent.max_prompt_length + agent.max_response_length = {need} does not fit one packed row; "
            f"set learner.pack_length >= {need}"
        )


def _of_log_probs(config: Config) -> Iterator[str]:
    """What the engine reports is what the learner compares with."""
    rollout, learner = config.rollout, config.learner
    if not config.agent.mask_observations and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "agent.mask_observations=false trains on observations, of which the engine has no log-probs: set "
            "algorithm.rollout_correction.bypass_mode=false"
        )
    if learner.lora and learner.lora.quantize != "none" and rollout.backend != "jetstream":
        yield (
            f"learner.lora.quantize={learner.lora.quantize} trains over rounded weights, which rollout.backend="
            f"{rollout.backend} would not start from; set rollout.backend=jetstream, or quantize=none"
        )


def _of_adapters(config: Config) -> Iterator[str]:
    adapter, known = config.agent.adapter, config.rollout.adapters
    if adapter is not None and config.rollout.backend != "remote" and adapter not in known:
        yield f"agent.adapter={adapter!r} is not in rollout.adapters, which has {sorted(known)}; add its folder there"


def _of_one_program(config: Config) -> Iterator[str]:
    """What ``rollout.deterministic`` needs."""
    rollout, engine = config.rollout, config.rollout.jetstream
    if rollout.backend != "jetstream":
        yield (
            f"rollout.deterministic needs the learner and the engine in one program, but rollout.backend is "
            f"{rollout.backend!r}; set it to jetstream, or rollout.deterministic=false"
        )
    if engine.kv_dtype != "auto" or engine.quantize != "none":
        yield (
            f"rollout.deterministic has engine and learner compute alike, but rollout.jetstream.kv_dtype="
            f"{engine.kv_dtype} and quantize={engine.quantize} round what the learner does not; set kv_dtype=auto "
            "and quantize=none, or rollout.deterministic=false"
        )
    spread = config.learner.mesh != MeshConfig() or engine.mesh.devices > 1 or engine.device_offset > 0
    if spread or config.algorithm.rollout_correction.bypass_mode:
        yield (
            "rollout.deterministic runs on one device and compares the learner's own log-probs: remove "
            "learner.mesh, rollout.jetstream.mesh and device_offset, and "
            "algorithm.rollout_correction.bypass_mode, or set rollout.deterministic=false"
        )
