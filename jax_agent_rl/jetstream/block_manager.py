"""Which context's keys and values stand in which pages of the cache. A plain class: no device, no threads.

A page holds the KV of ``size`` consecutive ids. Pages form a tree: what stands in one depends on all ids before it, so
each has one page before it and any number behind it, and contexts that begin alike go through the same pages::

    (system prompt, 1st part) ── (2nd part) ─┬─ (question a …  )─┬─ (answer 1 … )
                                             │                   └─ (answer 2 … )
                                             └─ (question b …  )

Full pages are shared; of a page that two contexts share in part, the second one gets a copy. Contexts hold the pages
they go through while their requests run. Pages that nobody holds keep their KV for the next turn of a trajectory, or
another sample of the same prompt, until their room is needed: they are given up from the ends of the tree, those of
ended sessions first, then the least recently used.

Page 0 is nobody's: where a table of pages has no other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NULL_PAGE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """Where a request goes.

    Attributes:
        context: its number in the table.
        pages: those of its prompt, in order.
        reused: how many of its ids have their KV in them, after copying page ``copy[0]`` to ``copy[1]``, if not None.
    """

    context: int
    pages: tuple[int, ...]
    reused: int
    copy: tuple[int, int] | None


@dataclass(eq=False, slots=True)
class _Page:
    number: int
    before: _Page | None
    ids: list[int] = field(default_factory=list)
    behind: list[_Page] = field(default_factory=list)
    holders: int = 0  # contexts that run
    used: int = 0
    sessions: set[str] = field(default_factory=set)  # whose turn ended here or further on, and that will come back

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Pages of least rank are given up first."""
        return bool(self.sessions), self.used, self.number


@dataclass(eq=False, slots=True)
class _Context:
    pages: list[_Page]
    session: str | None
    count: int  # ids whose KV its pages hold
    shareable: bool = True


class BlockManager:
    """The bookkeeping of pages 1 to ``pages``, of ``size`` positions each; no context takes more than ``longest``.

    >>> table = PageTable(pages=8, size=4, longest=8)
    >>> first = table.place([1, 2, 3, 4, 5, 6, 7], session=None)
    >>> first.pages, first.reused, first.copy
    ((1, 2), 0, None)
    >>> table.append(first.context, [1, 2, 3, 4, 5, 6])   # the last id of a prompt is fed by the first decode step
    >>> table.place([1, 2, 3, 4, 5, 9], session=None)     # shares the full page, and copies one id of the other
    Placement(context=1, pages=(1, 3), reused=5, copy=(2, 3))
    """

    def __init__(self, pages: int, size: int, longest: int) -> None:
        self.size = size
        self._longest = longest
        self._total = pages
        self._free = list(range(pages, 0, -1))
        self._roots: dict[str | None, _Page] = {}  # KV of a tree is of one adapter, or of the plain model
        self._pages: dict[int, _Page] = {}
        self._contexts: dict[int, _Context] = {}
        self._between_turns: dict[str, list[_Page]] = {}  # sessions, and the pages they went through
        self._idle = 0  # pages that nobody holds
        self._ends: list[tuple[bool, int, int]] = []  # heap of ranks of idle pages with none behind; some are outdated
        self._clock = self._placed = 0

    # --- contexts ---------------------------------------------------------------------------------------------

    def place(
        self, prompt: Sequence[int] | np.ndarray, session: str | None, adapter: str | None = None
    ) -> Allocation | None:
        """Take pages for a prompt and one id behind it; None while those that run may need what is left.

        At most ``len(prompt) - 1`` ids are reused: the last one is what the first decode step feeds. KV is shared by
        contexts of the same adapter only.
        """
        ids, root = np.asarray(prompt).tolist()[:-1], self._roots.setdefault(adapter, _Page(NULL_PAGE, None))
        shared, part, common = self._common_prefix(ids, root)
        if part is not None and common == len(part.ids) and not part.holders:
            shared, part, common = [*shared, part], None, 0  # nothing of it is lost when this context goes on in it
        own = len(ids) // self.size + 1 - len(shared)
        if part is not None and not self._has_room(own, keep=[*shared, part]):
            part, common = None, 0  # for a page and its copy there may be no room
        if not self._has_room(own, keep=shared):
            return None
        self._forget_session(session)
        kept = [*shared, part] if part is not None else shared
        self._hold(kept)
        new = self._new(shared[-1] if shared else root, own)
        if part is not None:
            new[0].ids = part.ids[:common]
            self._let_go([part])
        reused = sum(len(page.ids) for page in shared) + common
        context = self._placed
        self._placed += 1
        self._contexts[context] = _Context([*shared, *new], session, reused)
        copy = None if part is None else (part.number, new[0].number)
        return Allocation(context=context, pages=self.pages(context), reused=reused, copy=copy)

    def grow(self, context: int, count: int) -> bool:
        """Takes what pages ``count`` more ids need; False if there are not so many."""
        grown = self._contexts[context]
        need = -(-(grown.count + count) // self.size) - len(grown.pages)
        if need > len(self._free) + self._idle:
            return False
        grown.pages += self._new(grown.pages[-1], need)
        return True

    def append(self, context: int, ids: Sequence[int] | np.ndarray) -> None:
        """The context's KV grew by these ids; it has the pages."""
        grown, ids = self._contexts[context], np.asarray(ids).tolist()
        while ids:
            page = grown.pages[grown.count // self.size]
            fitting = ids[: self.size - len(page.ids)]
            page.ids += fitting
            grown.count += len(fitting)
            ids = ids[len(fitting) :]

    def ids(self, context: int) -> np.ndarray:
        """int32: the ids whose KV the context's pages hold."""
        held = self._contexts[context]
        return np.array([i for page in held.pages for i in page.ids][: held.count], np.int32)

    def pages(self, context: int) -> tuple[int, ...]:
        """Numbers of the context's pages, in order."""
        return tuple(page.number for page in self._contexts[context].pages)

    def release(self, context: int, *, session_ends: bool) -> None:
        """The context's request is over (for now); its KV stays for the next turn."""
        ended = self._contexts.pop(context)
        if not ended.shareable:
            for page in reversed(ended.pages):
                page.holders -= 1
                if not page.holders:
                    self._drop(page)
            return
        while not ended.pages[-1].ids:
            self._drop(ended.pages.pop())
            if not ended.pages:
                return
        self._clock += 1
        self._forget_session(ended.session)
        for page in ended.pages:
            page.used = self._clock
            if ended.session is not None and not session_ends:
                page.sessions.add(ended.session)
                self._between_turns[ended.session] = ended.pages
        self._let_go(ended.pages)

    def reset(self) -> None:
        """Forgets all KV; contexts that run keep theirs, which is never shared again (new weights)."""
        for context in self._contexts.values():
            context.shareable = False
        for page in [page for page in self._pages.values() if not page.holders]:
            del self._pages[page.number]
            self._free.append(page.number)
        self._roots.clear()
        self._between_turns.clear()
        self._ends.clear()
        self._idle = 0

    @property
    def used_share(self) -> float:
        """Positions that hold KV, of running requests and for those to come, in [0, 1]."""
        return sum(len(page.ids) for page in self._pages.values()) / (self._total * self.size)

    # --- pages ------------------------------------------------------------------------------------------------

    def _common_prefix(self, ids: list[int], root: _Page) -> tuple[list[_Page], _Page | None, int]:
        """Full pages that ``ids`` begin with, the page behind them that goes on alike, and how far it does.

        Contexts that were computed side by side may have pages of the same ids: all of them are looked behind.
        """
        best, found = (0, False), root
        places = [(root, 0)]
        while places:
            before, begin = places.pop()
            rest = ids[begin : begin + self.size]
            for page in before.behind:
                common = _common(page.ids, rest)
                if common == self.size:
                    places.append((page, begin + self.size))
                score = begin + common, common == len(page.ids) and not page.holders
                if common and score > best:
                    best, found = score, page
        common, full = best[0] % self.size, []
        part = found if common else None
        page = found.before if common else found
        while page is not None and page is not root:
            full.append(page)
            page = page.before
        return full[::-1], part, common

    def _has_room(self, count: int, *, keep: Iterable[_Page]) -> bool:
        """Whether a context can take so many pages without those it keeps, and each that runs another one."""
        growing = sum(len(context.pages) < self._longest for context in self._contexts.values())
        spare = len(self._free) + self._idle - sum(not page.holders for page in keep)
        return count + growing <= spare

    def _new(self, before: _Page, count: int) -> list[_Page]:
        """Pages in a row behind one that is held."""
        new: list[_Page] = []
        for _ in range(count):
            if not self._free:
                self._give_one_up()
            page = _Page(self._free.pop(), before, holders=1)
            self._pages[page.number] = page
            before.behind.append(page)
            new.append(page)
            before = page
        return new

    def _give_one_up(self) -> None:
        while True:
            rank = heapq.heappop(self._ends)
            page = self._pages.get(rank[-1])
            if page is not None and self._is_end(page) and page.rank == rank:
                break
        for session in page.sessions:  # their pages end with this one
            self._between_turns[session].pop()
        self._idle -= 1
        before = page.before
        self._drop(page)
        self._offer(before)

    def _drop(self, page: _Page) -> None:
        assert page.before is not None  # roots are not dropped
        page.before.behind.remove(page)
        del self._pages[page.number]
        self._free.append(page.number)

    def _hold(self, pages: Iterable[_Page]) -> None:
        for page in pages:
            self._idle -= not page.holders
            page.holders += 1

    def _let_go(self, pages: Sequence[_Page]) -> None:
        for page in reversed(pages):
            page.holders -= 1
            self._idle += not page.holders
            self._offer(page)

    def _is_end(self, page: _Page) -> bool:
        return not page.holders and not page.behind

    def _offer(self, page: _Page | None) -> None:
        """Lets a page be given up, if it is an end that nobody holds."""
        if page is None or page.before is None or not self._is_end(page):
            return
        heapq.heappush(self._ends, page.rank)
        if len(self._ends) > 4 * self._total:
            self._ends = [page.rank for page in self._pages.values() if self._is_end(page)]
            heapq.heapify(self._ends)

    def _forget_session(self, session: str | None) -> None:
        """A session that was between two turns is not any more."""
        if session is not None:
            for page in self._between_turns.pop(session, ()):
                page.sessions.discard(session)
                self._offer(page)


def _common(a: list[int], b: list[int]) -> int:
    """How many leading items are equal."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
