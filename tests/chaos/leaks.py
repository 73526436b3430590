"""What a run must not leave behind: processes, ports, files, tasks, growing memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jax_agent_rl.testing.leaks import process_command

MARK = "JAX_AGENT_RL_CHAOS"
"""Environment variable that identifies a run's processes even after their parents have exited."""
_WARM_UP = 0.25
"""Share of a run after which it should not grow: imports, caches and arenas are in place."""
_POLLS = 40
_POLL_SECONDS = 0.05


def marked(mark: str) -> dict[int, str]:
    """Return the commands of processes with ``MARK=mark`` in their environment, by process id.

    It is empty without /proc.
    """
    variable = f"{MARK}={mark}".encode()
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid == os.getpid():
            continue
        with suppress(OSError):  # it may have exited meanwhile, or belong to another user
            if variable not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = process_command(pid)
            if command:
                commands[pid] = command
    return commands


@dataclass(frozen=True, kw_only=True)
class Leaks:
    """Resources left behind by a run that was closed, as text except for the ports."""

    processes: Sequence[str] = ()
    ports: Sequence[int] = ()
    files: Sequence[str] = ()
    tasks: Sequence[str] = ()

    @property
    def count(self) -> int:
        return len(self.processes) + len(self.ports) + len(self.files) + len(self.tasks)


async def find_leaks(
    *, mark: str, ports: Iterable[int], folder: Path, tasks_before: Collection[asyncio.Task]
) -> Leaks:
    """Find what a run left behind after everything was closed.

    Args:
        mark: identifies the run's processes; those that are still alive are killed.
        ports: the ports that the run bound.
        folder: the temporary folder of the run's processes.
        tasks_before: the event loop's tasks before the run began.
    """
    await asyncio.sleep(0)  # lets cancelled tasks end
    return Leaks(
        processes=await _orphans(mark),
        ports=[port for port in ports if _is_bound(port)],
        files=[str(path.relative_to(folder)) for path in folder.rglob("*")],
        tasks=[task.get_name() for task in asyncio.all_tasks() if task not in tasks_before],
    )


async def _orphans(mark: str) -> list[str]:
    """Kill and describe marked processes, once they had time to notice their parent's exit."""
    for _ in range(_POLLS):
        if not marked(mark):
            return []
        await asyncio.sleep(_POLL_SECONDS)
    orphans = marked(mark)
    for pid in orphans:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in orphans.items()]


def _is_bound(port: int) -> bool:
    with socket.socket() as listener:
        # Connections in TIME_WAIT do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class ResourceUsage:
    """Resources this process holds.

    Attributes:
        rss_bytes: resident memory.
        descriptors: open files and sockets.
        tasks: tasks of the event loop.
    """

    rss_bytes: int
    descriptors: int
    tasks: int

    @classmethod
    def now(cls) -> ResourceUsage:
        """Read the current usage from ``/proc`` (Linux only)."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            descriptors=len(os.listdir("/proc/self/fd")),
            tasks=len(asyncio.all_tasks()),
        )


def growth(samples: Sequence[ResourceUsage]) -> dict[str, Any]:
    """Compare medians of the last quarter of a run with those of the first one after the warm-up.

    It is empty with too few samples.
    """
    after_warm_up = samples[int(len(samples) * _WARM_UP) :]
    quarter = len(after_warm_up) // 4
    if not quarter:
        return {}
    first = after_warm_up[:quarter]
    last = after_warm_up[-quarter:]

    def medians(read: Callable[[ResourceUsage], int]) -> tuple[float, float]:
        return median(map(read, first)), median(map(read, last))

    first_rss, last_rss = medians(lambda usage: usage.rss_bytes)
    return {
        "rss_mib": [round(rss / 2**20, 1) for rss in (first_rss, last_rss)],
        "rss_growth": round(last_rss / first_rss - 1, 4),
        "descriptors": medians(lambda usage: usage.descriptors),
        "tasks": medians(lambda usage: usage.tasks),
        "samples": len(samples),
    }
