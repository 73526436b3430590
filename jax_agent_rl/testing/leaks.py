"""What a run must not leave behind or use more and more of: threads, processes, ports, files, tasks, memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

MARK = "JAX_AGENT_RL_CHAOS"
"""Environment variable that identifies a run's processes even after their parents have exited."""
_SHARED = ("asyncio_", "ThreadPoolExecutor", "MainThread", "tqdm_monitor")
"""Threads that outlive every backend: the event loop's default executor and the progress bars'
monitor."""
_HELPERS = ("resource_tracker", "chat.grammar_limits")
"""Processes that serve the whole program, and end with it: multiprocessing's own, and those that
compile grammars."""
_MAX_COMMAND_CHARS = 80
"""Commands are cut for display only: the name to recognize may stand at the end of a long path."""
_WARM_UP = 0.25
"""Share of a run after which it should not grow any more: imports, caches and allocator arenas are
in place."""
_POLLS, _POLL_SECONDS = 40, 0.05


@dataclass(frozen=True)
class Footprint:
    """Names of this process's threads and of its descendants, by id."""

    threads: dict[int, str]
    processes: dict[int, str]

    @classmethod
    def now(cls) -> Footprint:
        threads = {
            t.ident or 0: t.name for t in threading.enumerate() if not t.name.startswith(_SHARED)
        }
        return cls(threads, _descendants())

    def added(self) -> list[str]:
        """Describe the threads and processes that have appeared since this footprint."""
        now = Footprint.now()
        threads = [
            f"thread {name!r}" for ident, name in now.threads.items() if ident not in self.threads
        ]
        processes = {pid: name for pid, name in now.processes.items() if pid not in self.processes}
        return threads + [
            f"process {pid} ({name[:_MAX_COMMAND_CHARS]})" for pid, name in processes.items()
        ]


def _descendants() -> dict[int, str]:
    """Return the commands of this process's running descendants by process id; empty without /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have exited meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    found: dict[int, str] = {}
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found |= {pid: _command(pid) for pid in frontier}
    return {
        pid: command
        for pid, command in found.items()
        if command and not any(helper in command for helper in _HELPERS)
    }


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def marked(mark: str) -> dict[int, str]:
    """Return the commands of processes with ``MARK=mark`` in their environment, by process id; empty without /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have exited meanwhile, or belong to another user
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = _command(int(folder.name))
    found.pop(os.getpid(), None)
    return {pid: command for pid, command in found.items() if command}


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
        mark: identifies the run's processes; any that are still alive are killed.
        ports: the ports that were bound.
        folder: the temporary folder of its processes.
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
    """Kill and describe marked processes, after giving them a moment to notice their parent's exit."""
    for _ in range(_POLLS):
        if not marked(mark):
            return []
        await asyncio.sleep(_POLL_SECONDS)
    found = marked(mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in found.items()]


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections in TIME_WAIT do not count
        try:
            probe.bind(("127.0.0.1", port))
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
    """Compare medians of the first quarter after the warm-up with those of the last; empty with too few samples."""
    steady = samples[int(len(samples) * _WARM_UP) :]
    quarter = len(steady) // 4
    if not quarter:
        return {}
    first, last = steady[:quarter], steady[-quarter:]

    def both(read: Callable[[ResourceUsage], int]) -> tuple[float, float]:
        return median(map(read, first)), median(map(read, last))

    memory = both(lambda usage: usage.rss_bytes)
    return {
        "rss_mib": [round(value / 2**20, 1) for value in memory],
        "rss_growth": round(memory[1] / memory[0] - 1, 4),
        "descriptors": both(lambda usage: usage.descriptors),
        "tasks": both(lambda usage: usage.tasks),
        "samples": len(samples),
    }
