"""Host memory for pages of waiting sessions that the KV cache has no room for.

Pages are restored bit by bit::

    cache ──get_pages──► a few pages on the device ──copy in the background──► host pages
    cache ◄─write_pages─ a few pages on the device ◄──copy────────────────────── host pages

A mesh's pages are copied from and to each device, in the cache's sharding. The number of pages that
move together is one of few, to which they are padded with the null page.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.kv_cache import MOVED_TOGETHER, KVCache


class HostCache:
    """Host pages of an engine, as many as fit in ``shapes.kv_offloading_bytes``.

    The memory is taken when pages are first written.

    Args:
        cache: the engine's cache; only its shapes are read.

    Attributes:
        count: number of pages.
        pages: their content; None without any.
        arriving: pages that are being copied to the host.
    """

    def __init__(self, engine: JaxEngine, cache: KVCache) -> None:
        self.count = 0
        if engine.shapes.kv_offloading_bytes:
            page_bytes = sum(x.nbytes for x in jax.tree.leaves(cache)) // cache.count
            self.count = engine.shapes.kv_offloading_bytes // page_bytes
        self._engine = engine
        self.pages = jax.tree.map(self._empty, cache) if self.count else None
        # Pages so far.
        self.saved = 0
        self.restored = 0
        self.arriving: list[tuple[list[int], KVCache]] = []

    def _empty(self, x: jax.Array) -> np.ndarray:
        return np.empty((self.count, *x.shape[1:]), x.dtype)

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
            for array in jax.tree.leaves(content):
                array.copy_to_host_async()
            self.arriving.append((host_pages, content))
        moves.clear()

    def read(self, host_pages: Sequence[int]) -> KVCache:
        """Return the content of host pages."""
        self.settle()
        self.restored += len(host_pages)
        index = list(host_pages)
        return jax.tree.map(lambda pages: pages[index], self.pages)

    def settle(self) -> None:
        """Wait for what the last :meth:`save` began."""
        for host_pages, content in self.arriving:
            pages = jax.tree.leaves(self.pages)
            for array, arrived in zip(pages, jax.tree.leaves(content), strict=True):
                # Padding comes last.
                array[host_pages] = np.asarray(arrived)[: len(host_pages)]
        self.arriving.clear()
