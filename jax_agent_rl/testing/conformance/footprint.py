"""The threads and processes that exist: before a backend is built and after it is closed they must be the same."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

_SHARED = ("asyncio_", "ThreadPoolExecutor", "MainThread", "tqdm_monitor")
"""Threads that outlive every backend: those of the event loop's own executor, and the progress bars' clock."""
_HARMLESS = "resource_tracker"
"""Python's multiprocessing keeps this one helper until the program ends."""
_SHOWN = 80
"""Characters of a command shown; it is cut only there, as the name looked for may stand at the end of a long path."""


@dataclass(frozen=True)
class Footprint:
    """Names by id."""

    threads: dict[int, str]
    processes: dict[int, str]

    @classmethod
    def now(cls) -> Footprint:
        threads = {t.ident or 0: t.name for t in threading.enumerate() if not t.name.startswith(_SHARED)}
        return cls(threads, _descendants())

    def added(self) -> list[str]:
        """What exists now and did not when this was taken, in words."""
        now = Footprint.now()
        threads = [f"thread {name!r}" for ident, name in now.threads.items() if ident not in self.threads]
        processes = {pid: name for pid, name in now.processes.items() if pid not in self.processes}
        return threads + [f"process {pid} ({name[:_SHOWN]})" for pid, name in processes.items()]


def _descendants() -> dict[int, str]:
    """Commands of this process's living descendants by process id; empty where there is no /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if fields[0] != "Z":
            parents[int(folder.name)] = int(fields[1])
    found: dict[int, str] = {}
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found |= {pid: _command(pid) for pid in frontier}
    return {pid: command for pid, command in found.items() if command and _HARMLESS not in command}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
