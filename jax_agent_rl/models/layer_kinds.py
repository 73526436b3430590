"""Kinds of decoder layers, and how a stack of them is split into repeating runs.

A compiler takes as long as a program has layers, so layers of one kind share a loop::

    D D D A D D D A D D D A     ─►  3 x (D, D, D, A)
    dense experts experts … x58 ─►  1 x (dense), 58 x (experts)

A run is one loop, whose body is its pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

MixerName = Literal["attention", "global_attention", "latent_attention", "delta_net"]
"""What lets tokens see each other, see ``models.mixers``."""
FeedForwardName = Literal["dense", "wide", "experts", "dense_and_experts"]
"""What follows it, see ``models.feed_forward``."""
KeysName = Literal["private", "source", "shared"]
"""Whose keys and values a layer attends to: ``private``, its own, which no other layer reads;
``source``, its own, which later layers read as well; ``shared``, those of an earlier ``source``
with the same mixer."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What a layer computes. Layers of a kind have parameters of the same names and shapes."""

    mixer: MixerName = "attention"
    keys: KeysName = "private"
    feed_forward: FeedForwardName = "dense"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring layers that repeat a pattern.

    Attributes:
        first: its first layer.
        pattern: the kinds that repeat.
        repeats: how often they do.
    """

    first: int
    pattern: tuple[Any, ...]
    repeats: int

    @property
    def end(self) -> int:
        """The layer after the last one."""
        return self.first + len(self.pattern) * self.repeats


@functools.cache
def repeating_runs(kinds: tuple[Hashable, ...]) -> tuple[Run, ...]:
    """Split layers into runs whose patterns have the fewest layers in all.

    Of several such splits, take the one of the fewest runs, and then the longest first run.

    >>> [(run.pattern, run.repeats) for run in repeating_runs(tuple("DDDADDDADD"))]
    [(('D', 'D', 'D', 'A'), 2), (('D',), 2)]
    """
    count = len(kinds)
    # The best runs of the layers from each on, with what they cost; from the last layer back.
    best: list[tuple[Run, ...]] = [()] * (count + 1)
    costs = [(0, 0)] * (count + 1)
    for first in reversed(range(count)):
        candidates = []
        for size in range(1, count - first + 1):
            pattern = kinds[first : first + size]
            repeats = 0
            end = first
            while kinds[end : end + size] == pattern:
                repeats += 1
                end += size
                layers, runs = costs[end]
                candidates.append(((layers + size, runs + 1), -end, size, repeats))
        cost, negative_end, size, repeats = min(candidates)
        costs[first] = cost
        run = Run(first=first, pattern=kinds[first : first + size], repeats=repeats)
        best[first] = (run, *best[-negative_end])
    return best[0]
