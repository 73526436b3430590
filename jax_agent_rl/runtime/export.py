"""A run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import jax

from jax_agent_rl.config import Config, MeshConfig, load
from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer, complete_steps
from jax_agent_rl.learner.parameterization import Parameterization
from jax_agent_rl.models.convert import named_dtype
from jax_agent_rl.models.hf import load_hf, save_hf
from jax_agent_rl.models.peft import save_peft
from jax_agent_rl.models.sharding import make_mesh


def export_run(run: Path, out: Path, *, step: int | None = None, dtype: str = "float32", adapter: bool = False) -> Path:
    """Writes weights, config, generation config and tokenizer; returns the folder. Adapters are merged in.

    Args:
        step: of the checkpoint; None is the newest.
        dtype: of the weights, see :data:`~jax_agent_rl.models.convert.DTYPES`.
        adapter: write the adapters alone, as PEFT loads them.

    Raises:
        CheckpointError: not a run folder, or it has no checkpoint, or a damaged one.
        ModelError: an unknown ``dtype``.
        ConfigError: ``adapter`` of a run that trained the whole model.
    """
    target = named_dtype(dtype)
    config = run_config(run)
    lora = config.learner.lora
    if adapter and lora is None:
        raise ConfigError(f"{run} trained the whole model (learner.lora is null); export it without --adapter")
    model, params = load_hf(config.model.path)
    start = Parameterization.of(model, params, config.learner, mesh=make_mesh(MeshConfig.model_validate({})))
    checkpointer = Checkpointer(_checkpoints(run, config), keep=config.trainer.keep_checkpoints)
    try:
        placed = jax.tree.map(jax.device_put, start.params, start.shardings)
        trained = checkpointer.restore_part({"policy": {"params": placed}}, step=step)["policy"]["params"]
    finally:
        checkpointer.close()
    if adapter and lora is not None:
        save_peft(out, lora, model, trained, base=config.model.path)
        return out
    params = jax.tree.map(lambda x: x.astype(target), start.merge(trained, start.frozen))
    save_hf(out, model, params, tokenizer_from=config.model.path)
    return out


def run_config(run: Path) -> Config:
    """The configuration a run was made with; CheckpointError if the folder is not a run's."""
    file = run / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.json is missing)")
    return load(file)


def saved_step(run: Path, step: int | None) -> int:
    """The checkpoint ``step`` of a run, or its newest one.

    Raises:
        CheckpointError: not a run folder, or there is no such checkpoint.
    """
    steps = complete_steps(_checkpoints(run, run_config(run)))
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"no checkpoint{'' if step is None else f' of step {step}'} in {run}; there are {steps}")
    return steps[-1] if step is None else step


def _checkpoints(run: Path, config: Config) -> Path | str:
    return config.trainer.checkpoint_dir or run / "checkpoints"
