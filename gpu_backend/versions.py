"""Which weights sampled which token, from the spans vLLM reports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Span = tuple[int, int]
"""(version, index of the first output token it sampled), in rising order."""


def versions_of(spans: Sequence[Span], start: int, count: int) -> list[int]:
    """Versions of output tokens ``start .. start + count``.

    >>> versions_of([(1, 0), (2, 5)], start=3, count=4)
    [1, 1, 2, 2]

    Raises:
        ValueError: a token lies before the first span.
    """
    starts = [first for _, first in spans]
    if count and (not spans or starts[0] > start):
        raise ValueError(f"tokens {start}..{start + count} lie before the first version span {list(spans[:1])}")
    return [spans[bisect_right(starts, index) - 1][0] for index in range(start, start + count)]
