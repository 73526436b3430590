"""KV in host memory: pages of waiting sessions that the device's cache has no room for, restored bit by bit.

::

    cache ──get_pages──► a few pages on the device ──copy in the background──► host pages
    cache ◄──put_pages── a few pages on the device ◄──copy────────────────────── host pages

A mesh's pages are copied from and to each device, in the cache's sharding. The number of pages that move together is
one of few, to which they are padded with the null page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.kv_cache import KVCache

if TYPE_CHECKING:
    from jax_agent_rl.jetstream.engine import JaxEngine

MOVED_TOGETHER = (4, 32)
"""Pages moved by a program."""


def get_pages(cache: KVCache, pages: jax.Array) -> KVCache:
    """Return copies of pages int32 [n]."""
    return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), cache)


def put_pages(cache: KVCache, content: KVCache, pages: jax.Array) -> KVCache:
    """Overwrite pages int32 [n], which are distinct except for page 0; that one is not written."""
    pages = jnp.where(pages == NULL_PAGE, cache.count, pages)
    return jax.tree.map(lambda x, new: x.at[pages].set(new, mode="drop", unique_indices=True), cache, content)


class HostCache:
    """Host pages of an engine, as many as fit in ``shapes.kv_offloading_bytes``.

    The memory is taken when pages are first written.

    Args:
        engine: moves the pages.
        cache: the engine's, for shapes.
    """

    def __init__(self, engine: JaxEngine, cache: KVCache) -> None:
        self.count = 0
        if engine.shapes.kv_offloading_bytes:
            page_bytes = sum(x.nbytes for x in jax.tree.leaves(cache)) // cache.count
            self.count = engine.shapes.kv_offloading_bytes // page_bytes
        self._engine = engine
        self._pages = jax.tree.map(self._empty, cache) if self.count else None
        self.saved = self.restored = 0  # pages so far
        self._arriving: list[tuple[list[int], KVCache]] = []

    def _empty(self, x: jax.Array) -> np.ndarray:
        return np.empty((self.count, *x.shape[1:]), x.dtype)

    def save(self, cache: KVCache, moves: list[tuple[int, int]]) -> None:
        """Make the moves in a list, of a page to a host page, and empty it; they end in the background."""
        if not moves:
            return
        self.settle()
        self.saved += len(moves)
        for i in range(0, len(moves), MOVED_TOGETHER[-1]):
            pages, host_pages = zip(*moves[i : i + MOVED_TOGETHER[-1]], strict=True)
            content = self._engine.get_pages(cache, pages)
            for array in jax.tree.leaves(content):
                array.copy_to_host_async()
            self._arriving.append((list(host_pages), content))
        moves.clear()

    def read(self, host_pages: Sequence[int]) -> KVCache:
        """Return the content of host pages."""
        self.settle()
        self.restored += len(host_pages)
        return jax.tree.map(lambda kept: kept[list(host_pages)], self._pages)

    def settle(self) -> None:
        """Wait for what the last :meth:`save` began."""
        for host_pages, content in self._arriving:

            def write(kept: np.ndarray, new: jax.Array, host_pages: list[int] = host_pages) -> None:
                kept[host_pages] = np.asarray(new)[: len(host_pages)]

            jax.tree.map(write, self._pages, content)
        self._arriving.clear()
