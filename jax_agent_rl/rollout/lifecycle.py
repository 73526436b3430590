"""Lifecycle of the servers behind one client: start, join, leave, and replacement of lost ones.

::

                     factory ──► start ──► fence ──► same weights as the others? ──► in rotation ──► requests
                        ▲                    │ older: the last update, if its             │
                        │                    │ payload lasts; else the next one           │ died, cut off, stalled,
             back-off   │                    └─ newer: refused                            │ refused weights others took
                        └────────────────────────────────────────────────────────── lost ◄┘
                           until ``recovery_seconds`` are over

    start, join     consumes: a factory.     produces: a server in rotation.  waits for: its weights.
    update_weights  consumes: an update.     produces: one version in all.    waits for: a join that is under way.
    recovery        consumes: a lost server. produces: another of its name.   waits for: back-off, its weights.
    watchdog        consumes: counters.      produces: lost servers.          waits for: its next check.

Joins and updates exclude each other, so no server enters with outdated weights; the start of an engine (loading,
compiling) does not block updates. No request reaches a server before it is in rotation.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping

from jax_agent_rl.errors import BackendClosedError, BackendError, ConfigError, WeightUpdateError
from jax_agent_rl.rollout.pool import ServerPool
from jax_agent_rl.rollout.protocol import RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.watchdog import watch_servers
from jax_agent_rl.types import PauseMode

logger = logging.getLogger(__name__)

BackendFactory = Callable[[], RolloutBackend]
"""Makes a backend, not yet started; called again for every one that is lost."""

_MIN_BACKOFF, _MAX_BACKOFF = 0.5, 30.0
"""Seconds before a lost server is started again: doubled each time, with jitter of up to one half."""

_EVACUATE_SECONDS = 2.0
"""How long a lost server may take to return what its requests have sampled."""

_CLOSE_SECONDS = 30.0
"""How long a lost server may take to close."""


class LLMServerManager:
    """Owns the servers of a client. Use it from the client's event loop.

    Args:
        client: gets the servers; those it already has stay, and are not replaced when they are lost.
        recovery_seconds: how long to retry a lost server; 0: never.
        stall_seconds: how long a server may have requests and make no progress; None: for ever.
        seed: of the back-off's jitter.
    """

    def __init__(
        self,
        client: ServerPool,
        *,
        recovery_seconds: float = 0.0,
        stall_seconds: float | None = None,
        seed: int = 0,
    ):
        self._client = client
        self._recovery_seconds = recovery_seconds
        self._stall_seconds = stall_seconds
        self._seed = seed
        self._servers = {server.name: server for server in client.servers}
        self._factories: dict[str, BackendFactory] = {}
        self._fenced: dict[AsyncServer, asyncio.Future[None]] = {}
        self._lock = asyncio.Lock()
        self._latest: WeightUpdate | None = None
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._backoffs: dict[str, float] = {}  # before each came back last
        self._endings: set[asyncio.Task[None]] = set()
        self._watchdog: asyncio.Task[None] | None = None
        self._closed = False
        client.set_lifecycle(self)

    @property
    def backends(self) -> tuple[RolloutBackend, ...]:
        """Backends of all started servers, fenced ones included."""
        return tuple(server.backend for server in (*self._servers.values(), *self._fenced))

    # --- joining and leaving ----------------------------------------------------------------------------------

    async def start(self, factories: Mapping[str, BackendFactory]) -> None:
        """Start the first servers side by side, by name, and the watchdog.

        Raises:
            Exception: the first server's that failed; all are closed again.
            ConfigError: they have different weights.
        """
        servers = [AsyncServer(make(), name=name) for name, make in factories.items()]
        try:
            await asyncio.gather(*(server.start() for server in servers))
            if len({server.backend.policy_version for server in servers}) > 1:
                versions = {server.name: server.backend.policy_version for server in servers}
                raise ConfigError(f"the rollout servers have different policy versions: {versions}; restart all")
        except BaseException:
            await asyncio.gather(*map(self._close, servers))
            raise
        self._factories.update(factories)
        for server in servers:
            self._admit(server)
        if self._stall_seconds is not None:
            watching = watch_servers(lambda: self._servers.values(), self._give_up, self._stall_seconds)
            self._watchdog = asyncio.create_task(watching, name="watchdog of the servers")

    async def join(self, name: str, make: BackendFactory, *, within: float = 600.0) -> None:
        """Start another server, bring it to the weights that are served, and take it into the rotation.

        If the payload of the last update is gone, wait for the next one. A join that fails or is cancelled leaves
        everything as it was.

        Args:
            name: unique.
            make: also makes its replacements.
            within: seconds it may take to start and take weights.

        Raises:
            ValueError: the name is in use.
            WeightUpdateError: it refused the weights (their files may have been replaced meanwhile: join again), or has
                newer ones.
            BackendError: it died.
            TimeoutError: it took too long.
        """
        if name in self._factories or name in self._servers:
            raise ValueError(f"a server is called {name!r} already")
        self._factories[name] = make
        self._client.queue.expect(name)
        try:
            await self._bring_in(name, asyncio.get_running_loop().time() + within)
        except BaseException:
            self._factories.pop(name, None)
            raise
        finally:
            if name not in self._recoveries:  # it may have been lost again by now
                self._client.queue.stop_expecting(name)

    async def leave(self, name: str, *, drain: bool = False) -> None:
        """Take a server out of the rotation for good and close it, also one that is being replaced.

        Args:
            name: of the server.
            drain: let it finish its requests first; else they are resumed elsewhere.

        Raises:
            KeyError: there is no such server.
        """
        if name not in self._servers and name not in self._recoveries:
            raise KeyError(name)
        self._factories.pop(name, None)
        if recovery := self._recoveries.get(name):
            await _cancel(recovery)
        if name in self._servers:
            server = self._client.detach(name)
            if drain:
                await server.drain()
            del self._servers[name]
            await self._end(server, "it left")

    async def close(self) -> None:
        """End everything it started: recoveries, the watchdog, and the servers."""
        self._closed = True
        for entered in self._fenced.values():
            if not entered.done():
                entered.set_exception(BackendClosedError("the servers are being closed"))
        await _cancel(*self._recoveries.values(), *filter(None, [self._watchdog]))
        servers, self._servers = self._servers, {}  # none of them is lost any more
        await asyncio.gather(*map(self._close, servers.values()), *self._endings)

    async def _bring_in(self, name: str, deadline: float) -> None:
        server = AsyncServer(self._factories[name](), name=name)
        try:
            async with asyncio.timeout_at(deadline):
                await server.start()
                entered = await self._enter(server)
            if entered is not None:
                await entered
        except BaseException:
            self._fenced.pop(server, None)
            if self._servers.get(name) is server:  # admitted at the moment it was cancelled
                self._client.detach(name)
                del self._servers[name]
            await self._end(server, "it was not wanted any more")
            raise

    async def _enter(self, server: AsyncServer) -> asyncio.Future[None] | None:
        """Admit a server with, or updated to, the weights of the others; else return the future of its admission."""
        async with self._lock:
            mine, served = server.backend.policy_version, self._client.policy_version
            if served is not None and mine > served:
                raise WeightUpdateError(
                    f"server {server.name!r} has policy version {mine}, newer than the run's {served}: it served "
                    "another run, or this one before it was resumed; restart it"
                )
            if served is not None and mine < served and self._latest is not None:
                await server.update_weights(self._latest)
            if served is None or server.backend.policy_version == served:
                self._admit(server)
                return None
            logger.info("server %s has version %d and waits for the next weights", server.name, mine)
            entered = self._fenced[server] = asyncio.get_running_loop().create_future()
            return entered

    def _admit(self, server: AsyncServer) -> None:
        if self._closed:
            raise BackendClosedError(f"server {server.name!r} came too late: the servers are being closed")
        self._client.add_server(server)
        self._servers[server.name] = server

    # --- weights ----------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Update all servers; fenced ones enter the rotation with it.

        A server that dies of it, or refuses what another one took, is lost, and replaced. While there is none but one
        is expected, an update that lasts is kept for it.

        Raises:
            WeightUpdateError: all refused; the old weights are still served.
            BackendError: no server is left.
        """
        async with self._lock:
            # Part of the parameters makes a server current only if the rest of them were.
            fenced = () if update.partial else tuple(self._fenced)
            errors = await self._client.send_update(update, mode=mode, outside=fenced)
            for server in fenced:
                if (error := errors[server]) is not None and (entered := self._unfence(server)):
                    entered.set_exception(error)
            self._client.commit_update(update, errors)
            self._latest = update if update.lasting and not update.partial else None
            for server in fenced:
                if entered := self._unfence(server):
                    self._admit(server)
                    entered.set_result(None)
            if not self._client.servers and (self._latest is None or not self._client.is_open):
                raise BackendError(f"no server is left to take weights of version {update.version}")

    def _unfence(self, server: AsyncServer) -> asyncio.Future[None] | None:
        """Return the future of a fenced server's admission; None if it left meanwhile."""
        entered = self._fenced.pop(server, None)
        return entered if entered is not None and not entered.done() else None

    # --- losses -----------------------------------------------------------------------------------------------

    def lost(self, server: AsyncServer, why: str) -> None:
        """End and replace a server that is about to leave the rotation."""
        if self._servers.get(server.name) is not server:
            return
        del self._servers[server.name]
        if self._recovery_seconds > 0 and server.name in self._factories and not self._closed:
            self._client.queue.expect(server.name)
            recovery = asyncio.create_task(self._recover(server, why), name=f"recovery of {server.name}")
            self._recoveries[server.name] = recovery
        else:
            self._factories.pop(server.name, None)
            ending = asyncio.create_task(self._end(server, why))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _end(self, server: AsyncServer, why: str) -> None:
        """Send a server's requests elsewhere, with what they have if it can still report that; then close it."""
        try:
            async with asyncio.timeout(_EVACUATE_SECONDS):
                await server.evacuate()
        except Exception as error:
            logger.info("server %s returned nothing: %r", server.name, error)
        server.abandon(f"server {server.name} is lost: {why}")
        await self._close(server, within=_CLOSE_SECONDS)

    async def _recover(self, dead: AsyncServer, why: str) -> None:
        """Try to bring in another server of the same name until time is up."""
        name, loop = dead.name, asyncio.get_running_loop()
        deadline = loop.time() + self._recovery_seconds
        try:
            await self._end(dead, why)
            for backoff in self._backoff(dead):
                await asyncio.sleep(min(backoff, deadline - loop.time()))
                if loop.time() >= deadline:
                    break
                try:
                    await self._bring_in(name, deadline)
                except Exception as error:  # whatever a factory or an engine's start can raise
                    why = f"{type(error).__name__}: {error}"
                    logger.warning("server %s did not come back: %s", name, why)
                else:
                    self._backoffs[name] = backoff
                    logger.warning("server %s is back", name)
                    return
            logger.error("server %s is given up after %g s; %s", name, self._recovery_seconds, why)
            self._factories.pop(name, None)
        finally:
            if self._recoveries.get(name) is asyncio.current_task():  # else it was lost again by now
                del self._recoveries[name]
                self._client.queue.stop_expecting(name)

    def _backoff(self, dead: AsyncServer) -> Iterator[float]:
        """Yield seconds to wait; they go on rising for a server that has answered nothing since it came back."""
        rng = random.Random(f"{self._seed}/{dead.name}")
        previous = 0.0 if dead.has_answered else self._backoffs.get(dead.name, 0.0)
        seconds = max(_MIN_BACKOFF, min(2 * previous, _MAX_BACKOFF))
        while True:
            yield seconds * rng.uniform(0.5, 1.0)
            seconds = min(2 * seconds, _MAX_BACKOFF)

    async def _close(self, server: AsyncServer, *, within: float | None = None) -> None:
        """Close a server that may be in any state."""
        try:
            async with asyncio.timeout(within):
                await server.close()
        except Exception as error:
            logger.warning("server %s failed to close: %r", server.name, error)

    def _give_up(self, server: AsyncServer, why: str) -> None:
        self._client.mark_lost(server, why)
        if self._servers.get(server.name) is server:  # it is draining
            server.abandon(f"server {server.name} is lost: {why}")


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
