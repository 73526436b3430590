"""Stands for ``sgl_kernel`` in SGLang's server on CPUs, where its own is not installed.

SGLang's CPU kernels are built from its sources, for Intel's AMX; the package index has those for
CUDA alone. Without AMX SGLang computes in plain PyTorch, and calls none of the kernels for plain
sampling. Yet its modules import some by name, for speculative decoding and for recurrent layers.
Each name is here, and refuses to be called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing_kernel(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} is one of SGLang's CPU kernels, which are not installed: build sgl-kernel from"
            " SGLang's sources for this CPU"
        )

    return missing_kernel
