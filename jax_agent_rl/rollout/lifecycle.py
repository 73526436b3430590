"""The life of the servers behind one client: started, brought up to date, watched, replaced, removed.

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
    watchdog        consumes: counters.      produces: lost servers.          waits for: its next look.

Joins and updates exclude each other, so nobody enters with weights that were replaced meanwhile; the engines' own
start (loading, compiling) is outside of that. No request reaches a server before it is in rotation.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from jax_agent_rl.errors import BackendClosedError, BackendError, ConfigError, EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.client import LLMServerClient
from jax_agent_rl.rollout.protocol import BackendMetrics, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.server import AsyncServer, take_weights
from jax_agent_rl.rollout.stalls import StallWatch
from jax_agent_rl.types import PauseMode

logger = logging.getLogger(__name__)

BackendFactory = Callable[[], RolloutBackend]
"""Makes a backend that is not started; called again for every one that is lost."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a lost server is tried again: twice as long each time, less up to a half by chance."""

_FAREWELL_SECONDS = 2.0
"""How long a lost server may take to give back what its requests have sampled."""

_PARTING_SECONDS = 30.0
"""How long a lost server may take to close."""

_LOOKS = 4
"""Of the watchdog in ``stall_seconds``."""


class LLMServerManager:
    """Owns the servers of a client. Use it from the client's event loop.

    Args:
        client: gets the servers; those that it has already stay, and are not replaced when they are lost.
        recovery_seconds: how long a lost server is tried again; 0: never.
        stall_seconds: how long a server may have requests inside and do nothing; None: for ever.
        seed: of the back-off's chance.
    """

    def __init__(
        self,
        client: LLMServerClient,
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
        self._change = asyncio.Lock()
        self._latest: WeightUpdate | None = None
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._paused: dict[str, float] = {}  # before each came back last
        self._chores: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        client.oversee(self)

    @property
    def backends(self) -> tuple[RolloutBackend, ...]:
        """Of all servers that are started, fenced ones too."""
        return tuple(server.backend for server in (*self._servers.values(), *self._fenced))

    # --- joining and leaving ----------------------------------------------------------------------------------

    async def start(self, factories: Mapping[str, BackendFactory]) -> None:
        """Starts the first servers side by side, by name, and the watchdog.

        Raises:
            Exception: of the first that failed; all are closed again.
            ConfigError: they have different weights.
        """
        servers = [AsyncServer(make(), name=name) for name, make in factories.items()]
        try:
            await asyncio.gather(*(server.start() for server in servers))
            if len({server.backend.policy_version for server in servers}) > 1:
                versions = {server.name: server.backend.policy_version for server in servers}
                raise ConfigError(f"the rollout servers have different policy versions: {versions}; restart all")
        except BaseException:
            await asyncio.gather(*map(self._part_with, servers))
            raise
        self._factories.update(factories)
        for server in servers:
            self._admit(server)
        if self._stall_seconds is not None:
            self._watch = asyncio.create_task(self._look_after(self._stall_seconds), name="watchdog of the servers")

    async def join(self, name: str, make: BackendFactory, *, within: float = 600.0) -> None:
        """Starts another server, brings it to the weights that are served, and takes it into the rotation.

        Where nothing is left of the last update, it waits for the next one. A join that fails or is cancelled leaves
        everything as it was.

        Args:
            name: of no other server.
            make: also makes its successors.
            within: seconds it has to start and take weights.

        Raises:
            ValueError: the name is in use.
            WeightUpdateError: it refused the weights (their files may just be replaced by the next: join again), or has
                newer ones.
            BackendError: it died.
            TimeoutError: it took too long.
        """
        if name in self._factories or name in self._servers:
            raise ValueError(f"a server is called {name!r} already")
        self._factories[name] = make
        self._client.expect_server(name)
        try:
            await self._bring_in(name, asyncio.get_running_loop().time() + within)
        except BaseException:
            self._factories.pop(name, None)
            raise
        finally:
            if name not in self._recoveries:  # it may have been lost again by now
                self._client.expect_server_no_more(name)

    async def leave(self, name: str, *, drain: bool = False) -> None:
        """Takes a server out of the rotation for good and closes it, also one that is being replaced.

        Args:
            drain: it finishes its requests first; else they go on elsewhere with what they have.

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
        """Ends everything it started: recoveries, the watchdog, and the servers."""
        self._closed = True
        for entered in self._fenced.values():
            if not entered.done():
                entered.set_exception(BackendClosedError("the servers are being closed"))
        await _cancel(*self._recoveries.values(), *filter(None, [self._watch]))
        servers, self._servers = self._servers, {}  # none of them is lost any more
        await asyncio.gather(*map(self._part_with, servers.values()), *self._chores)

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
            if self._servers.get(name) is server:  # let in at the moment it was cancelled
                self._client.detach(name)
                del self._servers[name]
            await self._end(server, "it was not wanted any more")
            raise

    async def _enter(self, server: AsyncServer) -> asyncio.Future[None] | None:
        """Into the rotation, if its weights are or can be made those of the others; else the next update does it."""
        async with self._change:
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
        """Updates all servers, fenced ones too, which enter the rotation with it.

        A server that dies of it, or refuses what another one took, is lost: out of the rotation, and tried again. While
        there is none but one is being brought back, an update that lasts is kept for it.

        Raises:
            WeightUpdateError: all refused; the old weights still serve.
            BackendError: no server is left.
        """
        async with self._change:
            # Part of the parameters makes a server current only if the rest of them were.
            fenced = () if update.partial else tuple(self._fenced)
            with self._client.updating():
                results = await take_weights((*self._client.servers, *fenced), update, mode=mode)
            rotation = self._client.servers
            took = [server for server in rotation if server in results and results[server] is None]
            refused = {s: error for s in rotation if (error := results.get(s)) is not None and not _is_death(error)}
            self._lose_the_dead(results)
            for server in fenced:
                if (error := results[server]) is not None:
                    self._turn_away(server, error)
            if refused and not took:
                raise next(iter(refused.values()))
            self._client.serve(update.version)
            self._latest = update if update.lasting and not update.partial else None
            for server, error in refused.items():
                self._client.mark_lost(server, f"it refused weights that others took: {error}")
            for server in fenced:
                self._let_in(server)
            if not self._client.servers and (self._latest is None or not self._client.is_open):
                raise BackendError(f"no server is left to take weights of version {update.version}")

    def _lose_the_dead(self, results: Mapping[AsyncServer, BaseException | None]) -> None:
        for server, error in results.items():
            if error is not None and _is_death(error):
                self._client.mark_lost(server, str(error))

    def _let_in(self, server: AsyncServer) -> None:
        entered = self._fenced.pop(server, None)
        if entered is not None and not entered.done():  # else it left meanwhile
            self._admit(server)
            entered.set_result(None)

    def _turn_away(self, server: AsyncServer, error: BaseException) -> None:
        entered = self._fenced.pop(server, None)
        if entered is not None and not entered.done():
            entered.set_exception(error)

    # --- losses -----------------------------------------------------------------------------------------------

    def lost(self, server: AsyncServer, why: str) -> None:
        """The client's word that a server is about to leave the rotation: it is ended and replaced."""
        if self._servers.get(server.name) is not server:
            return
        del self._servers[server.name]
        if self._recovery_seconds > 0 and server.name in self._factories and not self._closed:
            self._client.expect_server(server.name)
            recovery = asyncio.create_task(self._recover(server, why), name=f"recovery of {server.name}")
            self._recoveries[server.name] = recovery
        else:
            self._factories.pop(server.name, None)
            self._do(self._end(server, why))

    async def _end(self, server: AsyncServer, why: str) -> None:
        """Its requests move on, with what they have if it can still tell that; then it is closed."""
        try:
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await server.evacuate()
        except Exception as error:
            logger.info("server %s gave nothing back: %r", server.name, error)
        server.abandon(f"server {server.name} is lost: {why}")
        await self._part_with(server, within=_PARTING_SECONDS)

    async def _recover(self, dead: AsyncServer, why: str) -> None:
        """Tries to bring in another server of the same name until time is up."""
        name, loop = dead.name, asyncio.get_running_loop()
        deadline = loop.time() + self._recovery_seconds
        try:
            await self._end(dead, why)
            for pause in self._pauses(dead):
                await asyncio.sleep(min(pause, deadline - loop.time()))
                if loop.time() >= deadline:
                    break
                try:
                    await self._bring_in(name, deadline)
                except Exception as error:  # whatever a factory or an engine's start can raise
                    why = f"{type(error).__name__}: {error}"
                    logger.warning("server %s did not come back: %s", name, why)
                else:
                    self._paused[name] = pause
                    logger.warning("server %s is back", name)
                    return
            logger.error("server %s is given up after %g s; %s", name, self._recovery_seconds, why)
            self._factories.pop(name, None)
        finally:
            if self._recoveries.get(name) is asyncio.current_task():  # else it was lost again by now
                del self._recoveries[name]
                self._client.expect_server_no_more(name)

    def _pauses(self, dead: AsyncServer) -> Iterator[float]:
        """For one that has answered nothing since it came back, they go on where they were."""
        chance = random.Random(f"{self._seed}/{dead.name}")
        paused = 0.0 if dead.has_answered else self._paused.get(dead.name, 0.0)
        pause = max(_FIRST_PAUSE, min(2 * paused, _LONGEST_PAUSE))
        while True:
            yield pause * chance.uniform(0.5, 1.0)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _part_with(self, server: AsyncServer, *, within: float | None = None) -> None:
        """Closes a server that may be in any state."""
        try:
            async with asyncio.timeout(within):
                await server.close()
        except Exception as error:
            logger.warning("server %s did not close well: %r", server.name, error)

    def _do(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # --- the watchdog -----------------------------------------------------------------------------------------

    async def _look_after(self, stall_seconds: float) -> None:
        """Looks at all servers again and again."""
        watch, pause = StallWatch(stall_seconds), stall_seconds / _LOOKS
        while True:
            await asyncio.sleep(pause)
            await asyncio.gather(*(self._look_at(server, watch, pause) for server in self._servers.values()))

    async def _look_at(self, server: AsyncServer, watch: StallWatch, patience: float) -> None:
        done: tuple[int, ...] | None = None
        try:
            async with asyncio.timeout(patience):
                done = _work_done(await server.backend.metrics())
        except (EngineDiedError, BackendClosedError) as error:
            self._give_up(server, str(error))
        except Exception as error:
            logger.warning("server %s does not tell its counters: %r", server.name, error)
        now, inside = asyncio.get_running_loop().time(), len(server.running)
        if watch.look(server, done, now=now, inside=inside > 0, updating=server.updating):
            self._give_up(server, f"with {inside} requests inside it has done nothing for {self._stall_seconds:g} s")

    def _give_up(self, server: AsyncServer, why: str) -> None:
        self._client.mark_lost(server, why)
        if self._servers.get(server.name) is server:  # out of rotation before: it finishes its requests, or should
            server.abandon(f"server {server.name} is lost: {why}")


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_death(error: BaseException) -> bool:
    return isinstance(error, EngineDiedError | BackendClosedError)


def _work_done(metrics: BackendMetrics) -> tuple[int, ...]:
    """Counters one of which moves while an engine works."""
    return (metrics.generated_tokens, metrics.prefill_tokens, metrics.cached_tokens, metrics.requests_finished)
