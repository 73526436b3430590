"""JSON that another program sent, decoded with bounds on what it becomes in memory.

A few bytes can hold a lot: ``[],`` is 64 bytes of Python, and ``[[[[…`` overflows what recurses. Whoever reads an
answer (:mod:`jax_agent_rl.utils.network`) or a request (:mod:`jax_agent_rl.utils.http_server`) decodes it here.
"""

from __future__ import annotations

import json
from typing import Any, Literal

MAX_NESTING = 100
"""Maximum levels of arrays and objects; recursive code can handle several times as many."""
MAX_VALUES = 2_000_000
"""Maximum values in one text: as Python objects they take half a gigabyte at most."""


class TooDeepError(ValueError):
    """JSON that is nested too deep."""


def decode_json(
    content: bytes | bytearray,
    *,
    max_values: int = MAX_VALUES,
    max_nesting: int = MAX_NESTING,
    errors: Literal["strict", "replace"] = "strict",
) -> Any:
    """Return the value of a JSON text in UTF-8.

    Args:
        content: the text.
        max_values: maximum number of values; commas and brackets within strings count, too.
        max_nesting: maximum levels of arrays and objects.
        errors: what to do about invalid UTF-8.

    Raises:
        TooDeepError: it is nested too deep.
        ValueError: it is no JSON in UTF-8, or has too many values or a number that is too long.
    """
    count = content.count(b",") + content.count(b"[") + content.count(b"{")
    if count > max_values:
        raise ValueError(f"it has more than {max_values} values")
    too_deep = f"it is nested more than {max_nesting} levels deep"
    try:
        value = json.loads(content.decode("utf-8", errors))
    except RecursionError:
        raise TooDeepError(too_deep) from None
    if _is_deeper_than(max_nesting, value):
        raise TooDeepError(too_deep)
    return value


def _is_deeper_than(limit: int, value: Any) -> bool:
    """Return whether containers are nested deeper, level by level, as recursion would overflow."""
    level = [value]
    for _ in range(limit):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = []
        for container in containers:
            items = container.values() if isinstance(container, dict) else container
            level += [item for item in items if isinstance(item, dict | list)]
    return bool(level)
