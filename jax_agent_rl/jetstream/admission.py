"""Copies and prefills by which waiting requests become running ones, and what they cost the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from jax_agent_rl.jetstream.block_manager import Allocation
from jax_agent_rl.jetstream.decode_batch import Extension
from jax_agent_rl.jetstream.engine import JaxEngine
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.kv_cache import KVCache
from jax_agent_rl.models.vision.context import MultimodalContext


class Patience:
    """How long the first request in the queue waits for pages that sessions will need again.

    Computing an id of a prompt stalls all running requests. So for the KV of a waiting session a slot may stay empty,
    and for that of the first request in the queue the others may go on, for as many seconds of a slot as that.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ids = self._seconds = 0.0  # of recent prefills
        self._first: tuple[Hashable, float] | None = None  # in the queue, and since when

    def add_prefill(self, ids: int, seconds: float) -> None:
        """Learn the speed of prefills; older ones count less."""
        self._ids, self._seconds = 0.9 * self._ids + ids, 0.9 * self._seconds + seconds

    def cost(self, first: Hashable, count: int, running: int) -> float:
        """Return what computing an id costs, in seconds of a slot; 0 if the first request has waited long enough.

        Args:
            first: the first request in the queue.
            count: ids of its context.
            running: requests that a prefill stalls.
        """
        if self._first is None or self._first[0] != first:
            self._first = first, self._clock()
        cost = running * self._seconds / self._ids if self._ids else 0.0
        return cost if self._clock() - self._first[1] < count * cost else 0.0


@dataclass
class AdmissionStage:
    """Operations of a stage, in order.

    Attributes:
        copies: source and target pages.
        restored: contents of host pages, and the pages they are written to.
        extensions: prefills, which run together.
    """

    copies: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[KVCache, list[int]]] = field(default_factory=list)
    extensions: list[Extension] = field(default_factory=list)


class AdmissionPlan:
    """Copies and prefills of one round of admissions, in stages whose prefills run together.

    Within a stage copies come first, in planned order, then pages from the host. A page is reused or copied in a stage
    after the one that fills it, and not written before the stage that copies from it.

    Args:
        size: positions of a page.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._stages: list[AdmissionStage] = []
        self._filled: dict[int, int] = {}  # page -> stage that writes it
        self._read: dict[int, int] = {}  # page -> last stage that copies from it

    def add(
        self,
        allocation: Allocation,
        new: np.ndarray,
        multimodal: MultimodalContext | None = None,
        adapter: int = 0,
        restored: KVCache | None = None,
    ) -> None:
        """Plan one admission: an optional copy, pages from the host, then a prefill.

        Args:
            allocation: the context's pages.
            new: int32, ids after those reused.
            multimodal: the whole context, if it has images.
            adapter: see :class:`Extension`.
            restored: content of ``allocation.restored``.
        """
        pages, first = allocation.pages, allocation.reused // self._size
        source = None if allocation.copy is None else allocation.copy[0]
        from_host = [page for _, page in allocation.restored]
        reused = pages[:first] if source is None else (*pages[:first], source)
        stage = max((self._filled.get(page, -1) + 1 for page in reused), default=0)
        stage = max([stage, *(self._read.get(page, 0) for page in (*from_host, *pages[first:]))])
        if source is not None:
            self._read[source] = max(stage, self._read.get(source, 0))
        self._filled |= dict.fromkeys((*from_host, *pages[first:]), stage)
        while len(self._stages) <= stage:
            self._stages.append(AdmissionStage())
        planned = self._stages[stage]
        if allocation.copy is not None:
            planned.copies.append(allocation.copy)
        if restored is not None:
            planned.restored.append((restored, from_host))
        planned.extensions.append(Extension(pages, allocation.reused, new, multimodal, adapter))

    def run(self, engine: JaxEngine, params: EngineParams, cache: KVCache) -> KVCache:
        """Run all stages on an engine; ``cache`` is donated."""
        for stage in self._stages:
            for source, target in stage.copies:
                cache = engine.copy_page(cache, source, target)
            for content, pages in stage.restored:
                cache = engine.put_pages(cache, content, pages)
            cache = engine.extend(params, cache, stage.extensions)
        return cache
