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
"""Ids per block of a :class:`PrefixIndex`; an incomplete block does not count."""

MIN_SHARED_IDS = 1024
"""Shared ids below which recomputing a prompt costs less than an uneven load."""

BUSY_RATIO = 1.1
BUSY_MARGIN = 2
"""A server is clearly busier than another if it exceeds this ratio of the other's requests plus
this margin. Chosen with ``benchmarks/prefix_routing.py``: with higher values, requests wait longer
for slots than prompts would take."""


class PrefixIndex:
    """Remembers which server last computed the beginning of a prompt.

    Its keys are hashes of blocks of ids, each of which includes the hash of the block before. An
    engine may have evicted a prefix since: the index is a guess, and a wrong one costs a recomputed
    prompt.

    Args:
        max_blocks: blocks remembered (about 200 bytes each); the least recently used is evicted.
    """

    def __init__(self, max_blocks: int = 100_000):
        self._servers: OrderedDict[int, str] = OrderedDict()
        self._max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._servers)

    @staticmethod
    def block_hashes(ids: Sequence[int], kind: Hashable = None) -> list[int]:
        """Return a hash per complete block, which stands for all ids up to the block's end; O(ids).

        Args:
            kind: what else the KV of these ids depends on, such as an adapter.
        """
        hashes = []
        block_hash = hash(kind)
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            block_hash = hash((block_hash, tuple(ids[end - BLOCK : end])))
            hashes.append(block_hash)
        return hashes

    def find(self, block_hashes: Sequence[int]) -> tuple[str | None, int]:
        """Return the server that ran the longest prefix of a prompt, and how many ids that has."""
        server = None
        num_blocks = 0
        for block_hash in block_hashes:
            block_server = self._servers.get(block_hash)
            if block_server is None:
                break
            server = block_server
            num_blocks += 1
        return server, num_blocks * BLOCK

    def add(self, block_hashes: Sequence[int], server: str) -> None:
        """Record that ``server`` runs this prompt now."""
        # Backwards, so that the end of a prompt is evicted before its beginning.
        for block_hash in reversed(block_hashes):
            self._servers[block_hash] = server
            self._servers.move_to_end(block_hash)
        while len(self._servers) > self._max_blocks:
            self._servers.popitem(last=False)

    def forget(self, server: str) -> None:
        """Drop all blocks of a lost server."""
        lost = [key for key, block_server in self._servers.items() if block_server == server]
        for block_hash in lost:
            del self._servers[block_hash]

    def clear(self) -> None:
        """Drop all blocks, as new weights invalidate all KV."""
        self._servers.clear()


class RequestCosts:
    """Estimates what requests cost from those that have ended, the last few hundred most of all.

    A least-squares fit explains the seconds of a request by two numbers of ids::

        seconds ≈ a · computed + b · sampled

    ``computed`` are the prompt ids that were not cached. All sums decay exponentially.
    """

    _DECAY = 1 - 1 / 256

    def __init__(self) -> None:
        self._count = 0.0
        self._seconds = 0.0
        # Sums of products, for the normal equations of the fit.
        self._computed_computed = 0.0
        self._computed_sampled = 0.0
        self._sampled_sampled = 0.0
        self._computed_seconds = 0.0
        self._sampled_seconds = 0.0

    def add(self, seconds: float, *, computed: int, sampled: int) -> None:
        """Record a request: how long it ran, prompt ids that were not cached, ids sampled."""
        decay = self._DECAY
        self._count = decay * self._count + 1
        self._seconds = decay * self._seconds + seconds
        self._computed_computed = decay * self._computed_computed + computed * computed
        self._computed_sampled = decay * self._computed_sampled + computed * sampled
        self._sampled_sampled = decay * self._sampled_sampled + sampled * sampled
        self._computed_seconds = decay * self._computed_seconds + computed * seconds
        self._sampled_seconds = decay * self._sampled_seconds + sampled * seconds

    @property
    def request_seconds(self) -> float:
        """Mean duration of a request; 0 before the first."""
        if not self._count:
            return 0.0
        return self._seconds / self._count

    def prefill_seconds(self, ids: int) -> float:
        """Return how long computing a prompt takes; 0 while the requests do not determine it."""
        diagonal = self._computed_computed * self._sampled_sampled
        determinant = diagonal - self._computed_sampled * self._computed_sampled
        if determinant <= 1e-9 * diagonal:  # all requests had the same ratio of prompt and output
            return 0.0
        numerator = (
            self._computed_seconds * self._sampled_sampled
            - self._sampled_seconds * self._computed_sampled
        )
        return ids * max(0.0, numerator / determinant)


class Balancer:
    """Sticky sessions over least-in-flight.

    A session stays on its server, which has the KV of its context; :meth:`acquire` moves it when
    that server is gone or full. :class:`~jax_agent_rl.rollout.request_queue.RequestQueue` asks for
    that when waiting costs more. Requests of older sessions go first: in order of arrival, the next
    turn of a trajectory that the learner waits for would queue behind first turns that nobody needs
    yet.

    A new session goes where the longest prefix of its prompt was computed lately, unless that
    server is clearly busier than the least busy one. This pays off where prompts share long
    prefixes, as the prompts of a group do.

    Args:
        max_sessions: sessions remembered; the least recently used is forgotten.
        max_in_flight: maximum requests per server; None: unlimited.
    """

    def __init__(self, max_sessions: int = 100_000, *, max_in_flight: int | None = None):
        self._max_in_flight = max_in_flight
        self._in_flight: dict[str, int] = {}
        self._added_at: dict[str, int] = {}
        # A heap of (in flight, added at, server). Most of its entries are outdated.
        self._load_heap: list[tuple[int, int, str]] = []
        self._sessions: OrderedDict[str, str] = OrderedDict()  # their servers
        self._ages: OrderedDict[str, int] = OrderedDict()  # arrivals of the sessions
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
        self._added_at[server] = next(self._arrivals)
        self._set_in_flight(server, 0)

    def remove(self, server: str) -> None:
        """Remove a server; its sessions move with their next request. Unknown names are ignored."""
        self._in_flight.pop(server, None)
        self._added_at.pop(server, None)
        self._prefixes.forget(server)
        moving = [session for session, home in self._sessions.items() if home == server]
        for session in moving:
            del self._sessions[session]

    def acquire(self, session: str | None = None, block_hashes: Sequence[int] = ()) -> str | None:
        """Choose a server and count the request there; None if no server has room.

        Args:
            block_hashes: hashes of the prompt, see :meth:`PrefixIndex.block_hashes`; empty where no
                KV would be found.
        """
        server = self.home(session)
        if server is None or not self.has_room(server):
            least_busy = self._least_busy()
            if least_busy is not None and not self.has_room(least_busy):
                least_busy = None
            server = self._with_prefix(block_hashes, least_busy) or least_busy
        if server is not None:
            self.assign(server, session, block_hashes)
        return server

    def _least_busy(self) -> str | None:
        """Return the server with the fewest requests, of several the one added first."""
        while self._load_heap:
            in_flight, added_at, server = self._load_heap[0]
            is_same_server = self._added_at.get(server) == added_at
            if is_same_server and self._in_flight[server] == in_flight:
                return server
            heapq.heappop(self._load_heap)
        return None

    def _set_in_flight(self, server: str, in_flight: int) -> None:
        """Record how many requests a server has."""
        self._in_flight[server] = in_flight
        if len(self._load_heap) <= 8 * len(self._in_flight):
            heapq.heappush(self._load_heap, (in_flight, self._added_at[server], server))
            return

        # Outdated entries would accumulate without limit.
        self._load_heap = [
            (self._in_flight[name], added_at, name) for name, added_at in self._added_at.items()
        ]
        heapq.heapify(self._load_heap)

    def _with_prefix(self, block_hashes: Sequence[int], least_busy: str | None) -> str | None:
        """Return the server with the longest prefix of a prompt, if it is worth an uneven load."""
        server, shared_ids = self._prefixes.find(block_hashes)
        if server is None or least_busy is None or not self.has_room(server):
            return None
        if shared_ids < max(MIN_SHARED_IDS, len(block_hashes) * BLOCK // 2):
            return None
        if self._in_flight[server] > self._in_flight[least_busy] * BUSY_RATIO + BUSY_MARGIN:
            return None
        return server

    def home(self, session: str | None) -> str | None:
        """Return the server of a session, None for a new one."""
        if session is None:
            return None
        return self._sessions.get(session)

    def has_room(self, server: str) -> bool:
        """Return whether the server may get another request."""
        return self._max_in_flight is None or self._in_flight[server] < self._max_in_flight

    def assign(
        self, server: str, session: str | None = None, block_hashes: Sequence[int] = ()
    ) -> None:
        """Count a request on this server, where its session and its prompt live from now on.

        Args:
            block_hashes: hashes of the prompt, see :meth:`PrefixIndex.block_hashes`.
        """
        self._prefixes.add(block_hashes, server)
        if session is not None:
            self._remember(self._sessions, session, server)
        self._set_in_flight(server, self._in_flight[server] + 1)

    def release(self, server: str) -> None:
        """Uncount a request that has left the server."""
        self._set_in_flight(server, self._in_flight[server] - 1)

    def priority(self, session: str | None = None) -> int:
        """Return the priority of a session's next request; lower runs first.

        A request without a session counts as a new one.
        """
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
        """Begin a session on the server of ``parent`` and with its age.

        Do nothing if ``parent`` is unknown.
        """
        server = self._sessions.get(parent)
        if server is not None:
            self._remember(self._sessions, child, server)
        age = self._ages.get(parent)
        if age is not None:
            self._remember(self._ages, child, age)

    def end_session(self, session: str) -> None:
        """Forget a session."""
        self._sessions.pop(session, None)
        self._ages.pop(session, None)

    def _remember(self, by_session: OrderedDict[str, Any], session: str, value: Any) -> None:
        by_session[session] = value
        by_session.move_to_end(session)
        if len(by_session) > self._max_sessions:
            by_session.popitem(last=False)
