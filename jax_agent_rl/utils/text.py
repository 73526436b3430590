r"""Suggestions for misspelt names, and lone surrogates.

JSON can spell one half of a surrogate pair (``"\ud83d"``), and models do, but nothing can encode it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

_SURROGATE = re.compile("[\ud800-\udfff]")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question with the nearest known name and a trailing space; empty if none is near.

    >>> did_you_mean("tool_agnet", ["tool_agent", "search_agent"])
    "did you mean 'tool_agent'? "
    """
    near = nearest(name, known)
    return f"did you mean {near[0]!r}? " if near else ""


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return up to three similar known names, the most similar first."""
    return difflib.get_close_matches(name, known)


def has_lone_surrogate(text: str) -> bool:
    """Return whether the text holds a lone surrogate."""
    return _SURROGATE.search(text) is not None


def replace_lone_surrogates(text: str) -> str:
    r"""Replace each lone surrogate by a question mark.

    >>> replace_lone_surrogates("one \ud83d two")
    'one ? two'
    """
    return text.encode("utf-8", "replace").decode("utf-8")
