"""What processes of this package say beside what they are asked for."""

from __future__ import annotations

import logging
import os
import sys


def quiet_logging() -> None:
    """Warnings of this package go to the screen; other libraries keep still."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for noisy in ("jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's failures are errors of ours, said once
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which nothing here needs
