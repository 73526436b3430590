"""Which server has lately computed the beginning of a prompt: hashes of blocks of ids, chained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK = 64
"""Ids of a block; a shorter rest does not count."""


class PrefixIndex:
    """From chains of blocks to the server that ran them last.

    What an engine still holds is its own affair: this is a guess, which costs a computed prompt when it is wrong.

    Args:
        max_blocks: blocks remembered (about 200 bytes each); beyond it the one used longest ago is forgotten.
    """

    def __init__(self, max_blocks: int = 100_000):
        self._servers: OrderedDict[int, str] = OrderedDict()
        self._max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._servers)

    @staticmethod
    def chain(ids: Sequence[int], kind: Hashable = None) -> list[int]:
        """A key per whole block, which stands for all ids up to its end; O(ids).

        Args:
            kind: what else the KV of these ids depends on, such as an adapter.
        """
        keys, key = [], hash(kind)
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            key = hash((key, tuple(ids[end - BLOCK : end])))
            keys.append(key)
        return keys

    def find(self, chain: Sequence[int]) -> tuple[str | None, int]:
        """The server that ran the longest beginning of this, and its length in ids."""
        server, shared = None, 0
        for number, key in enumerate(chain, 1):
            known = self._servers.get(key)
            if known is None:
                break
            server, shared = known, number * BLOCK
        return server, shared

    def add(self, chain: Sequence[int], server: str) -> None:
        """The server runs it now."""
        for key in reversed(chain):  # so that ends are forgotten before what they begin with
            self._servers[key] = server
            self._servers.move_to_end(key)
        while len(self._servers) > self._max_blocks:
            self._servers.popitem(last=False)

    def forget(self, server: str) -> None:
        """A server is gone, and its KV with it."""
        for key in [key for key, where in self._servers.items() if where == server]:
            del self._servers[key]

    def clear(self) -> None:
        """All KV is gone: there are new weights."""
        self._servers.clear()
