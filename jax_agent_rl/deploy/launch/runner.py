"""Processes of a launch: started in order, their output printed, and all of them ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jax_agent_rl.deploy.launch.hosts import Command
from jax_agent_rl.deploy.launch.plan import MAX_GRACE, TOKEN, LaunchPlan, Preparation
from jax_agent_rl.errors import LaunchError
from jax_agent_rl.rollout.http import wire


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
_POLL_SECONDS = 0.5
_PROGRESS_SECONDS = 15.0
_SAVE_SECONDS = 60.0  # for the learner to save a checkpoint after a server has failed
# Servers are in this network, whatever proxy the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SSH_SECONDS = 10.0  # beyond a tether's grace, for ssh to report the end
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
            await asyncio.wait_for(asyncio.shield(self.ended), MAX_GRACE + _SSH_SECONDS)
        self.interrupt(signal.SIGKILL)
        await self.ended


class Runner:
    """Supervisor of processes that run and end together.

    Args:
        root: folder that local commands run in.
        print_line: prints a line.
        secrets: variables of tethered commands.
    """

    def __init__(self, *, root: Path, print_line: PrintLine, secrets: Mapping[str, str]) -> None:
        self._root, self._print_line, self._secrets = root, print_line, secrets
        self._stages: list[list[Process]] = []  # what was started at the same time ends at the same time
        self._interrupt = asyncio.Event()

    @contextlib.asynccontextmanager
    async def until_interrupted(self) -> AsyncIterator[None]:
        """End what runs inside on SIGINT, SIGTERM and SIGHUP; on leaving, no process is left."""
        set_on_signal(self._interrupt)
        try:
            yield
        finally:
            while self._stages:
                stage = self._stages.pop()
                if names := [process.command.name for process in stage if not process.ended.done()]:
                    self._print_line(f"stopping {', '.join(names)}")
                await asyncio.gather(*(process.stop() for process in stage))

    async def prepare(self, preparation: Preparation) -> None:
        """Create the environments, all hosts concurrently; then fetch model and data.

        Raises:
            LaunchError: a command failed; its output is on the screen.
            Interrupted: by a signal.
        """
        if preparation.environment:
            await self._all_succeed(preparation.environment)
        for command in preparation.data:
            await self._all_succeed([command])

    async def _all_succeed(self, commands: Sequence[Command]) -> None:
        processes = await self._start(commands, tethered=False)
        statuses = await watch(
            asyncio.gather(*(asyncio.shield(process.ended) for process in processes)), self._interrupt
        )
        self._stages.pop()
        failed = [c for c, status in zip(commands, statuses, strict=True) if status]
        if failed:
            raise LaunchError("\n".join(f"{c.host.name}: {' '.join(c.argv)} failed, see above" for c in failed))

    async def run(self, plan: LaunchPlan, *, start_seconds: float) -> int:
        """Start everything and wait for the learner.

        Args:
            plan: the commands.
            start_seconds: limit for the rollout servers to become healthy.

        Returns:
            The learner's exit status.

        Raises:
            LaunchError: a process ended that should not have, or servers did not become healthy.
            Interrupted: by a signal, before the learner ran.
        """
        if plan.cluster:
            head, *workers = plan.cluster
            self._print_line(f"starting Ray on {', '.join(command.host.name for command in plan.cluster)}")
            await self._start([head])
            await watch(self._until_listening(head), self._interrupt, self._running)
            await self._start(workers)
        await self._start(plan.servers)
        await watch(self._until_healthy(plan.urls, start_seconds), self._interrupt, self._running)
        return await self._train(plan.learner)

    async def _train(self, command: Command) -> int:
        self._print_line("starting the learner")
        others = self._running
        (learner,) = await self._start([command])
        try:
            return await watch(asyncio.shield(learner.ended), self._interrupt, others)
        except Interrupted:
            self._print_line("interrupted: the learner saves a checkpoint (once more to end it at once)")
            self._interrupt.clear()
        except LaunchError:
            learner.interrupt()  # its progress is saved
            with contextlib.suppress(Interrupted, LaunchError, TimeoutError):
                await asyncio.wait_for(watch(asyncio.shield(learner.ended), self._interrupt), _SAVE_SECONDS)
            raise
        learner.interrupt()
        with contextlib.suppress(Interrupted):
            return await watch(asyncio.shield(learner.ended), self._interrupt, others)
        return 128 + signal.SIGINT

    @property
    def _running(self) -> list[Process]:
        return [process for stage in self._stages for process in stage]

    async def _start(self, commands: Sequence[Command], *, tethered: bool = True) -> list[Process]:
        stage: list[Process] = []
        self._stages.append(stage)
        for command in commands:
            secrets = self._secrets if tethered else None
            stage.append(await Process.start(command, root=self._root, secrets=secrets, print_line=self._print_line))
        return stage

    # --- waiting ----------------------------------------------------------------------------------------------

    async def _until_listening(self, command: Command) -> None:
        port = int(next(word for word in command.argv if word.startswith("--port=")).partition("=")[2])
        while True:
            with contextlib.suppress(OSError), socket.create_connection((command.host.address, port), timeout=1):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _until_healthy(self, urls: Mapping[str, str], limit: float) -> None:
        waiting, begin = dict(urls), time.monotonic()
        report = begin
        self._print_line(f"waiting for {len(waiting)} rollout server(s)")
        while waiting:
            answers = await asyncio.gather(*(asyncio.to_thread(self._is_healthy, url) for url in waiting.values()))
            for name, healthy in zip(list(waiting), answers, strict=True):
                if healthy:
                    self._print_line(f"{name} is healthy at {waiting.pop(name)} ({time.monotonic() - begin:.0f} s)")
            elapsed = time.monotonic() - begin
            names = ", ".join(f"{name} ({url})" for name, url in waiting.items())
            if waiting and elapsed > limit:
                raise LaunchError(f"after {limit:g} s these servers are not healthy: {names}; see --start-timeout")
            if waiting and time.monotonic() - report > _PROGRESS_SECONDS:
                report = time.monotonic()
                self._print_line(f"{elapsed:.0f} s: waiting for {names}")
            await asyncio.sleep(_POLL_SECONDS if waiting else 0)

    def _is_healthy(self, url: str) -> bool:
        headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION), "Authorization": f"Bearer {self._secrets[TOKEN]}"}
        try:
            with _DIRECT.open(urllib.request.Request(f"{url}/v1/health", headers=headers), timeout=5) as answer:
                return bool(json.load(answer)["ok"])
        except urllib.error.HTTPError as error:
            raise LaunchError(f"{url}: another program answers there (HTTP {error.code}); choose --port") from None
        except (OSError, ValueError, KeyError):
            return False


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
