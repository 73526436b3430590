"""The slices that Google Cloud has: for those who plan a run, and for those who start it."""

from __future__ import annotations

from collections.abc import Mapping

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)

SHAPES: Mapping[str, tuple[str, ...]] = {"v4": _CUBIC[:-1], "v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT}
"""By generation, from the smallest on: those an accelerator type stands for; gcloud takes no other for these."""
