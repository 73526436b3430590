"""Weight updates as files, with the log-prob probe by which engines check what they took."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jax_agent_rl.testing.conformance.reference import Reference, log_softmax
from jax_agent_rl.utils.weight_probe import LogprobProbe

_PROBE_LENGTH = 48


def with_probe(files: list[str], which: str, *, reference: Reference, vocab_size: int, folder: Path) -> list[str]:
    """The payload of a ``safetensors`` update: the files of a weight set, and one more that holds only the probe.

    Args:
        files: safetensors files.
        which: the weight set the engine holds after the update.
        folder: where the probe's file is written.
    """
    from safetensors.numpy import save_file

    file = folder / f"probe-{which}.safetensors"
    if not file.is_file():
        save_file({}, file, metadata=_probe(reference, which, vocab_size).to_metadata())
    return [*files, str(file)]


def _probe(reference: Reference, which: str, vocab_size: int) -> LogprobProbe:
    ids = np.random.default_rng(0).integers(0, vocab_size, _PROBE_LENGTH).tolist()
    scores_TV = log_softmax(reference.logits(ids[:-1], weights=which))
    log_probs = scores_TV[np.arange(len(ids) - 1), ids[1:]].tolist()
    return LogprobProbe(ids=(tuple(ids),), log_probs=(tuple(log_probs),))
