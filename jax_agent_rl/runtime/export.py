"""A run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import jax

from jax_agent_rl.config import load
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.models.convert import named_dtype
from jax_agent_rl.models.hf import load_hf, save_hf


def export_run(run: Path, out: Path, *, dtype: str = "float32") -> Path:
    """Writes weights, config, generation config and tokenizer; returns the folder.

    Args:
        dtype: of the weights, see :data:`~jax_agent_rl.models.convert.DTYPES`.

    Raises:
        CheckpointError: not a run folder, or it has no checkpoint, or a damaged one.
        ModelError: an unknown ``dtype``.
    """
    file = run / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.json is missing)")
    target = named_dtype(dtype)
    config = load(file)
    model, params = load_hf(config.model.path)
    checkpointer = Checkpointer(run / "checkpoints", keep=config.trainer.keep_checkpoints)
    try:
        params = checkpointer.restore_part({"policy": {"params": params}})["policy"]["params"]
    finally:
        checkpointer.close()
    params = jax.tree.map(lambda x: x.astype(target), params)
    save_hf(out, model, params, tokenizer_from=config.model.path)
    return out
