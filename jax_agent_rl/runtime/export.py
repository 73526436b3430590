"""A run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import jax

from jax_agent_rl.config import MeshConfig, load
from jax_agent_rl.errors import CheckpointError, ConfigError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.peft import save_peft
from jax_agent_rl.learner.sharding import make_mesh
from jax_agent_rl.learner.trained import Trained
from jax_agent_rl.models.convert import named_dtype
from jax_agent_rl.models.hf import load_hf, save_hf


def export_run(run: Path, out: Path, *, dtype: str = "float32", adapter: bool = False) -> Path:
    """Writes weights, config, generation config and tokenizer; returns the folder. Adapters are merged in.

    Args:
        dtype: of the weights, see :data:`~jax_agent_rl.models.convert.DTYPES`.
        adapter: write the adapters alone, as PEFT loads them.

    Raises:
        CheckpointError: not a run folder, or it has no checkpoint, or a damaged one.
        ModelError: an unknown ``dtype``.
        ConfigError: ``adapter`` of a run that trained the whole model.
    """
    file = run / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.json is missing)")
    target = named_dtype(dtype)
    config = load(file)
    lora = config.learner.lora
    if adapter and lora is None:
        raise ConfigError(f"{run} trained the whole model (learner.lora is null); export it without --adapter")
    model, params = load_hf(config.model.path)
    start = Trained.of(model, params, config.learner, mesh=make_mesh(MeshConfig.model_validate({})))
    checkpointer = Checkpointer(run / "checkpoints", keep=config.trainer.keep_checkpoints)
    try:
        placed = jax.tree.map(jax.device_put, start.params, start.shardings)
        trained = checkpointer.restore_part({"policy": {"params": placed}})["policy"]["params"]
    finally:
        checkpointer.close()
    if adapter and lora is not None:
        save_peft(out, lora, model, trained, base=config.model.path)
        return out
    params = jax.tree.map(lambda x: x.astype(target), start.whole(trained, start.frozen))
    save_hf(out, model, params, tokenizer_from=config.model.path)
    return out
