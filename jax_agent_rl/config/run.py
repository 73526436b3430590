"""A whole run: the root of the configuration tree, what its keys imply, and its loading."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from jax_agent_rl.config import checks
from jax_agent_rl.config.agent import AgentConfig
from jax_agent_rl.config.algorithm import AlgorithmConfig, CriticConfig
from jax_agent_rl.config.base import NonNegative, Section, UsedByAgents, WhenKey, unused
from jax_agent_rl.config.kl import DistillConfig
from jax_agent_rl.config.learner import LearnerConfig
from jax_agent_rl.config.loading import build_tree, load_tree
from jax_agent_rl.config.rollout import RolloutConfig
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
from jax_agent_rl.config.trainer import TraceConfig, TrainerConfig


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

    @property
    def engines_have_own_devices(self) -> bool:
        """Whether engines compute without taking time from the learner."""
        rollout = self.rollout
        if rollout.placement != "colocated" or rollout.backend == "remote":
            return True
        if rollout.backend != "jetstream":
            return False
        return rollout.jetstream.device_offset >= self.learner.mesh.devices

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        """Fill in what other keys imply.

        These are the correction for stale tokens, the KL to teachers, and ``rollout.group_size``,
        whose other name is ``agent.n``.
        """
        if not isinstance(tree, Mapping):
            return tree
        tree = _with_teachers(_with_correction(tree))

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
        agent = self.agent
        rollout = self.rollout
        algorithm = self.algorithm
        learner = self.learner
        critic = self.critic
        trainer = self.trainer

        problems = list(unused(self))
        # what a section finds by itself
        problems += rollout.problems()
        problems += algorithm.problems()
        problems += learner.problems("learner")
        problems += critic.problems("critic")
        problems += trainer.problems()
        # where sections do not agree
        problems += checks.group_problems(rollout, agent, algorithm, learner)
        problems += checks.strategy_problems(rollout, agent, algorithm)
        problems += checks.length_problems(agent, rollout, learner, algorithm)
        problems += checks.schedule_problems(learner, critic, trainer)
        problems += checks.observation_problems(agent, algorithm)
        problems += checks.sleep_problems(rollout, trainer)
        problems += checks.quantized_lora_problems(learner, rollout)
        problems += checks.deterministic_problems(rollout, learner, algorithm)
        problems += checks.adapter_problems(agent, rollout)
        problems += checks.role_adapter_problems(agent, rollout, learner, algorithm)
        if self.distill is not None:
            problems += self.distill.problems()
            problems += checks.distill_problems(
                self.distill, algorithm.kl, rollout, replays_supports=self.replays_supports
            )
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


# --- what keys imply of other sections ------------------------------------------------------------


def _with_correction(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add token-level importance weights to an unvalidated tree that trains on stale tokens.

    A tree with a correction of its own is returned as it is.
    """
    trainer = sections.get("trainer")
    algorithm = sections.get("algorithm") or {}
    if not isinstance(trainer, Mapping) or not isinstance(algorithm, Mapping):
        return sections

    has_stale_tokens = trainer.get("mode", "sync") != "sync" and trainer.get("max_staleness") != 0
    if not has_stale_tokens or "rollout_correction" in algorithm:
        return sections
    loss = algorithm.get("policy_loss")
    if isinstance(loss, Mapping) and loss.get("loss_mode") == "decoupled":
        return sections  # this loss has importance weights of its own

    correction = {"rollout_is": "token"}
    return {**sections, "algorithm": {**algorithm, "rollout_correction": correction}}


def _with_teachers(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the ``algorithm`` of on-policy distillation to an unvalidated tree with ``distill``.

    Keys of the tree stay as they are.
    """
    if sections.get("distill") is None:
        return sections
    algorithm = sections.get("algorithm") or {}
    if not isinstance(algorithm, Mapping):
        return sections
    kl = algorithm.get("kl") or {}
    if not isinstance(kl, Mapping) or kl.get("where") == "none":
        return sections

    is_exact = bool(kl.get("top_k"))  # computed over the likeliest ids instead of estimated
    kl = {"where": "loss" if is_exact else "advantage", "coef": 1.0, **kl}
    if not is_exact:
        kl = {"estimator": "k1+" if kl["where"] == "loss" else "k1", **kl}
    defaults = {
        "adv_estimator": "none",
        "filter_zero_variance": False,  # groups of equal rewards have the teacher's gradient
    }
    return {**sections, "algorithm": {**defaults, **algorithm, "kl": kl}}
