"""Which policy a command looks at: a configuration's model, a Hugging Face folder, or a checkpoint of a run.

::

    CONFIG                    its model.path
    CONFIG --model FOLDER     that folder, with the configuration's agents, rewards and data
    --model FOLDER            the same with the defaults; keys on the command line say the rest
    --run RUN [--step N]      a checkpoint, with the run's own configuration (or CONFIG's)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_agent_rl.config import Config, build
from jax_agent_rl.config.loading import read_tree
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.tempdirs import make_folder, remove_folder

NO_ROWS = ""
"""``data.train`` where nothing names any: a model that is served needs none."""
_NO_LEARNER_ROW = 1 << 24  # the length of packed rows, which nothing packs here, shall not limit contexts


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """What a command line says of it.

    Attributes:
        config: YAML file, if any.
        overrides: ``key=value``, over whatever the configuration is.
        model: Hugging Face folder in place of the configuration's.
        run, step: a run folder, and which checkpoint of it (None: the newest).
        data: file of rows in place of the configuration's.
    """

    config: Path | None = None
    overrides: Sequence[str] = ()
    model: Path | None = None
    run: Path | None = None
    step: int | None = None
    data: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """A policy on disk and how it is to act.

    Attributes:
        config: resolved; ``model.path`` holds the weights.
        recorded: the same for records, with a ``model.path`` that stays.
        name: of the policy, for people and records.
        step: of the checkpoint; 0 for a model that no run here has trained.
    """

    config: Config
    recorded: Config
    name: str
    step: int


@contextlib.contextmanager
def open_policy(choice: PolicyChoice) -> Iterator[ServedPolicy]:
    """A checkpoint is written out as a Hugging Face folder beside its run, and removed in the end.

    Raises:
        ConfigError: a file, a key or the combination is wrong.
        CheckpointError: there is no such checkpoint.
    """
    config = choose(choice)
    if choice.run is None:
        yield ServedPolicy(config=config, recorded=config, name=config.model.path, step=0)
        return
    from jax_agent_rl.runtime.export import export_run, saved_step

    step = saved_step(choice.run, choice.step)
    folder = make_folder("weights-", choice.run)
    try:
        export_run(choice.run, folder, step=step)
        model = config.model.model_copy(update={"path": str(folder)})
        yield ServedPolicy(
            config=config.model_copy(update={"model": model}),
            recorded=config,
            name=f"{choice.run}, step {step}",
            step=step,
        )
    finally:
        remove_folder(folder)


def choose(choice: PolicyChoice) -> Config:
    """The configuration alone, before any weights.

    Raises:
        ConfigError: see :func:`open_policy`.
    """
    if choice.model is not None and choice.run is not None:
        raise ConfigError(f"--model {choice.model} and --run {choice.run} both name a policy; give one")
    if choice.step is not None and choice.run is None:
        raise ConfigError(f"--step {choice.step} is of a run's checkpoint; give --run, too")
    config = build(_tree(choice), choice.overrides)
    if choice.model is not None:
        model = config.model.model_copy(update={"path": str(choice.model.expanduser())})
        config = config.model_copy(update={"model": model})
    if config.rollout.backend == "remote" and (choice.model is not None or choice.run is not None):
        raise ConfigError(
            f"rollout.backend=remote: {', '.join(config.rollout.urls)} serve the weights they have, which --model and "
            "--run do not change; leave those out, start the servers with that model (jax-agent-rl rollout-server), or "
            "set rollout.backend=jetstream rollout.urls=[]"
        )
    return config


def _tree(choice: PolicyChoice) -> dict[str, Any]:
    """The tree to validate, without overrides."""
    if choice.config is not None:
        return read_tree(choice.config)
    if choice.run is not None:
        from jax_agent_rl.runtime.export import run_config

        return run_config(choice.run).model_dump(mode="json")
    if choice.model is None:
        raise ConfigError("nothing says which policy; give a YAML configuration, --model FOLDER or --run RUN")
    rows = {"train": str(choice.data or NO_ROWS)}
    model = {"path": str(choice.model)}
    name = choice.model.expanduser().resolve().name
    return {"run_dir": f"runs/{name}", "model": model, "data": rows, "learner": {"pack_length": _NO_LEARNER_ROW}}
