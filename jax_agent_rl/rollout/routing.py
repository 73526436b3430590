"""Routing: which server takes a request, and which requests go first.

Plain classes without clocks, locks or asyncio; the client calls them from one event loop.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

BLOCK = 64
"""Ids per block of a :class:`PrefixIndex`; a shorter rest does not count."""

MIN_SHARED_IDS = 1024
"""Shared ids below which recomputing a prompt costs less than an uneven load."""

BUSY_RATIO, BUSY_MARGIN = 1.1, 2
"""A server is clearly busier than another if it exceeds this ratio of the other's requests plus
this margin. Chosen with ``benchmarks/prefix_routing.py``: with higher values, requests wait longer
for slots than prompts would take."""


class PrefixIndex:
    """Remembers which server last computed the beginning of a prompt, by chained hashes of blocks of ids.

    An engine may have evicted the prefix since: the index is a guess, and a wrong one costs a
        recomputed prompt.

    Args:
        max_blocks: blocks remembered (about 200 bytes each); the least recently used is evicted.
    """

    def __init__(self, max_blocks: int = 100_000):
        self._servers: OrderedDict[int, str] = OrderedDict()
        self._max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._servers)

    @staticmethod
    def chain(ids: Sequence[int], kind: Hashable = None) -> list[int]:
        """Return a key per whole block, which stands for all ids up to the block's end; O(ids).

        Args:
            ids: the prompt.
            kind: what else the KV of these ids depends on, such as an adapter.
        """
        keys, key = [], hash(kind)
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            key = hash((key, tuple(ids[end - BLOCK : end])))
            keys.append(key)
        return keys

    def find(self, chain: Sequence[int]) -> tuple[str | None, int]:
        """Return the server that ran the longest prefix of ``chain``, and the prefix's length in ids."""
        server, shared = None, 0
        for number, key in enumerate(chain, 1):
            known = self._servers.get(key)
            if known is None:
                break
            server, shared = known, number * BLOCK
        return server, shared

    def add(self, chain: Sequence[int], server: str) -> None:
        """Record that ``server`` runs this prompt now."""
        for key in reversed(chain):  # so that the end of a prompt is evicted before its beginning
            self._servers[key] = server
            self._servers.move_to_end(key)
        while len(self._servers) > self._max_blocks:
            self._servers.popitem(last=False)

    def forget(self, server: str) -> None:
        """Drop all blocks of a lost server."""
        for key in [key for key, where in self._servers.items() if where == server]:
            del self._servers[key]

    def clear(self) -> None:
        """Drop all blocks, as new weights invalidate all KV."""
        self._servers.clear()


class RequestCosts:
    """Estimates what requests cost from those that have ended, the last few hundred most of all.

    Their seconds are fitted by least squares to the ids of their prompts that were computed and the
    ids sampled.
    """

    _DECAY = 1 - 1 / 256

    def __init__(self) -> None:
        self._count = self._seconds = 0.0
        self._moments = [
            0.0
        ] * 5  # computed², computed x sampled, sampled², computed x seconds, sampled x seconds

    def add(self, seconds: float, *, computed: int, sampled: int) -> None:
        """Record a request: how long it ran, prompt ids that were not cached, ids sampled."""
        new = (computed**2, computed * sampled, sampled**2, computed * seconds, sampled * seconds)
        self._moments = [self._DECAY * old + x for old, x in zip(self._moments, new, strict=True)]
        self._count, self._seconds = (
            self._DECAY * self._count + 1,
            self._DECAY * self._seconds + seconds,
        )

    @property
    def request_seconds(self) -> float:
        """Mean duration of a request; 0 before the first."""
        return self._seconds / self._count if self._count else 0.0

    def prefill_seconds(self, ids: int) -> float:
        """Return how long computing a prompt takes; 0 while requests do not tell."""
        cc, cs, ss, ct, st = self._moments
        determinant = cc * ss - cs * cs
        return (
            ids * max(0.0, (ct * ss - st * cs) / determinant)
            if determinant > 1e-9 * cc * ss
            else 0.0
        )


class Balancer:
    """Sticky sessions over least-in-flight.

    A session stays on its server, which has the KV of its context; :meth:`acquire` moves it when
    that server is gone or full, which :class:`~jax_agent_rl.rollout.request_queue.RequestQueue`
    asks for when waiting costs more. Requests of older sessions go first: in order of arrival, the
    next turn of a trajectory that the learner waits for would queue behind first turns that nobody
    needs yet.

    A new session goes where the longest prefix of its prompt was computed lately, unless that
    server is clearly busier than the least busy one. This pays off where prompts share long
    prefixes, as those of a group do.

    Args:
        max_sessions: sessions remembered; the least recently used is forgotten.
        max_in_flight: maximum requests per server; None: unlimited.
    """

    def __init__(self, max_sessions: int = 100_000, *, max_in_flight: int | None = None):
        self._max_in_flight = max_in_flight
        self._in_flight: dict[str, int] = {}
        self._places: dict[str, int] = {}  # in order of addition
        self._least: list[
            tuple[int, int, str]
        ] = []  # a heap of (in flight, place, name); most entries are outdated
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
        """Return the number of requests the server is running or has queued."""
        return self._in_flight[server]

    def add(self, server: str) -> None:
        """Add a server.

        Raises:
            ValueError: the name is in use.
        """
        if server in self._in_flight:
            raise ValueError(f"a server is called {server!r} already")
        self._places[server] = next(self._arrivals)
        self._count(server, 0)

    def remove(self, server: str) -> None:
        """Remove a server; its sessions move with their next request. Unknown names are ignored."""
        self._in_flight.pop(server, None)
        self._places.pop(server, None)
        self._prefixes.forget(server)
        for session in [s for s, where in self._sessions.items() if where == server]:
            del self._sessions[session]

    def acquire(self, session: str | None = None, chain: Sequence[int] = ()) -> str | None:
        """Choose a server and count the request there; None if no server has room.

        Args:
            session: the request's session.
            chain: of the prompt, see :meth:`PrefixIndex.chain`; empty where no KV would be found.
        """
        server = self.home(session)
        if server is None or not self.has_room(server):
            least = self._least_busy()
            if least is not None and not self.has_room(least):
                least = None
            server = self._with_prefix(chain, least) or least
        if server is not None:
            self.assign(server, session, chain)
        return server

    def _least_busy(self) -> str | None:
        """Return the server with the fewest requests, of several the one added first."""
        while self._least:
            in_flight, place, server = self._least[0]
            if self._places.get(server) == place and self._in_flight[server] == in_flight:
                return server
            heapq.heappop(self._least)
        return None

    def _count(self, server: str, in_flight: int) -> None:
        self._in_flight[server] = in_flight
        if len(self._least) > 8 * len(self._in_flight):
            self._least = [
                (self._in_flight[name], place, name) for name, place in self._places.items()
            ]
            heapq.heapify(self._least)
        else:
            heapq.heappush(self._least, (in_flight, self._places[server], server))

    def _with_prefix(self, chain: Sequence[int], least: str | None) -> str | None:
        """Return the server with the longest prefix of a prompt, if that is worth an uneven load."""
        server, shared = self._prefixes.find(chain)
        if server is None or least is None or not self.has_room(server):
            return None
        if shared < max(MIN_SHARED_IDS, len(chain) * BLOCK // 2):
            return None
        return (
            server
            if self._in_flight[server] <= self._in_flight[least] * BUSY_RATIO + BUSY_MARGIN
            else None
        )

    def home(self, session: str | None) -> str | None:
        """Return the server of a session, None for a new one."""
        return self._sessions.get(session) if session is not None else None

    def has_room(self, server: str) -> bool:
        """Return whether the server may get another request."""
        return self._max_in_flight is None or self._in_flight[server] < self._max_in_flight

    def assign(self, server: str, session: str | None = None, chain: Sequence[int] = ()) -> None:
        """Count a request on this server, where its session and its prompt live from now on.

        Args:
            server: its name.
            session: the request's session.
            chain: of the prompt, see :meth:`PrefixIndex.chain`.
        """
        self._prefixes.add(chain, server)
        if session is not None:
            self._remember(self._sessions, session, server)
        self._count(server, self._in_flight[server] + 1)

    def release(self, server: str) -> None:
        """Uncount a request that has left the server."""
        self._count(server, self._in_flight[server] - 1)

    def priority(self, session: str | None = None) -> int:
        """Return the priority of a session's next request; lower runs first. No session: a session of its own."""
        if session is None:
            return next(self._arrivals)
        age = self._ages.get(session)
        if age is None:
            age = next(self._arrivals)
        self._remember(self._ages, session, age)
        return age

    def forget_prefixes(self) -> None:
        """Forget all prefixes, as new weights invalidate all KV."""
        self._prefixes.clear()

    def fork_session(self, parent: str, child: str) -> None:
        """Begin a session on the server of ``parent`` and with its age; does nothing if ``parent`` is unknown."""
        if server := self._sessions.get(parent):
            self._remember(self._sessions, child, server)
        if (age := self._ages.get(parent)) is not None:
            self._remember(self._ages, child, age)

    def end_session(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(session, None)
        self._ages.pop(session, None)

    def _remember(self, what: OrderedDict[str, Any], session: str, value: Any) -> None:
        what[session] = value
        what.move_to_end(session)
        if len(what) > self._max_sessions:
            what.popitem(last=False)
