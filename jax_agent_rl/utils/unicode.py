"""Halves of surrogate pairs: JSON can spell one (``"\\ud83d"``), and models do, but nothing can encode it."""

from __future__ import annotations

import re

_HALF = re.compile("[\ud800-\udfff]")


def has_half(text: str) -> bool:
    """Whether there is one in it."""
    return _HALF.search(text) is not None


def without_halves(text: str) -> str:
    """The text with a question mark for each.

    >>> without_halves("one \\ud83d two")
    'one ? two'
    """
    return text.encode("utf-8", "replace").decode("utf-8")
