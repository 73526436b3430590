"""Server processes that can be killed, frozen and restarted on the same port."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax_agent_rl.errors import LaunchError

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_MAX_LOG_CHARS = 2000


class Child:
    """A server process.

    Args:
        name: name in messages.
        command: starts the server.
        port: port on which it listens once it is ready.
        env: its complete environment.
        log: file for its output.

    Attributes:
        busy: whether a fault is in progress on it; other faults then leave it alone.
        starts: number of starts so far.
    """

    def __init__(self, name: str, command: Sequence[str], *, port: int, env: Mapping[str, str], log: Path) -> None:
        self.name, self.port = name, port
        self.busy = False
        self.starts = 0
        self._command, self._env, self._log = command, env, log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the server and return once it listens.

        Raises:
            LaunchError: it exited, or did not listen within a minute.
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
        """Return the end of its log, which is deleted with the run's folder."""
        return self._log.read_text(errors="replace")[-_MAX_LOG_CHARS:].strip() or "it said nothing"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process is alive."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Send SIGKILL and wait for the process to exit."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            await self._process.wait()

    async def stop(self) -> bool:
        """Terminate the process, and kill it after ten seconds; return whether it exited by itself."""
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


def free_port() -> int:
    """Return a free port of the loopback interface."""
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
