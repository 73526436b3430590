"""Concurrent commands on hosts: each is a process of this machine, and none is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.runner import Process

_AT_ONCE = 16
"""Hosts that a stage works on side by side: each takes a gcloud process here."""


class Connections:
    """Commands under way on hosts.

    Args:
        root: the project's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._processes: list[Process] = []

    async def run(
        self, command: Command, print_line: Callable[[str], None], secrets: Mapping[str, str] | None = None
    ) -> int:
        """Run a command to its end; return its exit status.

        Args:
            command: what to run, and where.
            print_line: takes each line of what it says.
            secrets: variables that it reads from its input.
        """
        process = await Process.start(command, root=self._root, secrets=secrets, print_line=print_line)
        self._processes.append(process)
        status = await asyncio.shield(process.ended)
        self._processes.remove(process)
        return status

    async def run_all(
        self, commands: Sequence[Command], print_line: Callable[[str], None], secrets: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run commands on all hosts; return their exit statuses."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(command: Command) -> int:
            async with places:
                return await self.run(command, print_line, secrets)

        return await asyncio.gather(*map(one, commands))

    async def stop(self) -> None:
        """End the processes left over when their caller stopped waiting."""
        await asyncio.gather(*(process.stop() for process in self._processes))
