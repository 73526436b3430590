"""The servers in rotation, and the requests that wait for one of them.

::

    acquire ──► its session's server has room, or another has and moving pays? ──► yes: return it
                    │ no
                    ▼
              a queue per server, for the sessions that live there, and a common one for the
              others; each is ordered by priority
                    │                              │
                    │ no server at all, and none   │ a server has room: the first of its queue and
                    │ expected, or for too long    │ of the common one; if both are empty, the
                    │                              │ first of another server's queue, if moving it
                    ▼                              ▼ pays
                  fail                        return the server

Moving a session pays where its context is computed in less time than its server needs to get to it.
Both are estimated from the requests that have ended; before the first of them, no room stays empty
while a request waits. A session whose server takes several times as long as expected, perhaps
because it hangs, waits for any server.
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

_PATIENCE = 4.0
"""Multiple of the expected wait after which a request waits for any server: single requests vary.
"""
_MIN_PATIENCE_SECONDS = 10.0


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiter:
    """A queued request; its server is None once it was cancelled."""

    request: GenerateRequest
    block_hashes: list[int]
    server: asyncio.Future[AsyncServer | None]


_Entry = tuple[int, int, _Waiter]
"""Priority, arrival and request: an entry of a queue, which is a heap."""


class RequestQueue:
    """Assign requests to servers, and let them wait where there is no room.

    Args:
        max_in_flight: maximum concurrent requests per server; None: unlimited.
        wait_seconds: how long requests wait while there is no server but one is expected.

    Attributes:
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
        self._queues: dict[str | None, list[_Entry]] = {None: []}  # by server; None: the common one
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
        reason = self._last_loss or "none was added"
        if self._timed_out:
            reason += f"; none came back within {self._wait_seconds:g} s"
        return reason

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
        self._outage = None
        self._timed_out = False
        self._fill(server)

    def remove(self, server: AsyncServer, *, why: str) -> None:
        """Take a server out of the rotation; requests that waited for it wait for any server."""
        del self._servers[server.name]
        self.balancer.remove(server.name)
        self._last_loss = f"{server.name}: {why}"
        self._update_capabilities()
        self._with_waiters.discard(server.name)
        for entry in self._queues.pop(server.name):
            self._push(None, entry)
        for remaining in self.servers:
            self._fill(remaining)
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
        """Return a server, on which the request counts until :meth:`release`.

        None after :meth:`cancel`.

        Raises:
            EngineDiedError: there is no server, and none is expected.
        """
        block_hashes = self._block_hashes(request)
        home = self.balancer.home(request.session_id)
        if (
            home is None
            or self.balancer.has_room(home)
            or self._moving_pays(request, len(self._queues[home]) + 1)
        ):
            name = self.balancer.acquire(request.session_id, block_hashes)
            if name is not None:
                return self._servers[name]
        if not self.is_open:
            raise self._closed(request)

        loop = asyncio.get_running_loop()
        waiter = _Waiter(request=request, block_hashes=block_hashes, server=loop.create_future())
        entry = (request.priority, next(self._arrivals), waiter)
        self._push(home, entry)
        patience = None
        if home is not None:
            # The server may hang: after several times the expected wait, any server will do.
            prefill, wait = self._costs_of_moving(request, len(self._queues[home]))
            seconds = prefill + max(_PATIENCE * wait, _MIN_PATIENCE_SECONDS)
            patience = loop.call_later(seconds, self._let_move, home, entry)

        self._check_outage()
        try:
            return await waiter.server
        except asyncio.CancelledError:
            self._return_room(waiter)
            raise
        finally:
            if patience is not None:
                patience.cancel()

    def _return_room(self, waiter: _Waiter) -> None:
        """Release the server of a request that was cancelled when its turn had just come."""
        if not waiter.server.done() or waiter.server.cancelled():
            return
        if waiter.server.exception() is not None:
            return
        server = waiter.server.result()
        if server is not None:
            self.release(server)

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

    def _block_hashes(self, request: GenerateRequest) -> list[int]:
        """Return the hashes of a prompt's blocks if their KV may be on a server, else none."""
        if not self._find_prefixes or self.balancer.home(request.session_id):
            return []
        if request.multi_modal:  # placeholder ids do not tell images apart
            return []
        return PrefixIndex.block_hashes(request.prompt_ids, request.lora)

    def _update_capabilities(self) -> None:
        all_reuse = all(server.backend.capabilities.prefix_reuse for server in self.servers)
        self._find_prefixes = all_reuse and len(self._servers) > 1

    def _fill(self, server: AsyncServer) -> None:
        """Give the server's room to the next requests."""
        while self.balancer.has_room(server.name):
            waiter = self._pop_next(server.name)
            if waiter is None:
                return
            self.balancer.assign(server.name, waiter.request.session_id, waiter.block_hashes)
            waiter.server.set_result(server)

    def _push(self, home: str | None, entry: _Entry) -> None:
        heapq.heappush(self._queues[home], entry)
        self._with_waiters.add(home)

    def _pop_next(self, name: str) -> _Waiter | None:
        """Take the request that a server's room is for out of its queue; None if there is none."""
        queues = []
        for home in (name, None):
            if self._has_waiters(home):
                queues.append(self._queues[home])

        if not queues:
            # A request that leaves another server's queue spares the last one there a turn: it
            # moves if that is worth computing its context again.
            for home in tuple(self._with_waiters):
                if not self._has_waiters(home):
                    continue
                queue = self._queues[home]
                _, _, first = queue[0]
                if self._moving_pays(first.request, len(queue)):
                    queues.append(queue)

        if not queues:
            return None
        queue = min(queues, key=_order_of_first)
        _, _, waiter = heapq.heappop(queue)
        return waiter

    def _has_waiters(self, home: str | None) -> bool:
        """Return whether a request waits in this queue, after removing cancelled ones."""
        queue = self._queues[home]
        while queue and queue[0][-1].server.done():
            heapq.heappop(queue)
        if not queue:
            self._with_waiters.discard(home)
        return bool(queue)

    def _moving_pays(self, request: GenerateRequest, turns: int) -> bool:
        """Return whether to compute a request's context elsewhere, and not wait so many turns."""
        prefill_seconds, wait_seconds = self._costs_of_moving(request, turns)
        return self.moves(prefill_seconds, wait_seconds)

    def _costs_of_moving(self, request: GenerateRequest, turns: int) -> tuple[float, float]:
        """Return the seconds of computing a request's context, and of waiting so many turns."""
        wait_seconds = turns * self.costs.request_seconds / self._max_in_flight
        return self.costs.prefill_seconds(len(request.prompt_ids)), wait_seconds

    def _let_move(self, home: str, entry: _Entry) -> None:
        """Let a request that has waited for its server wait for any."""
        queue = self._queues.get(home, [])
        if entry not in queue:
            return
        queue.remove(entry)
        heapq.heapify(queue)
        self._push(None, entry)
        for server in self.servers:
            self._fill(server)

    def _waiters(self) -> list[_Waiter]:
        waiters = []
        for queue in self._queues.values():
            for _, _, waiter in queue:
                if not waiter.server.done():
                    waiters.append(waiter)
        return waiters

    # --- outages ----------------------------------------------------------------------------------

    def _check_outage(self) -> None:
        """Without a server, start the clock of the waiting requests.

        If none is expected, fail them.
        """
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


def _order_of_first(queue: list[_Entry]) -> tuple[int, int]:
    """Return priority and arrival of a queue's first request."""
    priority, arrival, _ = queue[0]
    return priority, arrival
