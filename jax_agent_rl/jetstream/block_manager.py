"""Assignment of contexts to pages of the KV cache, with prefix sharing. No device, no threads.

A page holds the KV of ``size`` consecutive ids. Pages form a tree, because KV depends on all ids
before it: contexts with a common prefix share its pages::

    (system prompt, 1st part) ── (2nd part) ─┬─ (question a …  )─┬─ (answer 1 … )
                                             │                   └─ (answer 2 … )
                                             └─ (question b …  )

Full pages are shared; a page shared in part is copied for the second context. Contexts reference
their pages while their requests run. Unreferenced pages keep their KV for the next turn of a
trajectory, or another sample of the same prompt, until space is needed. Leaves of the tree are
evicted first: those that no session waits for; then those with the least ids to compute again per
second of keeping, as far as return times of sessions are known; then the least recently used.

With host pages, pages of waiting sessions move to the host instead. On the device the tree then
ends where they begin, so they come back from the first to the last. Host pages are dropped in the
same order. Page 0 is the null page, which fills page tables.

A model with recurrent layers also has states (:mod:`~jax_agent_rl.jetstream.state_slots`). What is
reused then ends where pages *and* a checkpoint of the state end; ids between that checkpoint and
the end of the common prefix are computed again, into other pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_agent_rl.jetstream.state_slots import (
    NULL_STATE,
    StateAllocation,
    StateCheckpoint,
    StateSlots,
)
from jax_agent_rl.types.sequences import common_prefix_length

NULL_PAGE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Pages of an admitted request.

    Attributes:
        context: its number in the block manager.
        pages: pages of its prompt, in order.
        reused: ids whose KV they hold once page ``copy[0]`` is copied to ``copy[1]``.
        copy: source and target page, or None.
        restored: host pages, and the pages to which they are copied first.
        state: the context's recurrent state; None for models without.
        recomputed: ids with KV in the cache that have to be computed again, for want of a state.
    """

    context: int
    pages: tuple[int, ...]
    reused: int
    copy: tuple[int, int] | None
    restored: tuple[tuple[int, int], ...] = ()
    state: StateAllocation | None = None
    recomputed: int = 0


@dataclass(eq=False, slots=True)
class _Page:
    number: int  # on the host, of the host page
    parent: _Page | None
    on_host: bool = False
    ids: list[int] = field(default_factory=list)
    children: list[_Page] = field(default_factory=list)
    ref_count: int = 0  # running contexts
    last_used: int = 0
    # Sessions between turns whose context includes this page.
    sessions: set[str] = field(default_factory=set)
    # By how many of its ids were fed.
    checkpoints: dict[int, StateCheckpoint] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Context:
    pages: list[_Page]
    session: str | None
    count: int  # cached ids
    state: int | None  # its slot
    shareable: bool = True


class BlockManager:
    """Allocates pages 1 to ``pages`` of ``size`` positions each.

    A context has at most ``max_context_pages``. There are ``host_pages`` more on the host, from
    number 0 on. ``return_rate`` is :meth:`ReturnTimes.rate`; without it the least recently used
    pages go first. ``states`` are the slots of a model with recurrent layers. Their prefills leave
    a checkpoint at multiples of ``checkpoint_interval`` while slots are free.

    Its bookkeeping can be read: ``cached_pages`` by number, ``free_pages``, ``leaves`` (pages that
    can be evicted), ``idle_count`` (cached pages without references); on the host
    ``pages_on_host`` and ``free_host_pages``.

    >>> blocks = BlockManager(pages=8, size=4, max_context_pages=8)
    >>> first = blocks.allocate([1, 2, 3, 4, 5, 6, 7], session=None)
    >>> first.pages, first.reused, first.copy
    ((1, 2), 0, None)

    The first decode step feeds the last id of a prompt, so the other six are cached. Another prompt
    then shares the full page and copies one id of the second:

    >>> blocks.append(first.context, [1, 2, 3, 4, 5, 6])
    >>> blocks.allocate([1, 2, 3, 4, 5, 9], session=None)
    Allocation(context=1, pages=(1, 3), reused=5, copy=(2, 3))
    """

    def __init__(
        self,
        pages: int,
        size: int,
        max_context_pages: int,
        *,
        host_pages: int = 0,
        return_rate: Callable[[str], float] = lambda session: 0.0,
        states: StateSlots | None = None,
        checkpoint_interval: int = 2048,
    ) -> None:
        self.size = size
        self.states = states
        self._checkpoint_interval = checkpoint_interval
        # Pages to copy to host pages before anything is written.
        self.saved: list[tuple[int, int]] = []
        self._max_context_pages = max_context_pages
        self._total = pages
        self._return_rate = return_rate

        self.free_pages = list(range(pages, 0, -1))
        self._roots: dict[str | None, _Page] = {}  # a tree per adapter, and one for the base model
        self.cached_pages: dict[int, _Page] = {}
        self._contexts: dict[int, _Context] = {}
        self._between_turns: dict[str, list[_Page]] = {}  # session: pages of its last context
        self.idle_count = 0  # cached pages without references
        self.leaves: dict[int, _Page] = {}  # pages that can be evicted
        self.free_host_pages = list(range(host_pages))
        self.pages_on_host: dict[int, _Page] = {}
        self._clock = 0  # contexts that ended so far
        self._allocated = 0  # contexts so far

    # --- contexts ---------------------------------------------------------------------------------

    def allocate(
        self,
        prompt: Sequence[int] | np.ndarray,
        session: str | None,
        adapter: str | None = None,
        *,
        recompute_cost: float = 0.0,
    ) -> Allocation | None:
        """Allocate pages for a prompt and one more id; None while others need them more.

        Running contexts may need what is left. At most ``len(prompt) - 1`` ids are reused, as the
        first decode step feeds the last one. Only contexts of the same adapter share KV.

        Args:
            prompt: ids, or keys of a prompt with images.
            session: whose turn it is; None for a request without a session.
            adapter: name of the LoRA adapter; None for the base model.
            recompute_cost: what computing an id again costs all slots, in seconds of one. A waiting
                session's pages are not taken if that is more than a slot until it returns, unless
                the request's own session is in the cache. 0 takes any.
        """
        if self.states is not None and not self.states.has_room:
            return None
        ids = np.asarray(prompt).tolist()[:-1]
        root = self._roots.setdefault(adapter, _Page(NULL_PAGE, None))
        shared, partial, common, num_cached = self._common_prefix(ids, root)
        if partial is not None and common == len(partial.ids) and not partial.ref_count:
            # Nobody uses this page, and all of it matches: append to it instead of copying it.
            shared = [*shared, partial]
            partial = None
            common = 0

        num_new = len(ids) // self.size + 1 - len(shared)
        returning = [page for page in shared if page.on_host]
        num_needed = num_new + len(returning)

        protected: set[_Page] = set()
        is_scarce = num_needed + self._growing > len(self.free_pages)
        if is_scarce and not self.holds_most(session, len(ids)):
            protected = self._protected_pages(recompute_cost)

        # Without space for the partly matching page and its copy, compute its ids again.
        if partial is not None and (
            partial.on_host or not self._has_space(num_needed, {*shared, partial, *protected})
        ):
            partial = None
            common = 0
            shared = self._until_checkpoint(shared)
            num_new = len(ids) // self.size + 1 - len(shared)
            returning = [page for page in shared if page.on_host]
            num_needed = num_new + len(returning)
        if not self._has_space(num_needed, {*shared, *protected}):
            return None

        # Reference what is reused, so that it is not evicted to make space for the new pages.
        reused_pages = [*shared, partial] if partial is not None else shared
        self._reference(reused_pages)
        self._forget_session(session)
        self._reclaim(num_needed)
        checkpoint = self._checkpoint_of(shared, partial, common)
        restored = tuple(self._restore(page) for page in returning)
        new_pages = self._new_pages(shared[-1] if shared else root, num_new)

        copy = None
        if partial is not None:
            new_pages[0].ids = partial.ids[:common]
            self._unreference([partial])
            copy = (partial.number, new_pages[0].number)

        reused = sum(len(page.ids) for page in shared) + common
        context = self._allocated
        self._allocated += 1
        pages = [*shared, *new_pages]
        state = None
        recomputed = 0
        if self.states is not None:
            recomputed = num_cached - reused
            state = self._allocate_state(
                checkpoint, pages, self._checkpoint_positions(reused, num_cached, len(ids))
            )
        slot = None if state is None else state.slot
        self._contexts[context] = _Context(pages, session, reused, slot)
        return Allocation(
            context=context,
            pages=self.pages(context),
            reused=reused,
            copy=copy,
            restored=restored,
            state=state,
            recomputed=recomputed,
        )

    def holds_most(self, session: str | None, count: int) -> bool:
        """Whether the cache holds most of the ``count`` ids of a session's next context."""
        if session is None:
            return False
        pages = self._between_turns.get(session, ())
        num_cached = sum(len(page.ids) for page in pages if not page.on_host)
        return 2 * num_cached > count

    def grow(self, context: int, count: int) -> bool:
        """Allocate pages for ``count`` more ids; False if there are too few."""
        growing = self._contexts[context]
        total = -(-(growing.count + count) // self.size)
        num_new = total - len(growing.pages)
        if num_new > len(self.free_pages) + self.idle_count:
            return False
        self._reclaim(num_new)
        growing.pages += self._new_pages(growing.pages[-1], num_new)
        return True

    def append(self, context: int, ids: Sequence[int] | np.ndarray) -> None:
        """Record ids whose KV was written to the context's pages."""
        growing = self._contexts[context]
        remaining = np.asarray(ids).tolist()
        while remaining:
            page = growing.pages[growing.count // self.size]
            fitting = remaining[: self.size - len(page.ids)]
            page.ids += fitting
            growing.count += len(fitting)
            remaining = remaining[len(fitting) :]

    def ids(self, context: int) -> np.ndarray:
        """Return the context's cached ids, int32."""
        cached = self._contexts[context]
        ids: list[int] = []
        for page in cached.pages:
            ids += page.ids
        return np.array(ids[: cached.count], np.int32)

    def count(self, context: int) -> int:
        """Return how many ids of the context are cached."""
        return self._contexts[context].count

    def pages(self, context: int) -> tuple[int, ...]:
        """Return the numbers of the context's pages, in order."""
        return tuple(page.number for page in self._contexts[context].pages)

    def state(self, context: int) -> int:
        """Return the slot of the context's recurrent state, the null slot for models without."""
        slot = self._contexts[context].state
        return NULL_STATE if slot is None else slot

    def free(self, context: int, *, session_ends: bool, state_is_current: bool = True) -> None:
        """End or preempt a context; its KV stays cached for the next turn.

        Args:
            state_is_current: whether its state is of exactly its cached ids, and not of more.
        """
        ended = self._contexts.pop(context)
        if not ended.shareable:
            self._end_state(ended, is_usable=False)
            for page in reversed(ended.pages):
                page.ref_count -= 1
                if not page.ref_count:
                    self._drop(page)
            return

        # Pages that were allocated ahead hold nothing.
        while ended.pages and not ended.pages[-1].ids:
            self._drop(ended.pages.pop())
        self._end_state(ended, is_usable=state_is_current and bool(ended.pages))
        if not ended.pages:
            return

        self._clock += 1
        self._forget_session(ended.session)
        for page in ended.pages:
            page.last_used = self._clock
        if ended.session is not None and not session_ends:
            for page in ended.pages:
                page.sessions.add(ended.session)
            self._between_turns[ended.session] = ended.pages
        self._unreference(ended.pages)

    def reset(self) -> None:
        """Drop all cached KV, as the weights are new.

        Running contexts keep theirs, but it is no longer shared.
        """
        for context in self._contexts.values():
            context.shareable = False
        for page in [*self.cached_pages.values(), *self.pages_on_host.values()]:
            page.sessions.clear()

        # Dropping a page drops the host pages that continue it, so each turn takes what is left.
        while self.pages_on_host:
            self._drop(next(iter(self.pages_on_host.values())))
        unused = [page for page in self.cached_pages.values() if not page.ref_count]
        for page in unused:
            self._drop(page)

        if self.states is not None:
            self.states.reset()
        self._roots.clear()
        self._between_turns.clear()
        self.leaves.clear()
        self.saved.clear()
        self.idle_count = 0

    @property
    def used_share(self) -> float:
        """Share of positions that hold KV, in [0, 1]."""
        used = sum(len(page.ids) for page in self.cached_pages.values())
        return used / (self._total * self.size)

    # --- pages ------------------------------------------------------------------------------------

    def _common_prefix(
        self, ids: list[int], root: _Page
    ) -> tuple[list[_Page], _Page | None, int, int]:
        """Find the prefix of ``ids`` that can be reused.

        Contexts computed concurrently may have several pages of the same ids; all of them are
        searched.

        Returns:
            The full pages ``ids`` begin with, the next page if it matches in part, how many of its
            ids match, and how many ids have KV in the cache. With states the first three end at
            a checkpoint.
        """
        # Most reusable ids first; among equals a page that can be appended to.
        best_score = (0, False)
        best_page = root
        num_cached = 0
        matching = [(root, 0)]  # full pages that match, and how many ids they end
        while matching:
            parent, begin = matching.pop()
            next_ids = ids[begin : begin + self.size]
            for page in parent.children:
                if page.ids[:1] != next_ids[:1]:  # most of many children differ at once
                    continue
                common = common_prefix_length(page.ids, next_ids)
                if not common:
                    continue
                if common == self.size:
                    matching.append((page, begin + self.size))
                num_cached = max(num_cached, begin + common)
                reusable = self._reusable(page, common)
                if not reusable:
                    continue
                can_append = reusable == len(page.ids) and not page.ref_count
                score = (begin + reusable, can_append)
                if score > best_score:
                    best_score = score
                    best_page = page

        common = best_score[0] % self.size
        if common:
            partial = best_page
            page = best_page.parent
        else:
            partial = None
            page = best_page

        full = []
        while page is not None and page is not root:
            full.append(page)
            page = page.parent
        return full[::-1], partial, common, num_cached

    def _reusable(self, page: _Page, common: int) -> int:
        """Return how many of the ``common`` ids of a page can be reused: up to a checkpoint."""
        if self.states is None:
            return common
        return max((offset for offset in page.checkpoints if offset <= common), default=0)

    def _has_space(self, count: int, excluded: set[_Page]) -> bool:
        """Whether ``count`` pages can be allocated, and one more for each running context.

        Args:
            count: pages needed.
            excluded: pages that must not be evicted for them.
        """
        available = len(self.free_pages) + self.idle_count
        for page in excluded:
            if not page.ref_count and not page.on_host:  # it is one of the idle ones
                available -= 1
        return count + self._growing <= available

    @property
    def _growing(self) -> int:
        """Running contexts that may need another page."""
        count = 0
        for context in self._contexts.values():
            if len(context.pages) < self._max_context_pages:
                count += 1
        return count

    def _protected_pages(self, recompute_cost: float) -> set[_Page]:
        """Return the pages of waiting sessions that are worth a slot until these return."""
        protected: set[_Page] = set()
        if not recompute_cost or self.free_host_pages:  # they would move to the host
            return protected
        for session, pages in self._between_turns.items():
            # What only this session waits for.
            num_exclusive = 0
            for page in pages:
                if len(page.sessions) == 1:
                    num_exclusive += 1
            seconds = self.size * num_exclusive * recompute_cost
            if seconds * self._return_rate(session) > 1:
                protected.update(pages)
        return protected

    def _new_pages(self, parent: _Page, count: int) -> list[_Page]:
        """Allocate consecutive free pages after a referenced one."""
        new_pages: list[_Page] = []
        for _ in range(count):
            page = _Page(self.free_pages.pop(), parent, ref_count=1)
            self.cached_pages[page.number] = page
            parent.children.append(page)
            new_pages.append(page)
            parent = page
        return new_pages

    def _reference(self, pages: Iterable[_Page]) -> None:
        for page in pages:
            if not (page.ref_count or page.on_host):
                self.idle_count -= 1
                self.leaves.pop(page.number, None)
            page.ref_count += 1

    def _unreference(self, pages: Sequence[_Page]) -> None:
        for page in reversed(pages):
            page.ref_count -= 1
            if not page.ref_count:
                self.idle_count += 1
            self._offer_eviction(page)

    def _forget_session(self, session: str | None) -> None:
        """End a session's wait, and drop the host pages that were held for it alone."""
        if session is None:
            return
        for page in reversed(self._between_turns.pop(session, ())):
            page.sessions.discard(session)
            if page.on_host and not (page.sessions or page.ref_count or page.children):
                self._drop(page)

    # --- states -----------------------------------------------------------------------------------

    def _until_checkpoint(self, shared: list[_Page]) -> list[_Page]:
        """Return as many of the full pages as end at a checkpoint; all of them without states."""
        count = len(shared)
        if self.states is not None:
            while count and self.size not in shared[count - 1].checkpoints:
                count -= 1
        return shared[:count]

    def _checkpoint_of(
        self, shared: list[_Page], partial: _Page | None, common: int
    ) -> StateCheckpoint | None:
        """Return the checkpoint that a context begins with; None if it begins with zeros."""
        if self.states is None:
            return None
        if partial is not None:
            return partial.checkpoints[common]
        if shared:
            last = shared[-1]
            return last.checkpoints[len(last.ids)]
        return None

    def _checkpoint_positions(self, reused: int, num_cached: int, end: int) -> dict[int, bool]:
        """Return where the prefill of a context should leave checkpoints, the most useful first.

        Each position comes with whether another checkpoint may give way for it.

        Args:
            reused: where the prefill begins.
            num_cached: where it leaves what is cached: a fork, to which others may come.
            end: where the prefill ends, which is where other samples of the prompt begin.
        """
        positions: dict[int, bool] = {}
        for position in (end, num_cached):
            if position > reused:
                positions[position] = True
        interval = self._checkpoint_interval
        for position in range(reused // interval * interval + interval, end, interval):
            positions.setdefault(position, False)
        return positions

    def _allocate_state(
        self, checkpoint: StateCheckpoint | None, pages: Sequence[_Page], positions: dict[int, bool]
    ) -> StateAllocation:
        """Allocate a context's slot, and slots of the checkpoints that its prefill leaves."""
        assert self.states is not None
        source: int | None = NULL_STATE
        host_source = None
        if checkpoint is not None:
            self.states.use(checkpoint)
            if checkpoint.on_host:
                source = None
                host_source = checkpoint.slot
            else:
                source = checkpoint.slot
        slot = self.states.start()

        planned = []
        for position, evict in positions.items():
            number = (position - 1) // self.size
            offset = position - number * self.size
            checkpoint_slot = self.states.plan(pages[number], offset, evict=evict)
            if checkpoint_slot is not None:
                planned.append((position, checkpoint_slot))
        planned.sort()
        return StateAllocation(
            slot=slot, source=source, host_source=host_source, checkpoints=tuple(planned)
        )

    def _end_state(self, context: _Context, *, is_usable: bool) -> None:
        """Make the state of a context that ends the checkpoint after its last id, or free it."""
        if self.states is None or context.state is None:
            return
        if is_usable:
            last = context.pages[-1]
            self.states.keep(context.state, last, len(last.ids))
        else:
            self.states.release(context.state)

    # --- eviction ---------------------------------------------------------------------------------

    def _reclaim(self, count: int) -> None:
        """Evict pages until ``count`` are free."""
        if count <= len(self.free_pages):
            return
        queue = [(self._rank(page), page.number) for page in self.leaves.values()]
        heapq.heapify(queue)
        while len(self.free_pages) < count:
            _, number = heapq.heappop(queue)
            page = self.leaves.pop(number)
            parent = page.parent
            self.idle_count -= 1
            self._evict(page)
            # Without its last child a page is a leaf itself.
            if parent is not None and self._offer_eviction(parent):
                heapq.heappush(queue, (self._rank(parent), parent.number))

    def _rank(self, page: _Page) -> tuple[bool, float, int]:
        """Return what orders pages by their value: the least is evicted first."""
        returns_per_second = sum(map(self._return_rate, page.sessions))
        return bool(page.sessions), returns_per_second * len(page.ids), page.last_used

    def _offer_eviction(self, page: _Page) -> bool:
        """Make a page evictable if it is an unreferenced leaf of the tree on the device."""
        if page.parent is None or page.ref_count:
            return False
        if not all(child.on_host for child in page.children):
            return False
        self.leaves[page.number] = page
        return True

    def _evict(self, page: _Page) -> None:
        """Move an idle page to the host if a session waits for it and there is room, or drop it."""
        if not page.sessions or not self._make_host_room(self._rank(page)):
            self._drop(page)
            return
        host_number = self.free_host_pages.pop()
        self.saved.append((page.number, host_number))
        del self.cached_pages[page.number]
        self.free_pages.append(page.number)
        page.number = host_number
        page.on_host = True
        self.pages_on_host[host_number] = page

    def _make_host_room(self, rank: tuple[bool, float, int]) -> bool:
        """Free a host page of no higher rank; False if there is none."""
        if not self.free_host_pages:
            leaves = []
            for page in self.pages_on_host.values():
                if not page.children and not page.ref_count:
                    leaves.append(page)
            lowest = min(leaves, key=self._rank, default=None)
            if lowest is not None and self._rank(lowest) <= rank:
                self._drop(lowest)
        return bool(self.free_host_pages)

    def _restore(self, page: _Page) -> tuple[int, int]:
        """Move a referenced page to a free one of the device; return both numbers."""
        host_number = page.number
        page.number = self.free_pages.pop()
        page.on_host = False
        self.cached_pages[page.number] = page
        del self.pages_on_host[host_number]
        self.free_host_pages.append(host_number)
        return host_number, page.number

    def _drop(self, page: _Page) -> None:
        """Free an unreferenced page and those on the host that continue it."""
        on_host = [child for child in page.children if child.on_host]
        for child in on_host:
            self._drop(child)
        for session in page.sessions:  # this is the last of their pages
            self._between_turns[session].pop()
        if self.states is not None:
            for checkpoint in list(page.checkpoints.values()):
                self.states.drop(checkpoint)

        assert page.parent is not None  # not a root
        page.parent.children.remove(page)
        if page.on_host:
            del self.pages_on_host[page.number]
            self.free_host_pages.append(page.number)
        else:
            del self.cached_pages[page.number]
            self.free_pages.append(page.number)
