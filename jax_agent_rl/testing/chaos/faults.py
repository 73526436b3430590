"""Injected faults, and the server processes that they hit: every time and target is drawn from the run's seed.

::

    seed ──► times of each fault ──► at each: hit an idle server or proxy ──► repair it
"""

from __future__ import annotations

import asyncio
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

from jax_agent_rl.errors import LaunchError
from jax_agent_rl.testing.chaos.proxy import Fault, FaultProxy

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


Target = TypeVar("Target", Child, FaultProxy)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The servers, and the proxies before them."""

    engines: Sequence[Child]
    tools: Child
    engine_proxies: Sequence[FaultProxy]
    tool_proxy: FaultProxy


class Injection(ABC, Generic[Target]):
    """One kind of fault.

    Args:
        targets: what it may hit.

    Attributes:
        name: name in reports.
        every: mean seconds between two strikes.
        strikes: number of strikes so far.
        skipped: number of strikes skipped because other faults were in progress on all targets.
    """

    name: str
    every: float

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.strikes = 0
        self.skipped = 0

    def times(self, seed: int, seconds: float, *, rarer: float = 1.0) -> list[float]:
        """Draw the strike times in seconds from the start; gaps are 0.6 to 1.4 times ``rarer * every``."""
        rng, found, now = Random(f"{seed}/{self.name}"), [], 0.0
        while (now := now + rarer * self.every * rng.uniform(0.6, 1.4)) < seconds:
            found.append(now)
        return found

    async def run(self, seed: int, seconds: float, *, rarer: float = 1.0) -> None:
        """Strike at the drawn :meth:`times`, but not before the last target is repaired."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for number, when in enumerate(self.times(seed, seconds, rarer=rarer)):
            await asyncio.sleep(max(0.0, begin + when - loop.time()))
            await self.strike(Random(f"{seed}/{self.name}/{number}"))

    async def strike(self, rng: Random) -> None:
        """Break one target and repair it."""
        idle = [target for target in self._targets if not target.busy]
        if not idle:
            self.skipped += 1
            return
        target = rng.choice(idle)
        self.strikes += 1
        target.busy = True
        try:
            await self.hit(target, rng)
        finally:
            target.busy = False

    @abstractmethod
    async def hit(self, target: Target, rng: Random) -> None:
        """Break a target and repair it."""


class KillEngine(Injection[Child]):
    """SIGKILL; the engine restarts at once with its initial weights."""

    name, every = "kill_engine", 5.0

    async def hit(self, target: Child, rng: Random) -> None:
        await target.kill()
        await target.start()


class FreezeEngine(Injection[Child]):
    """SIGSTOP: the kernel accepts connections, but nobody answers; the engine continues with the weights it had."""

    name, every = "freeze_engine", 9.0

    async def hit(self, target: Child, rng: Random) -> None:
        target.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(1.0, 5.0))
        finally:
            target.send(signal.SIGCONT)


class HangEngine(Injection[Child]):
    """The engine stops sampling while its server still sends heartbeats; later it continues or is restarted."""

    name, every = "hang_engine", 12.0

    async def hit(self, target: Child, rng: Random) -> None:
        target.send(signal.SIGUSR1)
        await asyncio.sleep(rng.uniform(3.0, 6.0))
        if rng.random() < 0.5:
            target.send(signal.SIGUSR2)
        else:
            await target.kill()
            await target.start()


class KillToolServer(Injection[Child]):
    """SIGKILL; its workers must notice by themselves. The server restarts after a moment."""

    name, every = "kill_tool_server", 11.0

    async def hit(self, target: Child, rng: Random) -> None:
        await target.kill()
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        await target.start()


class BreakNetwork(Injection[FaultProxy]):
    """For a second or two, a fault hits some of the requests to one server.

    Args:
        targets: the proxies before the servers.
        fault: what happens to the requests.
    """

    every = 6.0
    chance = 0.3

    def __init__(self, targets: Sequence[FaultProxy], fault: Fault) -> None:
        super().__init__(targets)
        self._fault = fault
        self.name = f"network_{fault}"

    async def hit(self, target: FaultProxy, rng: Random) -> None:
        target.fault, target.chance = self._fault, self.chance
        try:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
        finally:
            target.fault = None


def all_injections(targets: Targets) -> list[Injection]:
    """Return one injection of every kind."""
    proxies = [*targets.engine_proxies, targets.tool_proxy]
    return [
        KillEngine(targets.engines),
        FreezeEngine(targets.engines),
        HangEngine(targets.engines),
        KillToolServer([targets.tools]),
        *(BreakNetwork(proxies, fault) for fault in Fault),
    ]


NAMES = tuple(kind.name for kind in (KillEngine, FreezeEngine, HangEngine, KillToolServer)) + tuple(
    f"network_{fault}" for fault in Fault
)
"""Names of :func:`all_injections`."""
