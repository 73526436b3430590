"""A run's newest checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from jax_agent_rl.config import load
from jax_agent_rl.errors import CheckpointError
from jax_agent_rl.learner.checkpoint import Checkpointer
from jax_agent_rl.learner.step import Learner
from jax_agent_rl.models.hf import load_hf, save_hf


def export_run(run: Path, out: Path) -> Path:
    """Writes weights, config, generation config and tokenizer; returns the folder.

    Raises:
        CheckpointError: not a run folder, or it has no checkpoint.
    """
    file = run / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{run} is not a run folder (config.json is missing)")
    config = load(file)
    model, params = load_hf(config.model.path)
    learner = Learner(
        model, params, algorithm=config.algorithm, config=config.learner, temperature=config.rollout.temperature
    )
    checkpointer = Checkpointer(run / "checkpoints", keep=config.trainer.keep_checkpoints)
    try:
        _, state, _ = checkpointer.restore(learner.state)
    finally:
        checkpointer.close()
    save_hf(out, model, state.policy.params, tokenizer_from=config.model.path)
    return out
