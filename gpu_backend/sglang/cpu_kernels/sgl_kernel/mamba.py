"""Kernels of recurrent layers, as in the package: each name refuses to be called."""

from __future__ import annotations

from sgl_kernel import __getattr__  # noqa: F401  # pyright: ignore[reportMissingImports]
