"""What processes of this package say beside what they are asked for."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is when something is said.

    A live display puts itself there, to print above itself what it would otherwise draw over. A standard error that is
    no terminal is none of its business.
    """

    def emit(self, record: logging.LogRecord) -> None:
        behind = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self.setStream(sys.stderr if behind.isatty() else behind)
        super().emit(record)


def quiet_logging() -> None:
    """Warnings of this package go to the screen; other libraries keep still."""
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[_StderrHandler()])
    for noisy in ("jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's failures are errors of ours, said once
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which nothing here needs
