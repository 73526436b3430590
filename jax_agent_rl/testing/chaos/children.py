"""Servers as processes that can be killed, frozen and started again at the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax_agent_rl.errors import LaunchError

MARK = "JAX_AGENT_RL_CHAOS"
"""Environment variable by which a run's processes are found, also when their parents are gone."""
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SHOWN = 2000


class Child:
    """One server.

    Args:
        name: for messages.
        command: that starts it.
        port: on which it listens when it is ready.
        env: its whole environment.
        log: file for what it prints.

    Attributes:
        busy: a fault has it in hand; others leave it alone.
        starts: how often it was started.
    """

    def __init__(self, name: str, command: Sequence[str], *, port: int, env: Mapping[str, str], log: Path) -> None:
        self.name, self.port = name, port
        self.busy = False
        self.starts = 0
        self._command, self._env, self._log = command, env, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it listens.

        Raises:
            LaunchError: it ended, or does not listen for a minute.
        """
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the run, which then stops its servers.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._env, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.starts += 1
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await _listens(self.port):
                    if self._process.returncode is not None:
                        raise LaunchError(f"{self.name} ended with {self._process.returncode}: {self._last_words()}")
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise LaunchError(f"{self.name} does not listen on port {self.port}: {self._last_words()}") from None

    def _last_words(self) -> str:
        """The end of its log, which goes with the run's folder."""
        return self._log.read_text(errors="replace")[-_SHOWN:].strip() or "it said nothing"

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it lives."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            await self._process.wait()

    async def stop(self) -> bool:
        """Asks it to end; kills it after ten seconds. Returns whether it ended as asked."""
        if self._process is None:
            return True
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True


def marked(mark: str) -> dict[int, str]:
    """The processes that carry a mark: command by process id. Empty where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(folder.name)] = command
        except OSError:  # it ended meanwhile, or is not ours
            continue
    found.pop(os.getpid(), None)
    return found


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
