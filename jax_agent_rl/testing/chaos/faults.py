"""What goes wrong, and when: every moment and victim is drawn from the run's seed.

::

    seed ──► times of each fault ──► at each: hit a server or a proxy that no other fault has in hand ──► mend it
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
    """What faults do to a server; :class:`~jax_agent_rl.testing.chaos.children.Child`."""

    busy: bool

    async def start(self) -> None: ...
    async def kill(self) -> None: ...
    def send(self, number: signal.Signals) -> None: ...


Target = TypeVar("Target", FaultTarget, FaultProxy)


@dataclass(frozen=True, kw_only=True)
class Victims:
    """What faults hit: the servers, and the proxies before them."""

    engines: Sequence[FaultTarget]
    tools: FaultTarget
    engine_proxies: Sequence[FaultProxy]
    tool_proxy: FaultProxy


class Injection(ABC, Generic[Target]):
    """One kind of fault.

    Args:
        targets: what it may hit.

    Attributes:
        name: in reports.
        every: mean seconds from one to the next.
        strikes: so far.
        skipped: times when all targets were in the hands of other faults.
    """

    name: str
    every: float

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self.strikes = 0
        self.skipped = 0

    def times(self, seed: int, seconds: float, *, rarer: float = 1.0) -> list[float]:
        """When it strikes, in seconds from the begin; the gaps are 0.6 to 1.4 times :attr:`every`, times ``rarer``."""
        rng, found, now = Random(f"{seed}/{self.name}"), [], 0.0
        while (now := now + rarer * self.every * rng.uniform(0.6, 1.4)) < seconds:
            found.append(now)
        return found

    async def run(self, seed: int, seconds: float, *, rarer: float = 1.0) -> None:
        """Strikes at its :meth:`times`, at the earliest when it has mended what it broke before."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for number, when in enumerate(self.times(seed, seconds, rarer=rarer)):
            await asyncio.sleep(max(0.0, begin + when - loop.time()))
            await self.strike(Random(f"{seed}/{self.name}/{number}"))

    async def strike(self, rng: Random) -> None:
        """Breaks one target and mends it."""
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
        """See :meth:`strike`."""


class KillEngine(Injection[FaultTarget]):
    """SIGKILL; the engine is started again at once, with the weights it began with."""

    name, every = "kill_engine", 5.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
        await target.kill()
        await target.start()


class FreezeEngine(Injection[FaultTarget]):
    """SIGSTOP: the kernel takes its connections and nobody answers. It comes back with the weights it had."""

    name, every = "freeze_engine", 9.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
        target.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(1.0, 5.0))
        finally:
            target.send(signal.SIGCONT)


class HangEngine(Injection[FaultTarget]):
    """It samples nothing more while its server goes on to send heartbeats; then it goes on, or somebody restarts it."""

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
    """SIGKILL; its workers have to notice by themselves. It is started again after a moment."""

    name, every = "kill_tool_server", 11.0

    async def hit(self, target: FaultTarget, rng: Random) -> None:
        await target.kill()
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        await target.start()


class BreakNetwork(Injection[FaultProxy]):
    """For a second or two, some of the requests to one server suffer.

    Args:
        fault: how.
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
    """Every kind of fault."""
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
"""Of :func:`all_injections`."""
