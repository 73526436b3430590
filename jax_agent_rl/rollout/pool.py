"""The servers in rotation, and the weights that they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError
from jax_agent_rl.rollout.protocol import WeightUpdate
from jax_agent_rl.rollout.request_queue import RequestQueue
from jax_agent_rl.rollout.server import AsyncServer
from jax_agent_rl.types import PauseMode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServingStats:
    """What happened to a client's servers since it was made.

    Attributes:
        servers_up: in rotation now.
        servers_lost: died, cut off, stalled or without current weights.
        servers_joined: entered the rotation after the first request.
        stale_served: tokens older than the weights that were served when their part of a request began; 0, or an
            engine served what it should have replaced.
    """

    servers_up: int
    servers_lost: int
    servers_joined: int
    stale_served: int


class ServerLifecycle(Protocol):
    """What a client needs of :class:`~jax_agent_rl.rollout.lifecycle.LLMServerManager`."""

    def lost(self, server: AsyncServer, why: str) -> None:
        """Handle a server that is about to leave the rotation."""
        ...

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Update all servers, see :meth:`ServerPool.update_weights`."""
        ...


class ServerPool:
    """Servers of one policy version; the base of :class:`~jax_agent_rl.rollout.client.LLMServerClient`.

    Args:
        servers: started servers with different names, all at the same policy version.
        max_in_flight_per_server: requests beyond it wait here, those of older sessions first; None: unlimited.
        wait_for_server_seconds: how long requests wait while there is no server but one is expected.
    """

    def __init__(
        self,
        servers: Iterable[AsyncServer] = (),
        *,
        max_in_flight_per_server: int | None = None,
        wait_for_server_seconds: float = 0.0,
    ):
        self.queue = RequestQueue(max_in_flight=max_in_flight_per_server, wait_seconds=wait_for_server_seconds)
        self._lifecycle: ServerLifecycle | None = None
        self._updating = False
        self._version: int | None = None
        self._modalities: frozenset[str] = frozenset()
        self._has_requests = False
        self._lost = self._joined = self._stale = 0
        for server in servers:
            self.add_server(server)

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        """The servers in rotation."""
        return self.queue.servers

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that are served; None before there was a server."""
        return self._version

    @property
    def is_open(self) -> bool:
        """Whether there is a server, or one is worth waiting for."""
        return self.queue.is_open

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a server."""
        return self.queue.waiting

    @property
    def modalities(self) -> frozenset[str]:
        """Kinds of media that every server takes; while there is none, what they took before."""
        taken = [server.backend.capabilities.multi_modal for server in self.servers]
        return frozenset.intersection(*taken) if taken else self._modalities

    def stats(self) -> ServingStats:
        """Return what happened to the servers so far."""
        return ServingStats(
            servers_up=len(self.servers),
            servers_lost=self._lost,
            servers_joined=self._joined,
            stale_served=self._stale,
        )

    def require_server(self) -> None:
        """Check that there is a server, or that one is worth waiting for.

        Raises:
            EngineDiedError: every server is lost; names the reason of the last loss.
        """
        if not self.is_open:
            raise EngineDiedError(f"no rollout engine is left: {self.queue.why_closed}")

    # --- rotation ---------------------------------------------------------------------------------------------

    def set_lifecycle(self, lifecycle: ServerLifecycle) -> None:
        """Leave losses and weight updates to ``lifecycle`` from now on."""
        self._lifecycle = lifecycle

    def add_server(self, server: AsyncServer) -> None:
        """Take a started server into the rotation, also while requests are running.

        Raises:
            ValueError: its name is in use, its weights are not those of the others, or weights are being updated.
        """
        version = server.backend.policy_version
        if self._updating:
            raise ValueError(f"server {server.name!r} cannot be added while weights are being updated; add it after")
        others = sorted({s.backend.policy_version for s in self.servers})
        if others and others != [version]:
            raise ValueError(
                f"server {server.name!r} has policy version {version}, the others have {others}; "
                "bring it up to date first with server.update_weights(...)"
            )
        self.queue.add(server)
        self._version = version
        self._joined += self._has_requests

    async def remove_server(self, name: str, *, drain: bool = False) -> AsyncServer:
        """Take a server out of the rotation; its requests are resumed elsewhere. The caller closes it.

        Args:
            name: of the server.
            drain: let it finish its requests first. A backend that cannot abort always does.

        Raises:
            KeyError: there is no such server.
        """
        server = self.detach(name)
        if drain:
            await server.drain()
        else:
            await server.evacuate()
        return server

    def detach(self, name: str) -> AsyncServer:
        """Take a server out of the rotation, but leave its requests on it.

        Raises:
            KeyError: there is no such server.
        """
        server = self.queue.get(name)
        self._remove(server, "was removed")
        return server

    def mark_lost(self, server: AsyncServer, why: str) -> None:
        """Take a lost server out of the rotation, unless it left before; its requests and sessions move on."""
        if not self.queue.has(server):
            return
        self._lost += 1
        if self._lifecycle is not None:
            self._lifecycle.lost(server, why)
        self._remove(server, why)
        logger.warning("server %s is lost (%s); %d left", server.name, why, len(self.servers))

    def _remove(self, server: AsyncServer, why: str) -> None:
        self._modalities = self.modalities
        self.queue.remove(server, why=why)

    # --- weights ----------------------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Update all servers at once; see :meth:`AsyncServer.update_weights`.

        A server that dies of it, or refuses what another one took, is lost; the caller closes it.

        Raises:
            WeightUpdateError: all refused; the old weights are still served.
            BackendError: no server is left.
        """
        if self._lifecycle is not None:
            await self._lifecycle.update_weights(update, mode=mode)
            return
        answers = await self.send_update(update, mode=mode)
        if all(isinstance(error, EngineDiedError | BackendClosedError) for error in answers.values()):
            for server, error in answers.items():
                self.mark_lost(server, str(error))
            raise BackendError(f"no server is left to take weights of version {update.version}")
        self.commit_update(update, answers)
        for server, error in answers.items():
            if error is not None and not isinstance(error, EngineDiedError | BackendClosedError):
                await server.evacuate()  # without a lifecycle nobody else moves its requests

    async def send_update(
        self, update: WeightUpdate, *, mode: PauseMode | None = None, outside: Iterable[AsyncServer] = ()
    ) -> dict[AsyncServer, BaseException | None]:
        """Send weights to all servers side by side. Until all have answered, no server may enter the rotation.

        Args:
            update: the new weights.
            mode: see :meth:`AsyncServer.update_weights`.
            outside: more servers, which are not in rotation.

        Returns:
            The error of each server; None where it took the weights.
        """
        self._updating = True
        try:
            servers = (*self.servers, *outside)
            updates = (server.update_weights(update, mode=mode) for server in servers)
            return dict(zip(servers, await asyncio.gather(*updates, return_exceptions=True), strict=True))
        finally:
            self._updating = False

    def commit_update(self, update: WeightUpdate, errors: Mapping[AsyncServer, BaseException | None]) -> None:
        """Serve the new weights; what was computed with the old ones is void.

        Args:
            update: what was sent.
            errors: the answers, from :meth:`send_update`; servers without the new weights are lost.

        Raises:
            WeightUpdateError: all servers in rotation refused; the old weights are still served.
        """
        answers = {server: errors[server] for server in self.servers if server in errors}
        refused = {}
        for server, error in answers.items():
            if isinstance(error, EngineDiedError | BackendClosedError):
                self.mark_lost(server, str(error))
            elif error is not None:
                refused[server] = error
        if refused and None not in answers.values():
            raise next(iter(refused.values()))
        self._version = update.version
        self.queue.balancer.forget_prefixes()
        for server, error in refused.items():
            self.mark_lost(server, f"it refused weights that others took: {error}")
