"""Who waits for a server, and whose turn it is.

::

    enter ──► a server with room? ──► yes: go there
                    │ no
                    ▼
              a line per server (sessions that live there) and one for everybody else, each in order of priority
                    ▲                                  │
                    │ no server at all: only while one │ a server has room: the first of its own line and of the
                    │ is coming, and not for ever      ▼ common one; only if there is none, the first of all
                  fail                                go there

So a session waits for the server that has its KV as long as others have use for the room elsewhere, and no room stays
empty while anybody waits: a server that joins late has work at once.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass

from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.rollout.prefix_index import PrefixIndex
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.routing import Balancer
from jax_agent_rl.rollout.server import AsyncServer


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiter:
    """A request in a line; its place is None when it is told to wait no longer."""

    request: GenerateRequest
    chain: list[int]
    place: asyncio.Future[AsyncServer | None]


class RequestQueue:
    """The servers in rotation, and the requests that wait for one of them.

    Args:
        max_in_flight: most requests of a server at the same time; None: any number.
        wait_seconds: how long requests wait while there is no server and one is coming.
    """

    def __init__(self, *, max_in_flight: int | None, wait_seconds: float):
        self.balancer = Balancer(max_in_flight=max_in_flight)
        self._servers: dict[str, AsyncServer] = {}
        self._coming: set[str] = set()
        self._wait_seconds = wait_seconds
        self._outage: asyncio.TimerHandle | None = None
        self._waited_enough = False
        self._last_loss = ""
        self._lines: dict[str | None, list[tuple[int, int, _Waiter]]] = {None: []}
        self._arrivals = itertools.count()

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        return tuple(self._servers.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a server."""
        return sum(not waiter.place.done() for line in self._lines.values() for *_, waiter in line)

    @property
    def is_open(self) -> bool:
        """Whether there is a server, or one can be waited for."""
        return bool(self._servers) or (bool(self._coming) and not self._waited_enough)

    def has(self, server: AsyncServer) -> bool:
        """Whether this very server is in rotation; another may have taken its name since."""
        return self._servers.get(server.name) is server

    def get(self, name: str) -> AsyncServer:
        """The server of this name; a ``KeyError`` if there is none."""
        return self._servers[name]

    # --- servers ----------------------------------------------------------------------------------------------

    def add(self, server: AsyncServer) -> None:
        """Takes a server into the rotation.

        Raises:
            ValueError: its name is in use.
        """
        self.balancer.add(server.name)
        self._servers[server.name] = server
        self._lines[server.name] = []
        self._end_outage()
        self._fill(server)

    def remove(self, server: AsyncServer, *, why: str) -> None:
        """Takes a server out of the rotation; who waited for it waits for any."""
        del self._servers[server.name]
        self.balancer.remove(server.name)
        self._last_loss = f"{server.name}: {why}"
        for item in self._lines.pop(server.name):
            heapq.heappush(self._lines[None], item)
        for other in self.servers:
            self._fill(other)
        self._look_out()

    def expect(self, name: str) -> None:
        """A server of this name is coming: requests may wait for it."""
        self._coming.add(name)

    def expect_no_more(self, name: str) -> None:
        """It has come, or will not come."""
        self._coming.discard(name)
        self._look_out()

    # --- requests ---------------------------------------------------------------------------------------------

    async def enter(self, request: GenerateRequest) -> AsyncServer | None:
        """A server with room, on which the request counts until :meth:`leave`; None if it was :meth:`dismiss` ed.

        Raises:
            EngineDiedError: there is no server, and no hope of one.
        """
        chain = self._chain(request)
        name = self.balancer.acquire(request.session_id, chain)
        if name is not None:
            return self._servers[name]
        if not self.is_open:
            raise self._closed(request)
        waiter = _Waiter(request=request, chain=chain, place=asyncio.get_running_loop().create_future())
        line = self._lines[self.balancer.home(request.session_id)]
        heapq.heappush(line, (request.priority, next(self._arrivals), waiter))
        self._look_out()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            given = waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None
            if given and (server := waiter.place.result()) is not None:
                self.leave(server)  # it had just been its turn
            raise

    def leave(self, server: AsyncServer) -> None:
        """A request has left a server, which may be gone by now."""
        if self.has(server):
            self.balancer.release(server.name)
            self._fill(server)

    def dismiss(self, request_id: str) -> None:
        """A request shall not wait any longer."""
        for waiter in self._all():
            if waiter.request.request_id == request_id:
                waiter.place.set_result(None)

    def _chain(self, request: GenerateRequest) -> list[int]:
        """Of a prompt whose beginning may be that of another session's; ids do not tell pictures apart."""
        if self.balancer.home(request.session_id) or request.multi_modal or len(self._servers) < 2:
            return []
        if not all(server.backend.capabilities.prefix_reuse for server in self.servers):
            return []
        return PrefixIndex.chain(request.prompt_ids, request.lora)

    def _fill(self, server: AsyncServer) -> None:
        """Gives the server's room to those whose turn it is."""
        while self.balancer.has_room(server.name) and (waiter := self._next(server.name)):
            self.balancer.take(server.name, waiter.request.session_id, waiter.chain)
            waiter.place.set_result(server)

    def _next(self, name: str) -> _Waiter | None:
        for line in self._lines.values():
            while line and line[0][-1].place.done():  # gave up
                heapq.heappop(line)
        own = [line for line in (self._lines[name], self._lines[None]) if line]
        lines = own or [line for line in self._lines.values() if line]
        return heapq.heappop(min(lines, key=lambda line: line[0][:2]))[-1] if lines else None

    def _all(self) -> list[_Waiter]:
        return [waiter for line in self._lines.values() for *_, waiter in line if not waiter.place.done()]

    # --- outages ----------------------------------------------------------------------------------------------

    def _look_out(self) -> None:
        """Without a server, those that wait are told how long; without hope, at once."""
        if self._servers:
            return
        if not self.is_open:
            self._fail_all()
        elif self._outage is None:
            self._outage = asyncio.get_running_loop().call_later(self._wait_seconds, self._wait_no_longer)

    def _wait_no_longer(self) -> None:
        self._waited_enough = True
        self._fail_all()

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
        self._outage, self._waited_enough = None, False

    def _fail_all(self) -> None:
        for waiter in self._all():
            waiter.place.set_exception(self._closed(waiter.request))
        self._lines[None].clear()

    def _closed(self, request: GenerateRequest) -> EngineDiedError:
        return EngineDiedError(f"request {request.request_id!r}: there is no server left: {self.why_closed}")

    @property
    def why_closed(self) -> str:
        """Why the last server went, and how long another one was waited for."""
        waited = f"; none came back within {self._wait_seconds:g} s" if self._waited_enough else ""
        return (self._last_loss or "none was added") + waited
