"""Reading answers out of text, and judging its form: what the rules are built from."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_CHARS = 1 << 18
"""What a rule reads of a solution, from its end, where answers stand: so its time has a bound."""

_BRACE = re.compile(r"[{}]")


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last ``<tag>…</tag>``, stripped; None if there is none.

    >>> tagged("<answer> 3 </answer> no: <answer>4</answer>")
    '4'
    """
    end = text.rfind(f"</{tag}>")
    opening = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if opening < 0 else text[opening + len(tag) + 2 : end].strip()


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}``, braces balanced; None if there is none or it does not close.

    >>> boxed(r"so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for brace in _BRACE.finditer(text, begin, begin + MAX_CHARS):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.start()]
    return None


def has_format(text: str, tags: Sequence[str] = ("think", "answer")) -> bool:
    """True if the text is one block of each tag, in this order, and nothing else but white space around them.

    >>> has_format("<think>2 + 2</think> <answer>4</answer>"), has_format("4 <answer>4</answer>")
    (True, False)
    """
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in tags):
        return False
    blocks = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return re.fullmatch(rf"\s*{blocks}\s*", text, re.DOTALL) is not None
