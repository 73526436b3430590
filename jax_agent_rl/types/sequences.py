"""What two sequences, of ids, messages or others, have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def common_prefix_length(one: Iterable[Any], other: Iterable[Any]) -> int:
    """Return how many items at the beginning of two sequences are equal."""
    length = 0
    for item, other_item in zip(one, other, strict=False):
        if item != other_item:
            break
        length += 1
    return length
