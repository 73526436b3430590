"""Injected faults: every time and target is drawn from the run's seed.

::

    seed ──► times of each fault ──► at each: hit an idle server or proxy ──► repair it
"""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar

from jax_agent_rl.testing.chaos.proxy import Fault, FaultProxy


class FaultTarget(Protocol):
    """A server that faults can hit; see :class:`~jax_agent_rl.testing.chaos.children.Child`."""

    busy: bool

    async def start(self) -> None: ...
    async def kill(self) -> None: ...
    def send(self, number: signal.Signals) -> None: ...


Target = TypeVar("Target", FaultTarget, FaultProxy)


@dataclass(frozen=True, kw_only=True)
class Victims:
    """Targets of faults: the servers, and the proxies before them."""

    engines: Sequence[FaultTarget]
    tools: FaultTarget
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


class KillEngine(Injection[FaultTarget]):
    """SIGKILL; the engine restarts at once with its initial weights."""

    name, every = "kill_engine", 5.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
        await target.kill()
        await target.start()


class FreezeEngine(Injection[FaultTarget]):
    """SIGSTOP: the kernel accepts connections, but nobody answers; the engine continues with the weights it had."""

    name, every = "freeze_engine", 9.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
        target.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(1.0, 5.0))
        finally:
            target.send(signal.SIGCONT)


class HangEngine(Injection[FaultTarget]):
    """The engine stops sampling while its server still sends heartbeats; later it continues or is restarted."""

    name, every = "hang_engine", 12.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
        target.send(signal.SIGUSR1)
        await asyncio.sleep(rng.uniform(3.0, 6.0))
        if rng.random() < 0.5:
            target.send(signal.SIGUSR2)
        else:
            await target.kill()
            await target.start()


class KillToolServer(Injection[FaultTarget]):
    """SIGKILL; its workers must notice by themselves. The server restarts after a moment."""

    name, every = "kill_tool_server", 11.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
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


def all_injections(victims: Victims) -> list[Injection]:
    """Return one injection of every kind."""
    proxies = [*victims.engine_proxies, victims.tool_proxy]
    return [
        KillEngine(victims.engines),
        FreezeEngine(victims.engines),
        HangEngine(victims.engines),
        KillToolServer([victims.tools]),
        *(BreakNetwork(proxies, fault) for fault in Fault),
    ]


NAMES = tuple(kind.name for kind in (KillEngine, FreezeEngine, HangEngine, KillToolServer)) + tuple(
    f"network_{fault}" for fault in Fault
)
"""Names of :func:`all_injections`."""
