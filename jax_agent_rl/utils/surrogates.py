r"""Lone surrogates: halves of a pair, which text may hold and nothing can encode.

JSON can spell one (``"\ud83d"``), and models do.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def has_lone_surrogate(text: str) -> bool:
    """Return whether the text holds a lone surrogate."""
    return _SURROGATE.search(text) is not None


def replace_lone_surrogates(text: str) -> str:
    r"""Replace each lone surrogate by a question mark.

    >>> replace_lone_surrogates("one \ud83d two")
    'one ? two'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def json_line(value: Any) -> str:
    r"""Return a line of JSON that every reader takes: each lone surrogate becomes a question mark.

    >>> json_line({"text": "one \ud83d two"})
    '{"text": "one ? two"}\n'
    """
    return replace_lone_surrogates(json.dumps(value, ensure_ascii=False)) + "\n"
