"""Processes of a launch: their output printed, and all of them ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.errors import LaunchError


class TimedPrinter:
    """Prints the launcher's own lines with the seconds since it began; lines of processes as they are."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, line: str) -> None:
        own = "" if line.startswith("[") else f"[{time.monotonic() - self._begin:3.0f}s] "
        with contextlib.suppress(BrokenPipeError):  # nobody reads it: still end in order
            print(own + line, flush=True)


PrintLine = Callable[[str], None]
T = TypeVar("T")
_STOP_SECONDS = 50.0  # for what runs behind a connection to end
_MAX_CONNECTIONS = 16  # each takes a gcloud process


class Interrupted(Exception):
    """The launch was interrupted by Ctrl-C or SIGTERM."""


def set_on_signal(event: asyncio.Event) -> None:
    """Make SIGINT, SIGTERM and SIGHUP (the terminal is gone) set this event only."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, event.set)


async def watch(wanted: Awaitable[T], interrupt: asyncio.Event, processes: Sequence[Process] = ()) -> T:
    """Await work, but not past an interruption or the end of one of the processes.

    Args:
        wanted: the work.
        interrupt: set by an interruption.
        processes: processes that should go on.

    Raises:
        Interrupted: there was an interruption.
        LaunchError: a process ended.
    """
    work, interrupted = asyncio.ensure_future(wanted), asyncio.ensure_future(interrupt.wait())
    try:
        await asyncio.wait([work, interrupted, *(p.ended for p in processes)], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if interrupted.done():
            raise Interrupted
        command, ended = next((p.command, p.ended) for p in processes if p.ended.done())
        raise LaunchError(
            f"{command.name} on {command.host.name} ended (exit status {ended.result()}), see its last lines above"
        )
    finally:
        for task in (interrupted, work):
            task.cancel()
        await asyncio.gather(work, interrupted, return_exceptions=True)


class Process:
    """A started command and its output."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process, print_line: PrintLine) -> None:
        self.command = command
        self._process = process
        self.ended: asyncio.Task[int] = asyncio.create_task(self._follow(print_line))

    @classmethod
    async def start(
        cls, command: Command, *, root: Path, secrets: Mapping[str, str] | None, print_line: PrintLine
    ) -> Process:
        """Start a command.

        Args:
            command: what to run.
            root: the project's folder.
            secrets: variables for a tethered command, through its standard input; None: it is not tethered and has
                no input.
            print_line: prints a line.

        Raises:
            LaunchError: the program does not exist.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command.local_argv(root),
                cwd=root,
                stdin=asyncio.subprocess.DEVNULL if secrets is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to the launcher alone
            )
        except OSError as error:
            raise LaunchError(f"{command.name}: cannot run {error.filename}: {error.strerror}") from None
        if process.stdin is not None:
            process.stdin.write(json.dumps(secrets).encode() + b"\n")
        return cls(command, process, print_line)

    async def _follow(self, print_line: PrintLine) -> int:
        """Print the output line by line; return the exit status."""
        assert self._process.stdout is not None
        rest = b""
        while block := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + block).replace(b"\r\n", b"\n").split(b"\n")
            for line in lines:
                print_line(f"[{self.command.name}] {line.decode(errors='replace')}")
        if rest:
            print_line(f"[{self.command.name}] {rest.decode(errors='replace')}")
        return await self._process.wait()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Signal the whole process group, as Ctrl-C in its terminal would."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self) -> None:
        """Release the tether and wait until everything behind it has ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self.interrupt()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.ended), _STOP_SECONDS)
        self.interrupt(signal.SIGKILL)
        await self.ended


class Connections:
    """Concurrent commands on hosts: each is a process of this machine, and none is left behind.

    Args:
        root: the project's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._processes: list[Process] = []

    async def run(self, command: Command, print_line: PrintLine, secrets: Mapping[str, str] | None = None) -> int:
        """Run a command to its end; return its exit status.

        Args:
            command: what to run, and where.
            print_line: takes each line of its output.
            secrets: variables that it reads from its input.
        """
        process = await Process.start(command, root=self._root, secrets=secrets, print_line=print_line)
        self._processes.append(process)
        status = await asyncio.shield(process.ended)
        self._processes.remove(process)
        return status

    async def run_all(
        self, commands: Sequence[Command], print_line: PrintLine, secrets: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run commands on all hosts; return their exit statuses. See :meth:`run`."""
        places = asyncio.Semaphore(_MAX_CONNECTIONS)

        async def one(command: Command) -> int:
            async with places:
                return await self.run(command, print_line, secrets)

        return await asyncio.gather(*map(one, commands))

    async def stop(self) -> None:
        """End the processes left over when their caller stopped waiting."""
        await asyncio.gather(*(process.stop() for process in self._processes))
