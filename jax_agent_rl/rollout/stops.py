"""Stop strings that begin in one part of a generation and end in the next, which no engine sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DecodeText = Callable[[Sequence[int]], str]


def straddling_stop(
    before: Sequence[int], after: Sequence[int], stop: Sequence[str], decode_text: DecodeText
) -> tuple[int, str] | None:
    """Finds a stop string across the seam of two parts, as an uninterrupted engine would have.

    Args:
        before: ids sampled before the interruption.
        after: ids sampled after it.
        stop: the stop strings.
        decode_text: ids to text.

    Returns:
        how many ids of ``after`` are kept (the one that completes the string is the last), and the string; or None.
    """
    # A string of n bytes spans at most n ids that add text; a few more are allowed for ids without text.
    window = max(len(s.encode()) for s in stop) + 8
    for kept in range(1, min(window, len(after)) + 1):
        tail = decode_text([*before[-window:], *after[:kept]][-window:])
        if found := next((s for s in stop if s in tail), None):
            return kept, found
    return None
