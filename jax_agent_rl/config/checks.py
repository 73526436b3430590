"""Checks across sections: combinations of keys that are refused.

Each function takes the sections that it compares, and yields a message with its fix for every
inconsistency. What a section finds by itself is in its own ``problems``.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax_agent_rl.config.agent import AgentConfig
from jax_agent_rl.config.algorithm import AlgorithmConfig, CriticConfig
from jax_agent_rl.config.kl import DistillConfig, KLConfig
from jax_agent_rl.config.learner import LearnerConfig
from jax_agent_rl.config.rollout import RolloutConfig
from jax_agent_rl.config.trainer import TrainerConfig

# --- groups and their advantages ------------------------------------------------------------------


def group_problems(
    rollout: RolloutConfig, agent: AgentConfig, algorithm: AlgorithmConfig, learner: LearnerConfig
) -> Iterator[str]:
    """Compare the size of a group with what is made of groups."""
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


def strategy_problems(
    rollout: RolloutConfig, agent: AgentConfig, algorithm: AlgorithmConfig
) -> Iterator[str]:
    """Compare ``rollout.strategy`` with the estimator, and with what it finds its forks in."""
    strategy = rollout.strategy.name
    adv_estimator = algorithm.adv_estimator
    if strategy == "chain" and adv_estimator in ("tree_grpo", "treerl", "arpo"):
        yield (
            f"algorithm.adv_estimator={adv_estimator} compares branches,"
            " rollout.strategy.name=chain makes none; set"
            f" rollout.strategy.name={adv_estimator}, or algorithm.adv_estimator=grpo"
        )
    if strategy != "chain" and adv_estimator == "remax":
        yield (
            "algorithm.adv_estimator=remax compares a trajectory with a greedy chain from the"
            " prompt; set rollout.strategy.name=chain, or another estimator (tree_grpo, treerl,"
            " arpo)"
        )
    if strategy == "treerl" and agent.history_window is not None:
        yield (
            "agent.history_window does not go with rollout.strategy.name=treerl, which finds its"
            " forks within a turn in the whole history; leave it out, or set"
            " rollout.strategy.name=tree_grpo or arpo"
        )


# --- lengths --------------------------------------------------------------------------------------


def length_problems(
    agent: AgentConfig, rollout: RolloutConfig, learner: LearnerConfig, algorithm: AlgorithmConfig
) -> Iterator[str]:
    """Compare the agents' budgets with the engine's context and the learner's packed rows."""
    engine_length = rollout.max_model_len
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
    if train_length > learner.pack_length:
        yield (
            f"agent.max_prompt_length + agent.max_response_length = {train_length} does not fit one"
            f" packed row; set learner.pack_length >= {train_length}"
        )

    overlong_buffer = algorithm.shaping.overlong_buffer
    if overlong_buffer > agent.max_response_length:
        yield (
            f"algorithm.shaping.overlong_buffer={overlong_buffer} is longer than"
            f" agent.max_response_length={agent.max_response_length}; lower it"
        )


# --- optimizers -----------------------------------------------------------------------------------


def schedule_problems(
    learner: LearnerConfig, critic: CriticConfig, trainer: TrainerConfig
) -> Iterator[str]:
    """Compare the warm-up of both optimizers with the steps that they make."""
    steps = trainer.steps
    steps_of_policy = steps - critic.critic_warmup
    for name, optimizer, total in (
        ("learner", learner, steps_of_policy),
        ("critic", critic, steps),
    ):
        schedule = optimizer.lr_scheduler_type
        warmup = optimizer.lr_warmup_steps
        if schedule != "constant" and warmup >= total:
            yield (
                f"{name}.lr_scheduler_type={schedule} has no steps left:"
                f" {name}.lr_warmup_steps={warmup} of {total} (trainer.steps, for the policy less"
                " critic.critic_warmup); lower it, or raise trainer.steps"
            )


# --- log-probs ------------------------------------------------------------------------------------


def observation_problems(agent: AgentConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Refuse observations in a loss that cannot read them, or in two losses."""
    if not agent.mask_observations and algorithm.rollout_correction.bypass_mode:
        yield (
            "agent.mask_observations=false trains on observations, of which the engine has no"
            " log-probs: set algorithm.rollout_correction.bypass_mode=false"
        )
    if not algorithm.observation_loss.coef:
        return
    if not agent.mask_observations:
        yield (
            "agent.mask_observations=false gives observations the policy's loss, and"
            f" algorithm.observation_loss.coef={algorithm.observation_loss.coef} one of their own;"
            " remove one of them"
        )
    if agent.history_window is not None:
        yield (
            f"agent.history_window={agent.history_window} moves observations into the prompts of"
            " later turns, which algorithm.observation_loss does not predict; remove one of them"
        )


def distill_problems(
    distill: DistillConfig, kl: KLConfig, rollout: RolloutConfig, *, replays_supports: bool
) -> Iterator[str]:
    """Compare the teachers with the KL, and with what the policy samples from.

    Args:
        replays_supports: see :attr:`~jax_agent_rl.config.Config.replays_supports`.
    """
    if kl.where == "none":
        yield (
            "distill.teachers, but algorithm.kl.where=none compares with none; set it to advantage"
            " or loss"
        )

    if kl.reference == "feedback":
        yield (
            "distill.teachers and algorithm.kl.reference=feedback are two references of one KL; set"
            " kl.reference=initial, or train without distill"
        )

    # A server scores at temperature 1 over the whole vocabulary, whatever the policy samples from.
    temperature = rollout.temperature
    urls = [teacher.url for teacher in distill.teachers if teacher.url is not None]
    if urls and (temperature != 1 or replays_supports):
        subset = " from some of them" if replays_supports else ""
        yield (
            f"distill.teachers: {urls[0]} gives log-probs of temperature 1 over all ids, but the"
            f" policy samples with rollout.temperature={temperature:g}{subset}; set"
            " rollout.temperature=1 without top_p, top_k, min_p and agent.constrain_tool_calls, or"
            " put the teacher on the learner's devices (remove its url)"
        )


# --- engines --------------------------------------------------------------------------------------


def sleep_problems(rollout: RolloutConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Refuse an engine that sleeps while it has to sample."""
    is_colocated = rollout.placement == "colocated"
    if rollout.sleep_during_update and is_colocated and trainer.mode != "sync":
        yield (
            "rollout.sleep_during_update: with rollout.placement=colocated and"
            f" trainer.mode={trainer.mode} the engine samples while the learner updates; set"
            " trainer.mode=sync, rollout.placement=hybrid, or rollout.sleep_during_update=false"
        )


def quantized_lora_problems(learner: LearnerConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Refuse an engine that cannot start from quantized weights."""
    lora = learner.lora
    if lora is not None and lora.quantize != "none" and rollout.backend != "jetstream":
        yield (
            f"learner.lora.quantize={lora.quantize} trains on quantized weights, which"
            f" rollout.backend={rollout.backend} would not start from; set"
            " rollout.backend=jetstream, or quantize=none"
        )


def deterministic_problems(
    rollout: RolloutConfig, learner: LearnerConfig, algorithm: AlgorithmConfig
) -> Iterator[str]:
    """Refuse what ``rollout.deterministic`` cannot do."""
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
    if algorithm.rollout_correction.bypass_mode:
        yield (
            "rollout.deterministic compares the learner's own log-probs; remove"
            " algorithm.rollout_correction.bypass_mode, or set rollout.deterministic=false"
        )
    for key, size in (
        ("learner.mesh.expert", learner.mesh.expert),
        ("learner.mesh.context", learner.mesh.context),
        ("rollout.jetstream.mesh.expert", engine.mesh.expert or 1),
    ):
        if size > 1:
            yield (
                "rollout.deterministic computes on meshes of data, fsdp and tensor, but"
                f" {key}={size}; set it to 1, or rollout.deterministic=false"
            )


# --- adapters -------------------------------------------------------------------------------------


def adapter_problems(agent: AgentConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Compare the adapter that agents sample with to those that the engine serves."""
    adapter = agent.adapter
    # The servers of a remote backend may have adapters that the configuration does not name.
    if adapter is not None and rollout.backend != "remote" and adapter not in rollout.adapters:
        yield (
            f"agent.adapter={adapter!r} is not in rollout.adapters, which has"
            f" {sorted(rollout.adapters)}; add its folder there"
        )


def role_adapter_problems(
    agent: AgentConfig, rollout: RolloutConfig, learner: LearnerConfig, algorithm: AlgorithmConfig
) -> Iterator[str]:
    """Refuse what cannot train an adapter for each role."""
    if not agent.role_adapters:
        return

    ambiguous_roles = sorted(agent.role_adapters.keys() & agent.role_models.keys())
    if ambiguous_roles:
        yield (
            f"agent.role_adapters and agent.role_models both name {ambiguous_roles}; a role is"
            " played by one of them"
        )
    if learner.lora is None:
        yield (
            "agent.role_adapters trains LoRA adapters; set learner.lora, e.g. learner.lora.rank=16"
        )

    engine_factory = rollout.jetstream.engine_factory
    adv_estimator = algorithm.adv_estimator
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
