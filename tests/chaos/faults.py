"""Injected faults, and the server processes that they hit.

::

    seed ──► times of each fault ──► at each: hit an idle server or proxy ──► repair it

Every time and target is drawn from the run's seed.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from jax_agent_rl.errors import LaunchError
from tests.chaos.proxy import Fault, FaultProxy

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05
_MAX_LOG_CHARS = 2000
_NETWORK_CHANCE = 0.3


class Child:
    """A server process.

    Args:
        name: name in messages.
        port: port on which it listens once it is ready.
        env: its complete environment.
        log: file for its output.

    Attributes:
        busy: whether a fault is in progress on it; other faults then leave it alone.
        starts: number of starts so far.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, port: int, env: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.port = port
        self.busy = False
        self.starts = 0
        self._command = command
        self._env = env
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the server and return once it listens.

        Raises:
            LaunchError: it exited, or did not listen within a minute.
        """
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the run, which then stops its
            # servers.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not await _listens(self.port):
                    if self._process.returncode is not None:
                        raise LaunchError(
                            f"{self.name} ended with {self._process.returncode}: {self._log_end()}"
                        )
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise LaunchError(
                f"{self.name} does not listen on port {self.port}: {self._log_end()}"
            ) from None

    def _log_end(self) -> str:
        """Return the end of its log, which is deleted with the run's folder."""
        end = self._log.read_text(errors="replace")[-_MAX_LOG_CHARS:].strip()
        return end or "it said nothing"

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
        """Terminate the process, and kill it after ten seconds.

        Returns:
            Whether it exited without being killed.
        """
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


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


_Hit = Callable[[Any, Random], Awaitable[None]]


class Injection:
    """One kind of fault.

    Args:
        name: one of :data:`FAULTS`.
        targets: servers or proxies that it may hit, all of one class.

    Attributes:
        strikes: number of strikes so far.
        skipped: number of strikes left out because other faults were in progress on all targets.
        targets: what it may strike.
    """

    def __init__(self, name: str, targets: Sequence[Child | FaultProxy]) -> None:
        self.name = name
        self.strikes = 0
        self.skipped = 0
        self.targets = targets
        self._mean_gap, self._hit = FAULTS[name]

    def times(self, seed: int, seconds: float, *, rarer: float = 1.0) -> list[float]:
        """Draw the strike times, in seconds from the start.

        Gaps are 0.6 to 1.4 times the mean gap, multiplied by ``rarer``.
        """
        rng = Random(f"{seed}/{self.name}")
        times = []
        time = 0.0
        while True:
            time += rarer * self._mean_gap * rng.uniform(0.6, 1.4)
            if time >= seconds:
                return times
            times.append(time)

    async def run(self, seed: int, seconds: float, *, rarer: float = 1.0) -> None:
        """Strike at the drawn :meth:`times`, but not before the last target is repaired."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number, time in enumerate(self.times(seed, seconds, rarer=rarer)):
            await asyncio.sleep(max(0.0, start + time - loop.time()))
            await self.strike(Random(f"{seed}/{self.name}/{number}"))

    async def strike(self, rng: Random) -> None:
        """Break one target and repair it."""
        idle = [target for target in self.targets if not target.busy]
        if not idle:
            self.skipped += 1
            return
        target = rng.choice(idle)
        self.strikes += 1
        target.busy = True
        try:
            await self._hit(target, rng)
        finally:
            target.busy = False


async def _kill_engine(engine: Child, rng: Random) -> None:
    """Send SIGKILL; the engine restarts at once with its initial weights."""
    await engine.kill()
    await engine.start()


async def _freeze_engine(engine: Child, rng: Random) -> None:
    """Send SIGSTOP: the kernel accepts connections, but nobody answers.

    The engine continues later, with the weights it had.
    """
    engine.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(rng.uniform(1.0, 5.0))
    finally:
        engine.send(signal.SIGCONT)


async def _hang_engine(engine: Child, rng: Random) -> None:
    """Stop sampling while the server still sends heartbeats; later continue, or restart it."""
    engine.send(signal.SIGUSR1)
    await asyncio.sleep(rng.uniform(3.0, 6.0))
    if rng.random() < 0.5:
        engine.send(signal.SIGUSR2)
    else:
        await _kill_engine(engine, rng)


async def _kill_tool_server(tools: Child, rng: Random) -> None:
    """Send SIGKILL; the workers must notice by themselves. The server restarts after a moment."""
    await tools.kill()
    await asyncio.sleep(rng.uniform(0.2, 1.0))
    await tools.start()


async def _break_network(proxy: FaultProxy, rng: Random, *, fault: Fault) -> None:
    """Let a fault hit some of the requests to one server for a second or two."""
    proxy.fault = fault
    proxy.chance = _NETWORK_CHANCE
    try:
        await asyncio.sleep(rng.uniform(0.5, 2.0))
    finally:
        proxy.fault = None


FAULTS: dict[str, tuple[float, _Hit]] = {
    "kill_engine": (5.0, _kill_engine),
    "freeze_engine": (9.0, _freeze_engine),
    "hang_engine": (12.0, _hang_engine),
    "kill_tool_server": (11.0, _kill_tool_server),
    **{f"network_{fault}": (6.0, partial(_break_network, fault=fault)) for fault in Fault},
}
"""By the fault's name, mean seconds between two strikes, and what breaks and repairs a target."""


def all_injections(
    engines: Sequence[Child], tools: Child, proxies: Sequence[FaultProxy]
) -> list[Injection]:
    """Return one injection of every kind."""
    injections = []
    for name in FAULTS:
        targets: Sequence[Child | FaultProxy] = engines
        if name == "kill_tool_server":
            targets = [tools]
        elif name.startswith("network_"):
            targets = proxies
        injections.append(Injection(name, targets))
    return injections
