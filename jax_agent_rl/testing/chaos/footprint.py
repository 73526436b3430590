"""What a long run may not use more and more of: memory, descriptors, asyncio tasks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

_WARM_UP = 0.25
"""Share of a run after which it is as large as it should ever be: imports, caches, the allocator's arenas."""


@dataclass(frozen=True, kw_only=True)
class ResourceUsage:
    """Of this process.

    Attributes:
        rss_bytes: resident memory.
        descriptors: open files and sockets.
        tasks: of the event loop.
    """

    rss_bytes: int
    descriptors: int
    tasks: int

    @classmethod
    def now(cls) -> ResourceUsage:
        """Linux only: read from ``/proc``."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(os.listdir("/proc/self/fd")),
            tasks=len(asyncio.all_tasks()),
        )


def growth(footprints: Sequence[ResourceUsage]) -> dict[str, Any]:
    """How each grew from the first quarter after the warm-up to the last: medians, and the relative growth of memory.

    Medians, because requests come and go. Empty if there are too few.
    """
    steady = footprints[int(len(footprints) * _WARM_UP) :]
    quarter = len(steady) // 4
    if not quarter:
        return {}
    first, last = steady[:quarter], steady[-quarter:]

    def both(read: Callable[[ResourceUsage], int]) -> tuple[float, float]:
        return median(map(read, first)), median(map(read, last))

    memory, descriptors, tasks = both(lambda f: f.rss_bytes), both(lambda f: f.descriptors), both(lambda f: f.tasks)
    return {
        "rss_mib": [round(value / 2**20, 1) for value in memory],
        "rss_growth": round(memory[1] / memory[0] - 1, 4),
        "descriptors": descriptors,
        "tasks": tasks,
        "samples": len(footprints),
    }
