"""What somebody may have meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A question with the nearest known name and a space behind it; empty if none is near.

    >>> did_you_mean("tool_agnet", ["tool_agent", "search_agent"])
    "did you mean 'tool_agent'? "
    """
    near = nearest(name, known)
    return f"did you mean {near[0]!r}? " if near else ""


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Up to three known names that are near, the nearest first."""
    return difflib.get_close_matches(name, known)
