"""Lengths of common prefixes of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Prefixes:
    """Lengths of common prefixes between any trajectory and all others.

    In lexicographic order, the common prefix of two sequences is the shortest among those of the neighbours between
    them, so one running minimum to each side answers for all.
    """

    def __init__(self, ids: Sequence[np.ndarray]) -> None:
        keys = [sequence.astype(">i4").tobytes() for sequence in ids]
        self._order = np.asarray(sorted(range(len(ids)), key=keys.__getitem__), np.int64)
        self._place = np.argsort(self._order)
        pairs = zip(self._order[:-1], self._order[1:], strict=True)
        self._neighbours = np.asarray([_common(ids[a], ids[b]) for a, b in pairs], np.int64)

    def of(self, which: int) -> np.ndarray:
        """int64 [N]: with every trajectory; the entry of ``which`` itself means nothing."""
        place = self._place[which]
        common = np.zeros(len(self._order), np.int64)
        common[self._order[place + 1 :]] = np.minimum.accumulate(self._neighbours[place:])
        common[self._order[:place][::-1]] = np.minimum.accumulate(self._neighbours[:place][::-1])
        return common


def _common(a: np.ndarray, b: np.ndarray) -> int:
    shorter = min(len(a), len(b))
    differ = a[:shorter] != b[:shorter]
    first = int(differ.argmax()) if shorter else 0
    return first if shorter and differ[first] else shorter
