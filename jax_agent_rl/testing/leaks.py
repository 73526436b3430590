"""What an engine must not leave behind: threads and processes."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SHARED = ("asyncio_", "ThreadPoolExecutor", "MainThread", "tqdm_monitor")
"""Beginnings of the names of threads that outlive every backend.

They are the event loop's default executor and the progress bars' monitor.
"""
_HELPERS = ("resource_tracker", "chat.grammar_limits")
"""Parts of the commands of processes that serve the whole program, and end with it.

They are multiprocessing's own, and those that compile grammars.
"""
_MAX_COMMAND_CHARS = 80
"""Commands are cut for display only: the name to recognize may stand at the end of a long path."""


@dataclass(frozen=True)
class Footprint:
    """Names of this process's threads and of its descendants, by id."""

    threads: dict[int, str]
    processes: dict[int, str]

    @classmethod
    def now(cls) -> Footprint:
        threads = {}
        for thread in threading.enumerate():
            if not thread.name.startswith(_SHARED):
                threads[thread.ident or 0] = thread.name
        return cls(threads, _descendants())

    def added(self) -> list[str]:
        """Describe the threads and processes that have appeared since this footprint."""
        now = Footprint.now()
        descriptions = []
        for ident, name in now.threads.items():
            if ident not in self.threads:
                descriptions.append(f"thread {name!r}")
        for pid, command in now.processes.items():
            if pid not in self.processes:
                descriptions.append(f"process {pid} ({command[:_MAX_COMMAND_CHARS]})")
        return descriptions


def _descendants() -> dict[int, str]:
    """Return the commands of this process's running descendants, by process id.

    It is empty without /proc.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have exited meanwhile
            # The name, in parentheses, may have spaces. State and parent follow it.
            _, _, after_name = (folder / "stat").read_text().rpartition(")")
            state, parent, *_ = after_name.split()
            if state != "Z":
                parents[int(folder.name)] = int(parent)

    commands: dict[int, str] = {}
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        for pid in generation:
            command = process_command(pid)
            if command and not any(helper in command for helper in _HELPERS):
                commands[pid] = command
    return commands


def process_command(pid: int) -> str:
    """Return the command line of a process; empty if it has exited."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return arguments.replace(b"\0", b" ").decode(errors="replace").strip()
