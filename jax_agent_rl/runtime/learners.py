"""The learner a configuration asks for, on one process or as this process's part of several."""

from __future__ import annotations

from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.critic import critic_shapes
from jax_agent_rl.learner.step import Learner, ScoreContexts
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.models.shown import Sight
from jax_agent_rl.runtime.multihost import LeadingCheckpointer, LeadingLearner, Line, follow


def make_learner(
    config: Config,
    model: DecoderConfig,
    params: Params,
    *,
    score_by: ScoreContexts | None = None,
    line: Line | None = None,
) -> Learner | LeadingLearner:
    """The policy with its optimizer, and the critic if there is one.

    Args:
        params: initial parameters; copied.
        score_by: what computes old log-probs, with ``rollout.deterministic``.
        line: to the processes that do the same, see ``runtime.multihost``.
    """
    learner = Learner(
        model,
        params,
        algorithm=config.algorithm,
        config=config.learner,
        temperature=config.rollout.temperature,
        critic=config.critic,
        critic_init=_critic_init(config, model),
        score_by=score_by,
        sight=Sight.of(model, config.model.path, pixels=config.model.pixels),
    )
    return learner if line is None else LeadingLearner(learner, line)


def open_checkpointer(folder: Path, *, keep: int, line: Line | None) -> Checkpointer | LeadingCheckpointer:
    """Checkpoints of all processes in one folder."""
    return Checkpointer(folder, keep=keep) if line is None else LeadingCheckpointer(folder, keep=keep, line=line)


def follow_run(config: Config) -> None:
    """A whole run on a process that does not lead: the learner, and nothing else."""
    learner = make_learner(config, *load_hf(config.model.path))
    assert isinstance(learner, Learner)
    follow(learner)


def _critic_init(config: Config, policy: DecoderConfig) -> Params | None:
    """Weights of ``critic.path``; None where the critic starts from the policy's."""
    if config.critic.path is None:
        return None
    model, params = load_hf(config.critic.path)
    if critic_shapes(model) != critic_shapes(policy):
        raise ConfigError(
            f"critic.path={config.critic.path!r} holds a model of other shapes than {config.model.path!r}; give one of "
            "the same architecture, or leave it out"
        )
    return params
