"""Which trajectories are kept where not all can be: the best, the worst, and others by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def sample(
    items: Sequence[T], most: int | None, *, reward: Callable[[T], float], group: Callable[[T], str], seed: int
) -> list[T]:
    """Up to ``most`` of the trajectories of one step, in their order.

    First the best and the worst one, then the others of their groups (rewards mean something beside each other), then
    whole groups by chance.

    Args:
        items: trajectories or their records.
        most: None keeps all.
        reward, group: of an item.
        seed: draws the groups.
    """
    if most is None or len(items) <= most:
        return list(items)
    places = range(len(items))
    best = max(places, key=lambda i: reward(items[i]))
    worst = min(places, key=lambda i: reward(items[i]))
    others = list(dict.fromkeys(group(item) for item in items))
    random.Random(seed).shuffle(others)
    order = [best, worst]
    for name in (group(items[best]), group(items[worst]), *others):
        order += [i for i in places if group(items[i]) == name] if len(set(order)) < most else []
    return [items[i] for i in sorted(list(dict.fromkeys(order))[:most])]
