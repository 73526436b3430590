"""The learner a configuration asks for, on one process or as this process's part of several."""

from __future__ import annotations

from pathlib import Path

from jax_agent_rl.config import Config
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.critic import critic_shapes
from jax_agent_rl.learner.learner import Learner, ScoreContexts
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.hf import load_config, load_hf
from jax_agent_rl.models.sharding import make_mesh, parameter_shardings
from jax_agent_rl.models.vision.context import VisionProcessor
from jax_agent_rl.runtime.multihost import ControlChannel, LeadingCheckpointer, LeadingLearner, follow
from jax_agent_rl.runtime.multihost_engines import host_engine


def make_learner(
    config: Config,
    model: DecoderConfig,
    *,
    score_by: ScoreContexts | None = None,
    line: ControlChannel | None = None,
) -> Learner | LeadingLearner:
    """The policy of ``model.path`` with its optimizer, and the critic if there is one.

    Args:
        model: the policy's hyperparameters.
        score_by: what computes old log-probs, with ``rollout.deterministic``.
        line: to the processes that do the same, see ``runtime.multihost``.

    Raises:
        ConfigError: the mesh does not divide the model, or the critic is of another architecture.
        ModelError: files are missing or damaged.
    """
    learner = Learner(
        model,
        _read(config.model.path, model, config),
        algorithm=config.algorithm,
        config=config.learner,
        temperature=config.rollout.temperature,
        critic=config.critic,
        critic_init=_critic_init(config, model),
        score_by=score_by,
        total_steps=config.trainer.steps,
        vision_processor=VisionProcessor.of(model, config.model.path, pixels=config.model.pixels),
    )
    return learner if line is None else LeadingLearner(learner, line)


def open_checkpointer(
    folder: Path | str, *, keep: int, line: ControlChannel | None
) -> Checkpointer | LeadingCheckpointer:
    """Checkpoints of all processes in one folder."""
    return Checkpointer(folder, keep=keep) if line is None else LeadingCheckpointer(folder, keep=keep, line=line)


def follow_run(config: Config) -> None:
    """A whole run on a process that does not lead: the learner, and the engine on its devices."""
    learner = make_learner(config, load_config(config.model.path))
    assert isinstance(learner, Learner)
    with host_engine(config) as shelf:
        follow(learner, shelf)


def _critic_init(config: Config, policy: DecoderConfig) -> Params | None:
    """Weights of ``critic.path``; None where the critic starts from the policy's."""
    if config.critic.path is None:
        return None
    model = load_config(config.critic.path)
    if critic_shapes(model) != critic_shapes(policy):
        raise ConfigError(
            f"critic.path={config.critic.path!r} holds a model of other shapes than {config.model.path!r}; give one of "
            "the same architecture, or leave it out"
        )
    return _read(config.critic.path, model, config)


def _read(path: str, model: DecoderConfig, config: Config) -> Params:
    """A model's parameters on the learner's mesh: each device's part is read by itself, none is ever whole."""
    mesh = make_mesh(config.learner.mesh)
    return load_hf(path, shardings=parameter_shardings(mesh, model.parameter_shapes()))[1]
