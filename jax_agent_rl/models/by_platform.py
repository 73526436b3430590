"""Functions with a kernel for TPUs beside plain JAX.

``jax.lax.platform_dependent`` traces both. Where a process can only compile for its own CPUs or GPUs the kernel is left
out, which halves the time an engine takes to trace its programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

_T = TypeVar("_T")
_described_tpus = False


def expect_described_tpus() -> None:
    """From now on this process compiles for TPUs it does not have, too."""
    global _described_tpus
    if not _described_tpus:
        _described_tpus = True
        jax.clear_caches()  # of functions that were traced without the kernels


def by_platform(*args: object, tpu: Callable[..., _T], default: Callable[..., _T]) -> _T:
    """``tpu(*args)`` in a program for a TPU, ``default(*args)`` in any other."""
    if _described_tpus or jax.default_backend() == "tpu":
        return jax.lax.platform_dependent(*args, tpu=tpu, default=default)
    return default(*args)
