"""Process startup: logging, and JAX on machines without accelerators."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import TextIO


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``.

    A live display replaces it to print above itself. If the real standard error is no terminal, that one is used.
    """

    def emit(self, record: logging.LogRecord) -> None:
        behind = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self.setStream(sys.stderr if behind.isatty() else behind)
        super().emit(record)


def quiet_logging() -> None:
    """Show this package's warnings on the screen, and silence other libraries."""
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[_StderrHandler()])
    for noisy in ("jax", "orbax"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # this package reports Orbax's failures itself
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch, which nothing here needs


@functools.cache
def ignore_late_writes() -> None:
    """Silence writes of tensorstore that end after Orbax has given up a checkpoint: on a full disk, one per array.

    They end in threads that are not Python's, which print a traceback. The checkpoint's own error is told.
    """
    hook = sys.unraisablehook

    def without(unraisable: sys.UnraisableHookArgs) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = without


def ignore_absent_tpus(devices: Path = Path("/dev")) -> None:
    """Set ``JAX_PLATFORMS=cpu`` if it is unset, libtpu is installed, and the machine has neither TPU nor GPU.

    libtpu may be installed only to compile for absent TPUs (``jax-agent-rl plan``); JAX would look for them and
    complain in every command. Call this before JAX is imported.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is None:
        return
    accelerators = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*")
    if not any(any(devices.glob(pattern)) for pattern in accelerators):
        os.environ["JAX_PLATFORMS"] = "cpu"
