"""Which policy a command uses: a configuration's model, a Hugging Face folder or a checkpoint.

::

    CONFIG                    its model.path
    CONFIG --model FOLDER     that folder, with the configuration's agents, rewards and data
    --model FOLDER            that folder, with defaults and the keys of the command line
    --run RUN [--step N]      a checkpoint, with the run's own configuration (or CONFIG's)

Only files of a configuration are read here, so that a mistake in the command line is told at once;
:mod:`~jax_agent_rl.runtime.policy` opens the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.config import Config, load
from jax_agent_rl.config.loading import build_tree, read_tree
from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint_steps import complete_steps

NO_ROWS = ""
"""``data.train`` of a model that is only served."""
_UNLIMITED_PACK_LENGTH = 1 << 24  # without a learner, pack_length must not limit contexts


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """The policy options of a command line.

    Attributes:
        config: YAML file, if any.
        overrides: ``key=value``, applied to whatever configuration is used.
        model: Hugging Face folder; replaces the configuration's.
        run, step: a run folder and the step of its checkpoint (None: the newest).
        data: file of rows; replaces the configuration's.
        ema: the moving average of the run's weights instead of its last ones.
    """

    config: Path | None = None
    overrides: Sequence[str] = ()
    model: Path | None = None
    run: Path | None = None
    step: int | None = None
    data: str | None = None
    ema: bool = False


def choose(choice: PolicyChoice) -> Config:
    """Return the configuration alone, before any weights are read.

    Raises:
        ConfigError: see :func:`open_policy`.
    """
    if choice.model is not None and choice.run is not None:
        raise ConfigError(
            f"--model {choice.model} and --run {choice.run} both name a policy; give one"
        )
    if choice.step is not None and choice.run is None:
        raise ConfigError(f"--step {choice.step} is of a run's checkpoint; also give --run")
    if choice.ema and choice.run is None:
        raise ConfigError("--ema is of a run's checkpoint; also give --run")

    config = build_tree(Config, _tree(choice), choice.overrides, file=choice.config)
    if choice.model is not None:
        model = config.model.model_copy(update={"path": str(choice.model.expanduser())})
        config = config.model_copy(update={"model": model})
    if config.rollout.backend == "remote" and (choice.model is not None or choice.run is not None):
        raise ConfigError(
            f"rollout.backend=remote: {', '.join(config.rollout.urls)} serve the weights they have,"
            " which --model and --run do not change; leave those out, start the servers with that"
            " model (jax-agent-rl rollout-server), or set rollout.backend=jetstream"
            " rollout.urls=[]"
        )
    return config


def _tree(choice: PolicyChoice) -> dict[str, Any]:
    """Return the tree to validate, without overrides."""
    if choice.config is not None:
        return read_tree(choice.config)
    if choice.run is not None:
        return run_config(choice.run).model_dump(mode="json")
    if choice.model is None:
        raise ConfigError(
            "nothing says which policy: give a configuration (CONFIG or --config FILE), --model"
            " FOLDER or --run RUN"
        )
    return bare_tree(choice.model, data=choice.data or NO_ROWS)


def bare_tree(model: Path, *, data: str = NO_ROWS) -> dict[str, Any]:
    """Return the least configuration of a model, to validate: all else is the default.

    Args:
        model: its folder.
        data: file of rows.
    """
    return {
        "run_dir": f"runs/{model.expanduser().resolve().name}",
        "model": {"path": str(model)},
        "data": {"train": data},
        "learner": {"pack_length": _UNLIMITED_PACK_LENGTH},
    }


def run_config(run: Path) -> Config:
    """Return the configuration of a run of ``train``.

    Raises:
        CheckpointError: the folder is not a run's.
        ConfigError: the run had no agents.
    """
    command = recorded_tree(run).get("command")
    if command:
        raise ConfigError(
            f"{run} is a run of {command}, which has no agents; also give a YAML configuration"
        )
    file = run / "config.json"
    try:
        return load(file)
    except ConfigError as error:
        raise ConfigError([f"{file}: {problem}" for problem in error.problems]) from None


def recorded_tree(run: Path) -> dict[str, Any]:
    """Return the configuration of a run of ``train``, ``sft`` or ``dpo`` as its folder keeps it.

    Raises:
        CheckpointError: the folder is not a run's.
        ConfigError: its configuration is damaged.
    """
    file = run / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.json is missing)")
    return read_tree(file)


def checkpoint_folder(run: Path, tree: Mapping[str, Any]) -> Path | str:
    """Return where a run keeps its checkpoints; ``tree`` is from :func:`recorded_tree`."""
    trainer = tree.get("trainer")
    checkpoint_dir = None
    if isinstance(trainer, Mapping):
        checkpoint_dir = trainer.get("checkpoint_dir")
    return checkpoint_dir or run / "checkpoints"


def saved_step(run: Path, step: int | None) -> int:
    """Return ``step`` if the run has such a checkpoint; the newest step for None.

    Raises:
        CheckpointError: not a run folder, or no such checkpoint.
    """
    steps = complete_steps(checkpoint_folder(run, recorded_tree(run)))
    if not steps:
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{missing} in {run}; it has none at all")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} in {run}; there are {steps}")
    return step
