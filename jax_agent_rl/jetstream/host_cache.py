"""Host memory for what the KV cache has no room for: pages and states of waiting sessions.

They are restored bit by bit::

    cache ──get_pages──► a few pages on the device ──copy in the background──► host pages
    cache ◄─write_pages─ a few pages on the device ◄──copy────────────────────── host pages

A mesh's pages are copied from and to each device, in the cache's sharding. The number of pages that
move together is one of few, to which they are padded with the null page. Recurrent states move one
by one: each is as large as many pages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.kv_cache import MOVED_TOGETHER, KVCache
from jax_agent_rl.jetstream.recurrent_states import States


class HostCache:
    """Host pages and slots of an engine, as many as fit in ``shapes.kv_offloading_bytes``.

    With recurrent states, there is a slot for the pages of half of the longest context. The memory
    is taken when they are first written.

    Args:
        cache: the engine's cache; only its shapes are read.

    Attributes:
        count: number of pages.
        pages: their content; None without any.
        num_states: number of slots.
        states: their content; empty without any.
        arriving: pages that are being copied to the host.
        arriving_states: states that are being copied to the host.
    """

    def __init__(self, engine: JaxEngine, cache: KVCache) -> None:
        self.count = 0
        self.num_states = 0
        num_bytes = engine.shapes.kv_offloading_bytes
        if num_bytes:
            page_bytes = sum(x.nbytes for x in jax.tree.leaves(cache.pages)) // cache.count
            if cache.states:
                state_bytes = sum(x.nbytes // len(x) for x in jax.tree.leaves(cache.states))
                context_bytes = page_bytes * engine.shapes.context_pages // 2
                self.num_states = num_bytes // (context_bytes + state_bytes)
                num_bytes -= self.num_states * state_bytes
            self.count = num_bytes // page_bytes

        self._engine = engine
        self.pages = None
        if self.count:
            self.pages = jax.tree.map(functools.partial(_empty, self.count), cache.pages)
        self.states: States = ()
        if self.num_states:
            self.states = jax.tree.map(functools.partial(_empty, self.num_states), cache.states)
        # Pages so far.
        self.saved = 0
        self.restored = 0
        self.arriving: list[tuple[list[int], KVCache]] = []
        self.arriving_states: list[tuple[int, States]] = []

    def save(self, cache: KVCache, moves: list[tuple[int, int]]) -> None:
        """Copy pages to host pages, in the background.

        Args:
            cache: the cache of the engine.
            moves: pairs of a page and its host page; emptied.
        """
        if not moves:
            return
        self.settle()
        self.saved += len(moves)
        for i in range(0, len(moves), MOVED_TOGETHER[-1]):
            batch = moves[i : i + MOVED_TOGETHER[-1]]
            pages = [page for page, _ in batch]
            host_pages = [host_page for _, host_page in batch]
            content = self._engine.get_pages(cache, pages)
            _start_copying(content)
            self.arriving.append((host_pages, content))
        moves.clear()

    def save_states(self, cache: KVCache, moves: list[tuple[int, int]]) -> None:
        """Copy states to host slots, in the background.

        Args:
            cache: the cache of the engine.
            moves: pairs of a slot and its host slot; emptied.
        """
        if not moves:
            return
        self.settle()
        for slot, host_slot in moves:
            content = self._engine.get_state(cache, slot)
            _start_copying(content)
            self.arriving_states.append((host_slot, content))
        moves.clear()

    def read_state(self, host_slot: int) -> States:
        """Return the content of a host slot, as one row."""
        self.settle()
        return jax.tree.map(lambda states: states[[host_slot]], self.states)

    def read(self, host_pages: Sequence[int]) -> KVCache:
        """Return the content of host pages."""
        self.settle()
        self.restored += len(host_pages)
        index = list(host_pages)
        return jax.tree.map(lambda pages: pages[index], self.pages)

    def settle(self) -> None:
        """Wait for what the last :meth:`save` and :meth:`save_states` began."""
        for host_pages, content in self.arriving:
            _store(self.pages, host_pages, content)
        self.arriving.clear()

        for host_slot, content in self.arriving_states:
            _store(self.states, [host_slot], content)
        self.arriving_states.clear()


def _empty(count: int, x: jax.Array) -> np.ndarray:
    """Return memory for ``count`` pages or states such as ``x`` has."""
    return np.empty((count, *x.shape[1:]), x.dtype)


def _start_copying(content: Any) -> None:
    """Begin to copy arrays to the host."""
    for array in jax.tree.leaves(content):
        array.copy_to_host_async()


def _store(host: Any, indices: list[int], content: Any) -> None:
    """Wait for ``content``, and write it to the host's arrays; its padding comes last."""
    for array, arrived in zip(jax.tree.leaves(host), jax.tree.leaves(content), strict=True):
        array[indices] = np.asarray(arrived)[: len(indices)]
