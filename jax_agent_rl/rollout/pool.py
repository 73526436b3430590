"""The servers behind one client: the only owner of their state, from start to close.

::

    factory ──► start ──► same weights as the others? ──► in rotation ──► requests
       ▲                    │ older: the last update, if its       │
       │                    │ payload lasts; else the next one     │ died, cut off, stalled,
       │ back-off           └─ newer: refused                      │ refused weights others took
       └──────────────────────────────────────────────────── lost ◄┘
                until ``recovery_seconds`` are over

                    consumes        produces               waits for
    start, join     a factory       a server in rotation   its weights
    update_weights  an update       one version in all     a join that is under way
    recovery        a lost server   another of its name    back-off, its weights
    watchdog        counters        lost servers           its next check

Joins and updates exclude each other, so no server enters with outdated weights; the start of an
engine (loading, compiling) does not block updates. No request reaches a server before it is in
rotation.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    ConfigError,
    EngineDiedError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.protocol import RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.request_queue import RequestQueue
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.rollout.watchdog import watch_servers
from jax_agent_rl.types import PauseMode
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

logger = logging.getLogger(__name__)

BackendFactory = Callable[[], RolloutBackend]
"""Makes a backend, not yet started; called again for every one that is lost."""

_MIN_BACKOFF = 0.5
_MAX_BACKOFF = 30.0
"""Seconds before a lost server is started again: doubled each time, with jitter of up to one half.
"""


class ServerPool:
    """Servers of one policy version.

    Args:
        servers: started servers with different names, all at the same policy version; closed and
            not replaced when they are lost.
        max_in_flight_per_server: maximum concurrent requests per server; None: unlimited.
        wait_for_server_seconds: how long requests wait while there is no server but one is
            expected.
        recovery_seconds: how long to retry a lost server that the pool started; 0: never.
        stall_seconds: how long a server that the pool started may have requests and make no
            progress; None: unlimited.
        seed: seed of the back-off's jitter.

    Attributes:
        queue: the requests that wait for a server, and the servers in rotation.
        servers_added: how often a server has entered the rotation.
        servers_lost: how many died, were cut off, stalled or refused weights that others took.
    """

    def __init__(
        self,
        servers: Iterable[AsyncServer] = (),
        *,
        max_in_flight_per_server: int | None = None,
        wait_for_server_seconds: float = 0.0,
        recovery_seconds: float = 0.0,
        stall_seconds: float | None = None,
        seed: int = 0,
    ):
        self.queue = RequestQueue(
            max_in_flight=max_in_flight_per_server, wait_seconds=wait_for_server_seconds
        )
        self.check_server: Callable[[AsyncServer], None] = lambda server: None
        """Called with every server that started, before it enters; raises where it cannot serve the
        run."""
        self._recovery_seconds = recovery_seconds
        self._stall_seconds = stall_seconds
        self._seed = seed
        # Servers in rotation, draining, or out of the rotation for a while.
        self._members: dict[str, AsyncServer] = {}
        # Started servers that wait for weights, and the futures of their admission.
        self._admissions: dict[AsyncServer, asyncio.Future[None]] = {}
        self._factories: dict[str, BackendFactory] = {}
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._backoffs: dict[str, float] = {}  # seconds before each server last came back
        self._watchdog: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._updating = False
        self._closed = False
        self._latest: WeightUpdate | None = None
        self._version: int | None = None
        self._weights = ""  # fingerprint of the served weights, if it is known
        self._modalities: frozenset[str] = frozenset()
        self.servers_added = 0
        self.servers_lost = 0
        for server in servers:
            self.add_server(server)

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        """The servers in rotation."""
        return self.queue.servers

    @property
    def backends(self) -> tuple[RolloutBackend, ...]:
        """Backends of all started servers, also of those outside the rotation."""
        return tuple(server.backend for server in (*self._members.values(), *self._admissions))

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that are served; None before there was a server."""
        return self._version

    @property
    def weights_fingerprint(self) -> str:
        """Fingerprint of the weights that are served; empty if it is not known."""
        return self._weights

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that every server takes; while there is none, what they took before."""
        kinds = [server.backend.capabilities.multi_modal for server in self.servers]
        if not kinds:
            return self._modalities
        return frozenset.intersection(*kinds)

    def weight_dtype(self) -> str:
        """Return the ``Capabilities.weight_dtype`` of all started servers.

        It is float32 where they differ, and where there are none.
        """
        dtypes = {backend.capabilities.weight_dtype for backend in self.backends}
        if len(dtypes) != 1:
            return AS_THEY_ARE
        return dtypes.pop()

    def weight_payloads(self) -> frozenset[str]:
        """Return the kinds of payload that all started servers take."""
        kinds = [backend.capabilities.weight_payloads for backend in self.backends]
        if not kinds:
            return frozenset()
        return frozenset.intersection(*kinds)

    # --- joining and leaving ----------------------------------------------------------------------

    async def start(self, factories: Mapping[str, BackendFactory]) -> None:
        """Start the first servers side by side, by name, and the watchdog.

        Raises:
            Exception: the error of the first server that failed; all are closed again.
            ConfigError: they have different weights.
        """
        servers = [AsyncServer(make(), name=name) for name, make in factories.items()]
        try:
            await asyncio.gather(*(server.backend.start() for server in servers))
            for server in servers:
                self.check_server(server)

            versions = {server.name: server.backend.policy_version for server in servers}
            if len(set(versions.values())) > 1:
                raise ConfigError(
                    f"the rollout servers have different policy versions: {versions}; restart all"
                )
            weights = {server.name: _weights_of(server) for server in servers}
            known_weights = set(weights.values())
            known_weights.discard("")
            if len(known_weights) > 1:
                raise ConfigError(
                    "the rollout servers have different weights of version"
                    f" {min(versions.values())}, of other runs or of one that was rewound:"
                    f" {weights}; restart all"
                )
        except BaseException:
            await asyncio.gather(*(server.close_quietly() for server in servers))
            raise

        self._factories.update(factories)
        for server in servers:
            self.add_server(server)
        if self._stall_seconds is not None:
            watchdog = watch_servers(self._members.values, self.mark_lost, self._stall_seconds)
            self._watchdog = asyncio.create_task(watchdog, name="watchdog of the servers")

    async def join(self, name: str, make: BackendFactory, *, timeout: float = 600.0) -> None:
        """Start another server, bring it to the served weights, and take it into the rotation.

        If the payload of the last update is gone, wait for the next one. A join that fails or is
        cancelled leaves everything as it was.

        Args:
            make: makes its backend, and the replacements of its backend.
            timeout: seconds it may take to start and take weights.

        Raises:
            ValueError: the name is in use.
            WeightUpdateError: it refused the weights (their files may have been replaced meanwhile:
                join again), or has newer ones.
            BackendError: it died.
            TimeoutError: it took too long.
        """
        if name in self._factories or name in self._members:
            raise ValueError(f"a server is called {name!r} already")
        self._factories[name] = make
        self.queue.expect(name)
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            await self._bring_in(name, deadline)
        except BaseException:
            self._factories.pop(name, None)
            raise
        finally:
            if name not in self._recoveries:  # it may have been lost again by now
                self.queue.stop_expecting(name)

    async def leave(self, name: str, *, drain: bool = False) -> None:
        """Take a server out of the rotation for good and close it, also one that is being replaced.

        Args:
            drain: let it finish its requests first; else they are resumed elsewhere.

        Raises:
            KeyError: there is no such server.
        """
        if name not in self._members and name not in self._recoveries:
            raise KeyError(name)
        self._factories.pop(name, None)
        recovery = self._recoveries.get(name)
        if recovery is not None:
            await _cancel(recovery)
        if name in self._members:
            server = self.queue.get(name)
            self._detach(server)
            if drain:
                await server.drain()
            del self._members[name]
            await server.end("it left")

    def add_server(self, server: AsyncServer) -> None:
        """Take a started server into the rotation, also while requests are running.

        Raises:
            ValueError: its name is in use, its weights differ from the other servers' weights, or
                weights are being updated.
            BackendClosedError: the pool is being closed.
        """
        if self._closed:
            raise BackendClosedError(
                f"server {server.name!r} came too late: the servers are being closed"
            )
        if self._updating:
            raise ValueError(
                f"server {server.name!r} cannot be added while weights are being updated; add it"
                " after"
            )

        version = server.backend.policy_version
        versions = sorted({member.backend.policy_version for member in self.servers})
        if versions and versions != [version]:
            raise ValueError(
                f"server {server.name!r} has policy version {version}, the others have {versions}; "
                "bring it up to date first with server.update_weights(...)"
            )
        if versions and not self._has_our_weights(server):
            raise ValueError(
                f"server {server.name!r} has other weights of version {version} than the others, of"
                " another run or of this one before it was rewound; bring it up to date first with"
                " server.update_weights(...)"
            )

        self.queue.add(server)
        self._members[server.name] = server
        self._version = version
        self._weights = _weights_of(server) or self._weights
        self.servers_added += 1

    async def remove_server(self, name: str, *, drain: bool = False) -> AsyncServer:
        """Take a server out of the rotation for a while; :meth:`add_server` takes it back.

        Args:
            drain: let it finish its requests first; else they are resumed elsewhere. A backend that
                cannot abort always finishes them.

        Raises:
            KeyError: there is no such server.
        """
        server = self.queue.get(name)
        self._detach(server)
        if drain:
            await server.drain()
        else:
            await server.evacuate()
        return server

    async def close(self) -> None:
        """Close all servers, and end recoveries and the watchdog."""
        self._closed = True
        for admission in self._admissions.values():
            if not admission.done():
                admission.set_exception(BackendClosedError("the servers are being closed"))

        tasks = list(self._recoveries.values())
        if self._watchdog is not None:
            tasks.append(self._watchdog)
        await _cancel(*tasks)

        servers = list(self._members.values())
        self._members.clear()  # from here on, no server counts as lost
        await asyncio.gather(*(server.close_quietly() for server in servers), *self._endings)

    def _detach(self, server: AsyncServer, why: str = "was removed") -> None:
        """Take a server out of the rotation, but leave its requests on it."""
        self._modalities = self.modalities
        self.queue.remove(server, why=why)

    async def _bring_in(self, name: str, deadline: float) -> None:
        """Start a server and take it into the rotation.

        The deadline is for its start and the served weights, not for a wait for the next weights.
        """
        server = AsyncServer(self._factories[name](), name=name)
        try:
            async with asyncio.timeout_at(deadline):
                await server.backend.start()
                self.check_server(server)
                admission = await self._admit(server)
            if admission is not None:
                await admission
        except BaseException:
            self._admissions.pop(server, None)
            if self._members.get(name) is server:  # admitted at the moment it was cancelled
                self._detach(server)
                del self._members[name]
            await server.end("it is no longer needed")
            raise

    async def _admit(self, server: AsyncServer) -> asyncio.Future[None] | None:
        """Admit a server that has, or can take, the served weights.

        Returns:
            None if it was admitted, else the future of its admission, with the next weights.
        """
        async with self._lock:
            served_version = self._version
            if served_version is None:
                self.add_server(server)
                return None

            version = server.backend.policy_version
            if version > served_version:
                raise WeightUpdateError(
                    f"server {server.name!r} has policy version {version}, newer than the run's"
                    f" {served_version}: it served another run, or this one before it was resumed;"
                    " restart it"
                )
            is_behind = version < served_version
            if is_behind and self._latest is not None and server.takes(self._latest):
                await server.update_weights(self._latest)

            is_current = server.backend.policy_version == served_version
            if is_current and self._has_our_weights(server):
                self.add_server(server)
                return None

            logger.info(
                "server %s has version %d and waits for the next weights", server.name, version
            )
            admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._admissions[server] = admission
            return admission

    def _has_our_weights(self, server: AsyncServer) -> bool:
        """Return whether a server of the served version has the served weights.

        It counts as having them where either fingerprint is unknown.
        """
        fingerprint = _weights_of(server)
        if not fingerprint or not self._weights:
            return True
        return fingerprint == self._weights

    # --- weights ----------------------------------------------------------------------------------

    async def update_weights_in_place(
        self, make: Callable[[], Awaitable[WeightUpdate]], *, mode: PauseMode | None = None
    ) -> None:
        """Pause all servers, make new weights in the memory of the old ones, and update.

        No server enters the rotation meanwhile, as its weights would be taken under its requests.
        All that were paused are resumed, also those that are no longer in rotation. A server that
        cannot pause or resume is lost.

        Args:
            make: makes the weights while the servers are paused.
            mode: what happens to running requests, see :meth:`AsyncServer.update_weights`.

        Raises:
            WeightUpdateError, BackendError: see :meth:`update_weights`.
        """
        async with self._lock:
            servers = self.servers
            self._updating = True
            try:
                await self._on_all(servers, lambda server: server.pause(mode))
                update = await make()
                await self._update_weights(update, mode)
            finally:
                self._updating = False
                await self._on_all(servers, AsyncServer.resume)

    async def _on_all(
        self,
        servers: Sequence[AsyncServer],
        call: Callable[[AsyncServer], Awaitable[None]],
    ) -> None:
        """Call servers, all at once; those that fail are lost."""
        errors = await asyncio.gather(*map(call, servers), return_exceptions=True)
        for server, error in zip(servers, errors, strict=True):
            if error is not None:
                self.mark_lost(server, f"{type(error).__name__}: {error}")

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Update all servers at once; servers that waited for weights enter the rotation.

        A server that dies of it, or refuses what another one took, is lost. While there is no
        server but one is expected, the pool keeps a lasting update for it.

        Args:
            mode: what happens to running requests, see :meth:`AsyncServer.update_weights`.

        Raises:
            WeightUpdateError: all refused; says which weights the first one serves now, if any.
            BackendError: no server is left.
        """
        async with self._lock:
            await self._update_weights(update, mode)

    async def _update_weights(self, update: WeightUpdate, mode: PauseMode | None) -> None:
        """See :meth:`update_weights`; the caller holds the lock."""
        joining: tuple[AsyncServer, ...] = ()
        if not update.partial:  # a part makes current only those that had the other parameters
            joining = tuple(self._admissions)
        servers = (*self.servers, *joining)
        self._updating = True
        try:
            updates = (server.update_weights(update, mode=mode) for server in servers)
            errors = await asyncio.gather(*updates, return_exceptions=True)
        finally:
            self._updating = False

        refused: dict[AsyncServer, BaseException] = {}
        current: list[AsyncServer] = []
        for server, error in zip(servers, errors, strict=True):
            if error is None:
                if self.queue.has(server) or server in self._admissions:
                    current.append(server)
            elif server in joining:
                admission = self._pop_admission(server)
                if admission is not None:
                    admission.set_exception(error)
            elif isinstance(error, EngineDiedError | BackendClosedError):
                self.mark_lost(server, str(error))
            elif self.queue.has(server):
                refused[server] = error
        if refused and not any(self.queue.has(server) for server in current):
            raise next(iter(refused.values()))

        self._latest = None
        if update.lasting and not update.partial:
            self._latest = update
        if not current and (self._latest is None or not self.queue.is_open):
            raise BackendError(
                f"no server is left to take weights of version {update.version}"
                f" ({self.queue.why_closed})"
            )

        self._version = update.version
        self._weights = update.fingerprint
        self.queue.balancer.forget_prefixes()
        for server, error in refused.items():
            self.mark_lost(server, f"it refused weights that others took: {error}")
        for server in joining:
            admission = self._pop_admission(server)
            if admission is not None:
                self.add_server(server)
                admission.set_result(None)

    def _pop_admission(self, server: AsyncServer) -> asyncio.Future[None] | None:
        """Return the future of a server's admission; None if the server left meanwhile."""
        admission = self._admissions.pop(server, None)
        if admission is None or admission.done():
            return None
        return admission

    # --- losses -----------------------------------------------------------------------------------

    def mark_lost(self, server: AsyncServer, why: str) -> None:
        """Take a lost server out of the rotation, end it, and replace it.

        Its requests and sessions move on.
        """
        name = server.name
        if self._members.get(name) is not server:
            return
        if not self.queue.has(server):  # it is draining or out for a while
            server.abandon(why)
            return

        self.servers_lost += 1
        del self._members[name]
        can_recover = self._recovery_seconds > 0 and name in self._factories
        if can_recover and not self._closed:
            self.queue.expect(name)
            self._recoveries[name] = asyncio.create_task(
                self._recover(server, why), name=f"recovery of {name}"
            )
        else:
            self._factories.pop(name, None)
            ending = asyncio.create_task(server.end(why))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

        # Only now: requests that wait must see that another server is expected.
        self._detach(server, why)
        logger.warning("server %s is lost (%s); %d left", name, why, len(self.servers))

    async def _recover(self, server: AsyncServer, why: str) -> None:
        """Try to bring in another server of the same name until time is up."""
        name = server.name
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._recovery_seconds
        try:
            await server.end(why)
            for backoff in self._backoff(server):
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
            # The new server may have been lost by now, and another task recovers it.
            if self._recoveries.get(name) is asyncio.current_task():
                del self._recoveries[name]
                self.queue.stop_expecting(name)

    def _backoff(self, server: AsyncServer) -> Iterator[float]:
        """Yield the seconds to wait before each attempt.

        They go on rising for a server that has answered nothing since it came back.
        """
        rng = random.Random(f"{self._seed}/{server.name}")
        previous = 0.0
        if not server.has_answered:
            previous = self._backoffs.get(server.name, 0.0)
        seconds = max(_MIN_BACKOFF, min(2 * previous, _MAX_BACKOFF))
        while True:
            yield seconds * rng.uniform(0.5, 1.0)
            seconds = min(2 * seconds, _MAX_BACKOFF)


def _weights_of(server: AsyncServer) -> str:
    """Return the fingerprint of a server's weights; empty where it is not known."""
    # Not isinstance: from Python 3.12 on it does not look through a FetchingBackend.
    return getattr(server.backend, "weights_fingerprint", "")


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
