"""What a tree of processes uses, read from ``/proc``.

Limits of single processes do not add up: sixty-four processes of half a gigabyte each are within theirs.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, StopCause
from jax_agent_rl.tool_server.sandbox.sockets import socket_memory

_INTERVAL = 0.1  # seconds; a program that fills memory at 5 GB/s is half a gigabyte over its limit by then
WRITABLE = ("/tmp", "/dev/shm")
"""The folders a sandboxed program can write to."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


async def watch(pid: int, limits: SandboxLimits) -> StopCause:
    """Return the limit that the processes under ``pid`` exceed together, once they do; poll until then."""
    while True:
        await asyncio.sleep(_INTERVAL)
        if stopped := exceeded(pid, limits):
            return stopped


def exceeded(pid: int, limits: SandboxLimits) -> StopCause | None:
    """Return the limit that the processes under ``pid`` exceed together, if any."""
    pids = tree(pid)
    if _over_memory(pids, limits.memory_bytes - socket_memory(pids[-1])):
        return StopCause.MEMORY
    if _files(pids) > limits.files:
        return StopCause.FILES
    return None


def tree(pid: int) -> list[int]:
    """Return ``pid`` and its descendants, parents first."""
    pids = [pid]
    for parent in pids:  # grows while it is walked
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
            for task in tasks:
                pids += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return pids


def _over_memory(pids: list[int], limit: int) -> bool:
    """Check resident memory, cheap but counting shared pages for each, and only then proportional shares."""
    return sum(map(_resident, pids)) > limit and sum(map(_proportional, pids)) > limit


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:  # bubblewrap's own processes
        return _resident(pid)
    return 0


def _files(pids: list[int]) -> int:
    """Count inodes in use in the sandbox's own writable folders; 0 where it has none, or not yet."""
    return sum(_inodes(f"/proc/{pids[-1]}/root", folder) for folder in WRITABLE)


def _inodes(root: str, folder: str) -> int:
    try:
        if os.path.exists(folder) and os.stat(root + folder).st_dev == os.stat(folder).st_dev:
            return 0
        usage = os.statvfs(root + folder)
    except OSError:
        return 0
    return usage.f_files - usage.f_ffree
