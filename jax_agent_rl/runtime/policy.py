"""The policy that a command uses: a configuration's model, a Hugging Face folder, or a run's checkpoint.

::

    CONFIG                    its model.path
    CONFIG --model FOLDER     that folder, with the configuration's agents, rewards and data
    --model FOLDER            that folder, with defaults and the keys of the command line
    --run RUN [--step N]      a checkpoint, with the run's own configuration (or CONFIG's)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jax_agent_rl.config import Config, MeshConfig, build, load
from jax_agent_rl.config.loading import read_tree
from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer, complete_steps
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.models.convert import named_dtype
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.models.peft import save_peft
from jax_agent_rl.models.sharding import make_mesh
from jax_agent_rl.utils.tempdirs import make_folder, remove_folder

NO_ROWS = ""
"""``data.train`` of a model that is only served."""
_NO_LEARNER_ROW = 1 << 24  # nothing is packed here, so pack_length must not limit contexts


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """The policy options of a command line.

    Attributes:
        config: YAML file, if any.
        overrides: ``key=value``, applied to whatever configuration is used.
        model: Hugging Face folder; replaces the configuration's.
        run, step: a run folder and the step of its checkpoint (None: the newest).
        data: file of rows; replaces the configuration's.
    """

    config: Path | None = None
    overrides: Sequence[str] = ()
    model: Path | None = None
    run: Path | None = None
    step: int | None = None
    data: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """A policy on disk and its configuration.

    Attributes:
        config: the resolved configuration; ``model.path`` holds the weights.
        recorded: the same for records, with a permanent ``model.path``.
        name: the policy's name in messages and records.
        step: step of the checkpoint; 0 for a model that is not of a run.
    """

    config: Config
    recorded: Config
    name: str
    step: int


@contextlib.contextmanager
def open_policy(choice: PolicyChoice) -> Iterator[ServedPolicy]:
    """Yield the chosen policy; a checkpoint is exported to a temporary folder beside its run.

    Raises:
        ConfigError: a file, a key or the combination is wrong.
        CheckpointError: there is no such checkpoint.
    """
    config = choose(choice)
    if choice.run is None:
        yield ServedPolicy(config=config, recorded=config, name=config.model.path, step=0)
        return
    step = saved_step(choice.run, choice.step)
    folder = make_folder("weights-", choice.run)
    names = set(config.agent.role_adapters.values())
    try:
        export_run(choice.run, folder, step=step, adapter=bool(names))
        if names:
            adapters = {name: str(folder / name) for name in names}
            served = {"rollout": config.rollout.model_copy(update={"adapters": adapters})}
        else:
            served = {"model": config.model.model_copy(update={"path": str(folder)})}
        yield ServedPolicy(
            config=config.model_copy(update=served),
            recorded=config,
            name=f"{choice.run}, step {step}",
            step=step,
        )
    finally:
        remove_folder(folder)


def choose(choice: PolicyChoice) -> Config:
    """Return the configuration alone, before any weights are read.

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
    """Return the tree to validate, without overrides."""
    if choice.config is not None:
        return read_tree(choice.config)
    if choice.run is not None:
        return run_config(choice.run).model_dump(mode="json")
    if choice.model is None:
        raise ConfigError("nothing says which policy; give a YAML configuration, --model FOLDER or --run RUN")
    rows = {"train": choice.data or NO_ROWS}
    model = {"path": str(choice.model)}
    name = choice.model.expanduser().resolve().name
    return {"run_dir": f"runs/{name}", "model": model, "data": rows, "learner": {"pack_length": _NO_LEARNER_ROW}}


def export_run(run: Path, out: Path, *, step: int | None = None, dtype: str = "float32", adapter: bool = False) -> Path:
    """Write a checkpoint as a Hugging Face folder, with adapters merged; return the folder.

    Args:
        run: the run folder.
        out: the folder to write.
        step: step of the checkpoint; None: the newest.
        dtype: dtype of the weights, see :data:`~jax_agent_rl.models.convert.DTYPES`.
        adapter: write only the adapters, for PEFT; those of ``agent.role_adapters`` to a folder each.

    Raises:
        CheckpointError: not a run folder, or its checkpoint is missing or damaged.
        ModelError: an unknown ``dtype``.
        ConfigError: ``adapter`` for a run that trained the whole model, or a whole model of one that trained several
            adapters.
    """
    target = named_dtype(dtype)
    config = run_config(run)
    lora = config.learner.lora
    if adapter and lora is None:
        raise ConfigError(f"{run} trained the whole model (learner.lora is null); export it without --adapter")
    names = sorted(set(config.agent.role_adapters.values()))
    if names and not adapter:
        raise ConfigError(f"{run} trained the adapters {names} over one model; export them with --adapter")
    model, params = load_hf(config.model.path)
    start = Parameterization.policy(model, params, config.learner, mesh=make_mesh(MeshConfig.model_validate({})))
    checkpointer = Checkpointer(_checkpoints(run, config), keep=config.trainer.keep_checkpoints)
    try:
        placed = jax.tree.map(jax.device_put, start.params, start.shardings)
        part = {"policy": {"params": placed}}
        saved = checkpointer.restore_part({name: part for name in names} if names else part, step=step)
    finally:
        checkpointer.close()
    if adapter and lora is not None:
        for folder, state in [(out / name, saved[name]) for name in names] or [(out, saved)]:
            save_peft(folder, lora, model, state["policy"]["params"], base=config.model.path)
        return out
    trained = saved["policy"]["params"]
    params = jax.tree.map(lambda x: x.astype(target), start.merge(trained, start.frozen))
    save_hf(out, model, params, tokenizer_from=config.model.path)
    return out


def run_config(run: Path) -> Config:
    """Return the configuration of a run; raises CheckpointError if the folder is not a run's."""
    file = run / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.json is missing)")
    return load(file)


def saved_step(run: Path, step: int | None) -> int:
    """Return ``step`` if the run has such a checkpoint; the newest step for None.

    Raises:
        CheckpointError: not a run folder, or no such checkpoint.
    """
    steps = complete_steps(_checkpoints(run, run_config(run)))
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"no checkpoint{'' if step is None else f' of step {step}'} in {run}; there are {steps}")
    return steps[-1] if step is None else step


def _checkpoints(run: Path, config: Config) -> Path | str:
    return config.trainer.checkpoint_dir or run / "checkpoints"
