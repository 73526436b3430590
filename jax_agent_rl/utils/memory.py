"""Memory that a process may use: the machine's, or its container's."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its limits (cgroups, version 2)."""
MEMINFO = Path("/proc/meminfo")


def usable_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory of the machine, or of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_limit(cgroup / "memory.max")
    if limit.isdigit():
        return min(memory, int(limit))
    return memory


def available_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int:
    """Return the bytes that can be given away without swapping; 0 if the system does not say."""
    available = 0
    for line in read_limit(meminfo).splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            available = 1024 * int(amount.split()[0])

    limit = read_limit(cgroup / "memory.max")
    used = read_limit(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        return max(0, min(available, int(limit) - int(used)))
    return available


def read_limit(file: Path) -> str:
    """Return what a file of the system says; empty if there is no such file."""
    if not file.is_file():
        return ""
    return file.read_text().strip()
