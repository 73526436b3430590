"""Which server takes a request, and before which others: the one its session is on, else the one with the least in
flight; first those of sessions that began first.

A plain class without clocks, locks or asyncio; the client calls it from one event loop.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from jax_agent_rl.rollout.prefix_index import BLOCK, PrefixIndex

WORTH = 1024
"""Shared ids below which a prompt is computed sooner than an uneven load is made up for."""

BUSIER, MORE = 1.1, 2
"""A server is clearly busier than another with more than so many times its requests, and so many more. By
``benchmarks/prefix_routing.py``: with more, requests wait longer for slots than their prompts would have taken."""


class Balancer:
    """Sticky sessions over least-in-flight.

    A session stays on its server because the KV of its context is there; it moves only when that server is gone. Its
    requests go before those of sessions that began later: by their order of arrival, the next turn of a trajectory
    that a learner waits for would queue behind the first turns of many that nobody needs yet.

    A new session goes where the longest part of its prompt was computed lately, unless that server is clearly busier
    than the least busy one. That pays where long prompts have long beginnings in common, as those of a group do: by
    load alone, every server computes them all. Where they do not, or where there is one server, it changes nothing.

    A session whose server is full moves to one that has room, if there is one: an idle slot is worth more than a cache,
    since ids are computed from a prompt many times faster than they are sampled.

    Args:
        max_sessions: sessions remembered; beyond it the one used longest ago is forgotten.
        max_in_flight: most requests of a server; None: any number.
    """

    def __init__(self, max_sessions: int = 100_000, *, max_in_flight: int | None = None):
        self._max_in_flight = max_in_flight
        self._in_flight: dict[str, int] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._ages: OrderedDict[str, int] = OrderedDict()
        self._arrivals = itertools.count()
        self._max_sessions = max_sessions
        self._prefixes = PrefixIndex()

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers, in the order in which they were added."""
        return tuple(self._in_flight)

    def in_flight(self, server: str) -> int:
        """Requests the server is running or has queued."""
        return self._in_flight[server]

    def add(self, server: str) -> None:
        """Adds a server.

        Raises:
            ValueError: the name is in use.
        """
        if server in self._in_flight:
            raise ValueError(f"a server is called {server!r} already")
        self._in_flight[server] = 0

    def remove(self, server: str) -> None:
        """Removes a server; its sessions go elsewhere with their next request. Unknown names are ignored."""
        self._in_flight.pop(server, None)
        self._prefixes.forget(server)
        for session in [s for s, where in self._sessions.items() if where == server]:
            del self._sessions[session]

    def acquire(self, session: str | None = None, chain: Sequence[int] = ()) -> str | None:
        """Chooses a server and counts the request there; None if there is no server, or none with room.

        Args:
            chain: of the prompt, see :meth:`PrefixIndex.chain`; empty where no KV would be found.
        """
        server = self.home(session)
        if server is None or not self.has_room(server):
            roomy = filter(self.has_room, self._in_flight)
            least = min(roomy, key=self._in_flight.__getitem__, default=None)  # ties: the one added first
            server = self._with_prefix(chain, least) or least
        if server is not None:
            self.take(server, session, chain)
        return server

    def _with_prefix(self, chain: Sequence[int], least: str | None) -> str | None:
        """The server that has most of a prompt, if that is worth more than an even load."""
        server, shared = self._prefixes.find(chain)
        if server is None or least is None or shared < max(WORTH, len(chain) * BLOCK // 2) or not self.has_room(server):
            return None
        return server if self._in_flight[server] <= self._in_flight[least] * BUSIER + MORE else None

    def home(self, session: str | None) -> str | None:
        """The server a session is on."""
        return self._sessions.get(session) if session is not None else None

    def has_room(self, server: str) -> bool:
        """Whether the server may get another request."""
        return self._max_in_flight is None or self._in_flight[server] < self._max_in_flight

    def take(self, server: str, session: str | None = None, chain: Sequence[int] = ()) -> None:
        """Counts a request on this server, where its session and its prompt are from now on."""
        self._prefixes.add(chain, server)
        if session is not None:
            self._remember(self._sessions, session, server)
        self._in_flight[server] += 1

    def release(self, server: str) -> None:
        """A request that :meth:`acquire` counted has left the server."""
        self._in_flight[server] -= 1

    def priority(self, session: str | None = None) -> int:
        """Of a session's next request; lower runs first. A request without a session is one of its own."""
        if session is None:
            return next(self._arrivals)
        age = self._ages.get(session)
        if age is None:
            age = next(self._arrivals)
        self._remember(self._ages, session, age)
        return age

    def forget_prefixes(self) -> None:
        """No server has KV that is worth anything any more."""
        self._prefixes.clear()

    def fork_session(self, parent: str, child: str) -> None:
        """Begins a session where another one is, and as old; does nothing if nobody knows that one."""
        if server := self._sessions.get(parent):
            self._remember(self._sessions, child, server)
        if (age := self._ages.get(parent)) is not None:
            self._remember(self._ages, child, age)

    def end_session(self, session: str) -> None:
        """Forgets a session."""
        self._sessions.pop(session, None)
        self._ages.pop(session, None)

    def _remember(self, what: OrderedDict[str, Any], session: str, value: Any) -> None:
        what[session] = value
        what.move_to_end(session)
        if len(what) > self._max_sessions:
            what.popitem(last=False)
