"""Assignment of contexts to pages of the KV cache, with prefix sharing. No device, no threads.

A page holds the KV of ``size`` consecutive ids. Pages form a tree, because KV depends on all ids before it: contexts
with a common prefix share its pages::

    (system prompt, 1st part) ── (2nd part) ─┬─ (question a …  )─┬─ (answer 1 … )
                                             │                   └─ (answer 2 … )
                                             └─ (question b …  )

Full pages are shared; a page shared in part is copied for the second context. Contexts reference their pages while
their requests run. Unreferenced pages keep their KV for the next turn of a trajectory, or another sample of the same
prompt, until space is needed: leaves of the tree are evicted first, those of ended sessions before the least recently
used.

Page 0 is the null page, which fills page tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NULL_PAGE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Pages of an admitted request.

    Attributes:
        context: its number in the block manager.
        pages: pages of its prompt, in order.
        reused: ids whose KV they hold once page ``copy[0]`` is copied to ``copy[1]``.
        copy: source and target page, or None.
    """

    context: int
    pages: tuple[int, ...]
    reused: int
    copy: tuple[int, int] | None


@dataclass(eq=False, slots=True)
class _Page:
    number: int
    parent: _Page | None
    ids: list[int] = field(default_factory=list)
    children: list[_Page] = field(default_factory=list)
    ref_count: int = 0  # running contexts
    last_used: int = 0
    sessions: set[str] = field(default_factory=set)  # sessions between turns whose context includes this page

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Eviction order, least first."""
        return bool(self.sessions), self.last_used, self.number


@dataclass(eq=False, slots=True)
class _Context:
    pages: list[_Page]
    session: str | None
    count: int  # cached ids
    shareable: bool = True


class BlockManager:
    """Allocates pages 1 to ``pages`` of ``size`` positions each, at most ``max_context_pages`` per context.

    >>> blocks = BlockManager(pages=8, size=4, max_context_pages=8)
    >>> first = blocks.allocate([1, 2, 3, 4, 5, 6, 7], session=None)
    >>> first.pages, first.reused, first.copy
    ((1, 2), 0, None)
    >>> blocks.append(first.context, [1, 2, 3, 4, 5, 6])   # the first decode step feeds the last id of a prompt
    >>> blocks.allocate([1, 2, 3, 4, 5, 9], session=None)     # shares the full page, copies one id of the other
    Allocation(context=1, pages=(1, 3), reused=5, copy=(2, 3))
    """

    def __init__(self, pages: int, size: int, max_context_pages: int) -> None:
        self.size = size
        self._max_context_pages = max_context_pages
        self._total = pages
        self._free = list(range(pages, 0, -1))
        self._roots: dict[str | None, _Page] = {}  # a tree per adapter, and one for the base model
        self._pages: dict[int, _Page] = {}
        self._contexts: dict[int, _Context] = {}
        self._between_turns: dict[str, list[_Page]] = {}  # session: pages of its last context
        self._idle = 0  # cached pages without references
        self._leaves: list[tuple[bool, int, int]] = []  # heap of ranks of idle leaves; some are outdated
        self._clock = self._allocated = 0

    # --- contexts ---------------------------------------------------------------------------------------------

    def allocate(
        self, prompt: Sequence[int] | np.ndarray, session: str | None, adapter: str | None = None
    ) -> Allocation | None:
        """Allocate pages for a prompt and one more id; None while running contexts may need what is left.

        At most ``len(prompt) - 1`` ids are reused, as the first decode step feeds the last one. Only contexts of the
        same adapter share KV.
        """
        ids, root = np.asarray(prompt).tolist()[:-1], self._roots.setdefault(adapter, _Page(NULL_PAGE, None))
        shared, part, common = self._common_prefix(ids, root)
        if part is not None and common == len(part.ids) and not part.ref_count:
            shared, part, common = [*shared, part], None, 0  # append to it: nothing is lost
        own = len(ids) // self.size + 1 - len(shared)
        if part is not None and not self._has_space(own, keep=[*shared, part]):
            part, common = None, 0  # no space for the page and its copy
        if not self._has_space(own, keep=shared):
            return None
        self._forget_session(session)
        kept = [*shared, part] if part is not None else shared
        self._reference(kept)
        new = self._new_pages(shared[-1] if shared else root, own)
        if part is not None:
            new[0].ids = part.ids[:common]
            self._unreference([part])
        reused = sum(len(page.ids) for page in shared) + common
        context = self._allocated
        self._allocated += 1
        self._contexts[context] = _Context([*shared, *new], session, reused)
        copy = None if part is None else (part.number, new[0].number)
        return Allocation(context=context, pages=self.pages(context), reused=reused, copy=copy)

    def grow(self, context: int, count: int) -> bool:
        """Allocate pages for ``count`` more ids; False if there are too few."""
        grown = self._contexts[context]
        need = -(-(grown.count + count) // self.size) - len(grown.pages)
        if need > len(self._free) + self._idle:
            return False
        grown.pages += self._new_pages(grown.pages[-1], need)
        return True

    def append(self, context: int, ids: Sequence[int] | np.ndarray) -> None:
        """Record ids whose KV was written to the context's pages."""
        grown, ids = self._contexts[context], np.asarray(ids).tolist()
        while ids:
            page = grown.pages[grown.count // self.size]
            fitting = ids[: self.size - len(page.ids)]
            page.ids += fitting
            grown.count += len(fitting)
            ids = ids[len(fitting) :]

    def ids(self, context: int) -> np.ndarray:
        """Return the context's cached ids, int32."""
        held = self._contexts[context]
        return np.array([i for page in held.pages for i in page.ids][: held.count], np.int32)

    def pages(self, context: int) -> tuple[int, ...]:
        """Return the numbers of the context's pages, in order."""
        return tuple(page.number for page in self._contexts[context].pages)

    def free(self, context: int, *, session_ends: bool) -> None:
        """End or preempt a context; its KV stays cached for the next turn."""
        ended = self._contexts.pop(context)
        if not ended.shareable:
            for page in reversed(ended.pages):
                page.ref_count -= 1
                if not page.ref_count:
                    self._drop(page)
            return
        while not ended.pages[-1].ids:
            self._drop(ended.pages.pop())
            if not ended.pages:
                return
        self._clock += 1
        self._forget_session(ended.session)
        for page in ended.pages:
            page.last_used = self._clock
            if ended.session is not None and not session_ends:
                page.sessions.add(ended.session)
                self._between_turns[ended.session] = ended.pages
        self._unreference(ended.pages)

    def reset(self) -> None:
        """Drop all cached KV; running contexts keep theirs, but it is no longer shared (new weights)."""
        for context in self._contexts.values():
            context.shareable = False
        for page in [page for page in self._pages.values() if not page.ref_count]:
            del self._pages[page.number]
            self._free.append(page.number)
        self._roots.clear()
        self._between_turns.clear()
        self._leaves.clear()
        self._idle = 0

    @property
    def used_share(self) -> float:
        """Share of positions that hold KV, in [0, 1]."""
        return sum(len(page.ids) for page in self._pages.values()) / (self._total * self.size)

    # --- pages ------------------------------------------------------------------------------------------------

    def _common_prefix(self, ids: list[int], root: _Page) -> tuple[list[_Page], _Page | None, int]:
        """Return the full pages ``ids`` begin with, the next page if it matches in part, and how many of its ids match.

        Contexts computed concurrently may have several pages of the same ids; all of them are searched.
        """
        best, found = (0, False), root
        places = [(root, 0)]
        while places:
            parent, begin = places.pop()
            rest = ids[begin : begin + self.size]
            for page in parent.children:
                common = _common(page.ids, rest)
                if common == self.size:
                    places.append((page, begin + self.size))
                score = begin + common, common == len(page.ids) and not page.ref_count
                if common and score > best:
                    best, found = score, page
        common, full = best[0] % self.size, []
        part = found if common else None
        page = found.parent if common else found
        while page is not None and page is not root:
            full.append(page)
            page = page.parent
        return full[::-1], part, common

    def _has_space(self, count: int, *, keep: Iterable[_Page]) -> bool:
        """Whether ``count`` pages can be allocated besides those kept, and one more for each running context."""
        growing = sum(len(context.pages) < self._max_context_pages for context in self._contexts.values())
        spare = len(self._free) + self._idle - sum(not page.ref_count for page in keep)
        return count + growing <= spare

    def _new_pages(self, parent: _Page, count: int) -> list[_Page]:
        """Allocate consecutive pages after a referenced one."""
        new: list[_Page] = []
        for _ in range(count):
            if not self._free:
                self._evict()
            page = _Page(self._free.pop(), parent, ref_count=1)
            self._pages[page.number] = page
            parent.children.append(page)
            new.append(page)
            parent = page
        return new

    def _evict(self) -> None:
        while True:
            rank = heapq.heappop(self._leaves)
            page = self._pages.get(rank[-1])
            if page is not None and self._is_evictable(page) and page.rank == rank:
                break
        for session in page.sessions:  # this is the last of their pages
            self._between_turns[session].pop()
        self._idle -= 1
        parent = page.parent
        self._drop(page)
        self._offer_eviction(parent)

    def _drop(self, page: _Page) -> None:
        assert page.parent is not None  # not a root
        page.parent.children.remove(page)
        del self._pages[page.number]
        self._free.append(page.number)

    def _reference(self, pages: Iterable[_Page]) -> None:
        for page in pages:
            self._idle -= not page.ref_count
            page.ref_count += 1

    def _unreference(self, pages: Sequence[_Page]) -> None:
        for page in reversed(pages):
            page.ref_count -= 1
            self._idle += not page.ref_count
            self._offer_eviction(page)

    def _is_evictable(self, page: _Page) -> bool:
        return not page.ref_count and not page.children

    def _offer_eviction(self, page: _Page | None) -> None:
        """Make a page evictable if it is an unreferenced leaf."""
        if page is None or page.parent is None or not self._is_evictable(page):
            return
        heapq.heappush(self._leaves, page.rank)
        if len(self._leaves) > 4 * self._total:
            self._leaves = [page.rank for page in self._pages.values() if self._is_evictable(page)]
            heapq.heapify(self._leaves)

    def _forget_session(self, session: str | None) -> None:
        """Drop a session from those between two turns."""
        if session is not None:
            for page in self._between_turns.pop(session, ()):
                page.sessions.discard(session)
                self._offer_eviction(page)


def _common(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
