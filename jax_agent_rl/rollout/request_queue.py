"""The servers in rotation, and the requests that wait for one of them.

::

    acquire ──► its session's server has room, or another one and moving there pays? ──► yes: return it
                    │ no
                    ▼
              a queue per server (sessions that live there) and one for everybody else, each ordered by priority
                    ▲                                  │
                    │ no server at all: only while one │ a server has room: the first of its own queue and of the
                    │ is expected, for a limited time  ▼ common one; if both are empty, the first of another's, if
                  fail                            return the server                                 moving it pays

Moving a session pays where its context is computed in less time than its server needs to get to it.
Both are estimated from the requests that have ended; before the first of them, no room stays empty
while a request waits. A session whose server takes several times as long as expected, because it
hangs, say, waits for any server.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass

from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.rollout.routing import Balancer, PrefixIndex, RequestCosts
from jax_agent_rl.rollout.server import AsyncServer

MoveRule = Callable[[float, float], bool]
"""Takes the seconds of computing a context and of waiting for the server that has it; returns
whether to move."""

_PATIENCE, _MIN_PATIENCE_SECONDS = (
    4.0,
    10.0,
)  # the first is a multiple of the expected wait: single requests vary


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiter:
    """A queued request; its server is None once it was cancelled."""

    request: GenerateRequest
    chain: list[int]
    server: asyncio.Future[AsyncServer | None]


class RequestQueue:
    """Assign requests to servers, and let them wait where there is no room.

    Args:
        max_in_flight: maximum concurrent requests per server; None: unlimited.
        wait_seconds: how long requests wait while there is no server but one is expected.

    Attributes:
        balancer: knows where sessions live.
        costs: what requests cost.
        moves: the rule for sessions whose server is full; simulations compare several.
    """

    def __init__(self, *, max_in_flight: int | None, wait_seconds: float):
        self.balancer = Balancer(max_in_flight=max_in_flight)
        self.costs = RequestCosts()
        self.moves: MoveRule = operator.le
        self._max_in_flight = max_in_flight or 1
        self._servers: dict[str, AsyncServer] = {}
        self._expected: set[str] = set()
        self._wait_seconds = wait_seconds
        self._outage: asyncio.TimerHandle | None = None
        self._timed_out = False
        self._last_loss = ""
        self._queues: dict[str | None, list[tuple[int, int, _Waiter]]] = {None: []}
        self._with_waiters: set[str | None] = set()  # keys of queues that are not empty
        self._find_prefixes = False
        self._arrivals = itertools.count()

    @property
    def servers(self) -> tuple[AsyncServer, ...]:
        return tuple(self._servers.values())

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a server."""
        return len(self._waiters())

    @property
    def is_open(self) -> bool:
        """Whether there is a server, or one is worth waiting for."""
        return bool(self._servers) or (bool(self._expected) and not self._timed_out)

    @property
    def why_closed(self) -> str:
        """Why the last server was lost, and how long requests waited for another."""
        waited = f"; none came back within {self._wait_seconds:g} s" if self._timed_out else ""
        return (self._last_loss or "none was added") + waited

    def has(self, server: AsyncServer) -> bool:
        """Return whether this very server is in rotation; another may have taken its name since."""
        return self._servers.get(server.name) is server

    def get(self, name: str) -> AsyncServer:
        """Return the server of this name; raise ``KeyError`` if there is none."""
        return self._servers[name]

    # --- servers ----------------------------------------------------------------------------------

    def add(self, server: AsyncServer) -> None:
        """Take a server into the rotation.

        Raises:
            ValueError: its name is in use.
        """
        self.balancer.add(server.name)
        self._servers[server.name] = server
        self._queues[server.name] = []
        self._update_capabilities()
        if self._outage is not None:
            self._outage.cancel()
        self._outage, self._timed_out = None, False
        self._fill(server)

    def remove(self, server: AsyncServer, *, why: str) -> None:
        """Take a server out of the rotation; requests that waited for it wait for any server."""
        del self._servers[server.name]
        self.balancer.remove(server.name)
        self._last_loss = f"{server.name}: {why}"
        self._update_capabilities()
        self._with_waiters.discard(server.name)
        for item in self._queues.pop(server.name):
            self._push(None, item)
        for other in self.servers:
            self._fill(other)
        self._check_outage()

    def expect(self, name: str) -> None:
        """Let requests wait for a server of this name."""
        self._expected.add(name)

    def stop_expecting(self, name: str) -> None:
        """Record that an expected server has joined, or never will."""
        self._expected.discard(name)
        self._check_outage()

    # --- requests ---------------------------------------------------------------------------------

    async def acquire(self, request: GenerateRequest) -> AsyncServer | None:
        """Return a server, on which the request counts until :meth:`release`; None after :meth:`cancel`.

        Raises:
            EngineDiedError: there is no server, and none is expected.
        """
        chain = self._chain(request)
        home = self.balancer.home(request.session_id)
        if (
            home is None
            or self.balancer.has_room(home)
            or self._moving_pays(request, len(self._queues[home]) + 1)
        ):
            name = self.balancer.acquire(request.session_id, chain)
            if name is not None:
                return self._servers[name]
        if not self.is_open:
            raise self._closed(request)
        waiter = _Waiter(
            request=request, chain=chain, server=asyncio.get_running_loop().create_future()
        )
        item = (request.priority, next(self._arrivals), waiter)
        self._push(home, item)
        patience = None
        if home is not None:
            prefill, wait = self._costs_of_moving(request, len(self._queues[home]))
            seconds = prefill + max(_PATIENCE * wait, _MIN_PATIENCE_SECONDS)
            patience = asyncio.get_running_loop().call_later(seconds, self._leave, home, item)
        self._check_outage()
        try:
            return await waiter.server
        except asyncio.CancelledError:
            given = (
                waiter.server.done()
                and not waiter.server.cancelled()
                and waiter.server.exception() is None
            )
            if given and (server := waiter.server.result()) is not None:
                self.release(server)  # its turn had just come
            raise
        finally:
            if patience is not None:
                patience.cancel()

    def release(self, server: AsyncServer) -> None:
        """Record that a request has left a server, which may be gone by now."""
        if self.has(server):
            self.balancer.release(server.name)
            self._fill(server)

    def cancel(self, request_id: str) -> None:
        """Stop a request from waiting any longer."""
        for waiter in self._waiters():
            if waiter.request.request_id == request_id:
                waiter.server.set_result(None)

    def _chain(self, request: GenerateRequest) -> list[int]:
        """Return the prefix keys of a prompt whose KV may be on a server; placeholder ids do not tell images apart."""
        if not self._find_prefixes or self.balancer.home(request.session_id) or request.multi_modal:
            return []
        return PrefixIndex.chain(request.prompt_ids, request.lora)

    def _update_capabilities(self) -> None:
        capable = all(server.backend.capabilities.prefix_reuse for server in self.servers)
        self._find_prefixes = capable and len(self._servers) > 1

    def _fill(self, server: AsyncServer) -> None:
        """Give the server's room to the next requests."""
        while self.balancer.has_room(server.name) and (waiter := self._next(server.name)):
            self.balancer.assign(server.name, waiter.request.session_id, waiter.chain)
            waiter.server.set_result(server)

    def _push(self, home: str | None, item: tuple[int, int, _Waiter]) -> None:
        heapq.heappush(self._queues[home], item)
        self._with_waiters.add(home)

    def _next(self, name: str) -> _Waiter | None:
        """Take the request that the server's room is for out of its queue."""
        homes = list(filter(self._has_waiters, (name, None)))
        if not homes:  # who leaves another's queue saves the last one there a turn
            others = filter(self._has_waiters, tuple(self._with_waiters))
            queues = ((home, self._queues[home]) for home in others)
            homes = [
                home
                for home, queue in queues
                if self._moving_pays(queue[0][-1].request, len(queue))
            ]
        if not homes:
            return None
        return heapq.heappop(
            min((self._queues[home] for home in homes), key=lambda queue: queue[0][:2])
        )[-1]

    def _has_waiters(self, home: str | None) -> bool:
        """Return whether a request waits in this queue, after removing cancelled ones."""
        queue = self._queues[home]
        while queue and queue[0][-1].server.done():
            heapq.heappop(queue)
        if not queue:
            self._with_waiters.discard(home)
        return bool(queue)

    def _moving_pays(self, request: GenerateRequest, turns: int) -> bool:
        """Return whether computing a request's context elsewhere pays, rather than waiting so many turns."""
        return self.moves(*self._costs_of_moving(request, turns))

    def _costs_of_moving(self, request: GenerateRequest, turns: int) -> tuple[float, float]:
        """Return the seconds of computing a request's context, and of waiting so many turns of its server's queue."""
        wait = turns * self.costs.request_seconds / self._max_in_flight
        return self.costs.prefill_seconds(len(request.prompt_ids)), wait

    def _leave(self, home: str, item: tuple[int, int, _Waiter]) -> None:
        """Let a request that has waited for its server wait for any."""
        if item in (queue := self._queues.get(home, [])):
            queue.remove(item)
            heapq.heapify(queue)
            self._push(None, item)
            for server in self.servers:
                self._fill(server)

    def _waiters(self) -> list[_Waiter]:
        return [
            waiter
            for queue in self._queues.values()
            for *_, waiter in queue
            if not waiter.server.done()
        ]

    # --- outages ----------------------------------------------------------------------------------

    def _check_outage(self) -> None:
        """Without a server, start the clock of the waiting requests, or fail them if none is expected."""
        if self._servers:
            return
        if not self.is_open:
            self._fail_all()
        elif self._outage is None:
            self._outage = asyncio.get_running_loop().call_later(self._wait_seconds, self._time_out)

    def _time_out(self) -> None:
        self._timed_out = True
        self._fail_all()

    def _fail_all(self) -> None:
        for waiter in self._waiters():
            waiter.server.set_exception(self._closed(waiter.request))
        self._queues[None].clear()
        self._with_waiters.clear()

    def _closed(self, request: GenerateRequest) -> EngineDiedError:
        return EngineDiedError(
            f"request {request.request_id!r}: there is no server left: {self.why_closed}"
        )
