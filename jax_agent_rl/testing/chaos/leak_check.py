"""What a run leaves behind: processes, bound ports, files, asyncio tasks. All of it should be gone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.testing.chaos.children import marked

_LOOKS, _LOOK_SECONDS = 40, 0.05


@dataclass(frozen=True, kw_only=True)
class Leaks:
    """In words, but for the ports."""

    processes: Sequence[str] = ()
    ports: Sequence[int] = ()
    files: Sequence[str] = ()
    tasks: Sequence[str] = ()

    @property
    def count(self) -> int:
        return len(self.processes) + len(self.ports) + len(self.files) + len(self.tasks)


async def find_leaks(*, mark: str, ports: Iterable[int], folder: Path, tasks_before: Collection[asyncio.Task]) -> Leaks:
    """Looks after everything was closed.

    Args:
        mark: of the run's processes; those that are found are killed.
        ports: that were bound.
        folder: where its processes had their temporary files.
        tasks_before: those of the event loop before it began.
    """
    await asyncio.sleep(0)  # tasks that were cancelled end now
    return Leaks(
        processes=await _orphans(mark),
        ports=[port for port in ports if _is_bound(port)],
        files=[str(path.relative_to(folder)) for path in folder.rglob("*")],
        tasks=[task.get_name() for task in asyncio.all_tasks() if task not in tasks_before],
    )


async def _orphans(mark: str) -> list[str]:
    """A worker is given a moment to notice its parent's end."""
    for _ in range(_LOOKS):
        if not marked(mark):
            return []
        await asyncio.sleep(_LOOK_SECONDS)
    found = marked(mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in found.items()]


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
