"""Prefill of ids into pages of the cache: in chunks, or with CPU kernels in columns.

A chunk holds many ids of a context, padded to one of a few lengths; the context's cached pages are
gathered, and the chunk's pages written back. With CPU kernels a prefill is a decode step with a
column for each id: a tool's result of a few ids costs a few columns, where a chunk would be padded,
and long prompts take no longer than with XLA's products.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jax_agent_rl.jetstream import programs, recurrent_states
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.context import EngineContext, WarmUp
from jax_agent_rl.jetstream.decode_batch import (
    PREFILL_ROWS,
    DecodeBatch,
    Extension,
    batches_of,
    columns_of,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.images import ImageEncoder
from jax_agent_rl.jetstream.kv_cache import KVCache, count_pages
from jax_agent_rl.jetstream.shapes import bucket
from jax_agent_rl.jetstream.state_slots import NULL_STATE

COLUMNS = (16, 32, 64)
"""Columns of the programs that prefill. More are not faster."""


class ChunkPrefill:
    """Prefills in as many bucketed chunks as it takes; chunks of a size run together.

    Args:
        images: encodes the images of prompts; None for an engine without.
    """

    def __init__(self, context: EngineContext, images: ImageEncoder | None) -> None:
        self._context = context
        self._images = images

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Prefill ids into pages, each context's in order; ``cache`` is donated."""
        if self._images is None:
            return self._extend(params, cache, extensions)
        with self._images.encoding(params, extensions):
            return self._extend(params, cache, extensions)

    def _extend(
        self, params: EngineParams, cache: KVCache, waiting: Sequence[Extension]
    ) -> KVCache:
        while waiting:
            by_size: dict[int, list[Extension]] = {}
            for extension in waiting:
                size = bucket(self._context.shapes.chunk_buckets, len(extension.ids))
                by_size.setdefault(size, []).append(extension)

            remaining = []
            for size, extensions in by_size.items():
                # Similar spans run together.
                extensions.sort(key=lambda extension: extension.start)
                for batch in batches_of(extensions):
                    cache = self._prefill(params, cache, batch, size)
                for extension in extensions:
                    following = extension.after(size)
                    if len(following.ids):
                        remaining.append(following)
            waiting = remaining
        return cache

    def _prefill(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension], size: int
    ) -> KVCache:
        """Prefill one chunk of up to ``size`` ids for each of up to PREFILL_ROWS contexts."""
        context = self._context
        page = context.shapes.page
        rows = 1 if len(extensions) == 1 else PREFILL_ROWS
        span = bucket(context.shapes.prefill_spans, max(e.start for e in extensions))
        tokens = np.zeros((rows, size), np.int32)
        starts = np.zeros(rows, np.int32)
        context_pages = np.full((rows, span // page), NULL_PAGE, np.int32)
        chunk_pages = np.full((rows, count_pages(size, page)), NULL_PAGE, np.int32)
        for row, extension in enumerate(extensions):
            chunk = extension.ids[:size]
            tokens[row, : len(chunk)] = chunk
            starts[row] = extension.start
            _fill_row(context_pages[row], extension.pages)
            _fill_row(chunk_pages[row], extension.pages[extension.start // page :])

        states = None
        lengths = None
        if context.has_states:
            states = np.full(rows, NULL_STATE, np.int32)
            lengths = np.zeros(rows, np.int32)
            states[: len(extensions)] = [extension.state for extension in extensions]
            lengths[: len(extensions)] = [len(extension.ids[:size]) for extension in extensions]

        images = None
        if self._images is not None:
            images = self._images.inputs(extensions, rows, size)
        stacks = context.adapters.stacks
        adapter = None
        if stacks is not None:
            adapter = np.zeros(rows, np.int32)
            adapter[: len(extensions)] = [extension.adapter for extension in extensions]

        chunks = context.call(
            ("chunks", cache.count, rows, size, span),
            functools.partial(programs.compute_chunks, context.config, context.split),
            (),
            *(params, cache, tokens, starts, context_pages, chunk_pages, images),
            *(stacks, adapter, states, lengths),
            out=context.cache_sharding,
        )
        return write_chunks(context, cache, chunks, chunk_pages, states, size)

    def _program_shapes(self) -> list[tuple[int, int, int]]:
        """Return the shapes of the programs: (rows, ids, positions)."""
        shapes = self._context.shapes
        rows = (1, PREFILL_ROWS)
        return list(itertools.product(rows, shapes.chunk_buckets, shapes.prefill_spans))

    def program_keys(self) -> set[tuple]:
        count = self._context.cache_pages
        keys: set[tuple] = set()
        for rows, size, span in self._program_shapes():
            keys.add(("chunks", count, rows, size, span))
            keys.add(("write", count, rows, size))
        return keys

    def warm_ups(self) -> list[WarmUp]:
        warm_ups = []
        for rows, size, span in self._program_shapes():
            unused = Extension(pages=(), start=span, ids=np.zeros(1, np.int32))
            extensions = [unused] * rows
            warm_ups.append(
                WarmUp(
                    f"prefill {rows} x {size} of {span} positions",
                    functools.partial(self._prefill, extensions=extensions, size=size),
                )
            )
        return warm_ups


class ColumnPrefill:
    """Prefills with kernels for CPUs, a column for each id; not for prompts with images."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def extend(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Prefill ids into pages, each context's in order; ``cache`` is donated."""
        slots = make_decode_batch(len(extensions), self._context.shapes.context_pages)
        for slot, extension in enumerate(extensions):
            slots.pages[slot, : len(extension.pages)] = extension.pages
            slots.positions[slot] = extension.start
        if self._context.adapters.names:
            adapters = [extension.adapter for extension in extensions]
            slots = replace(slots, adapter=np.array(adapters, np.int32))

        columns, _, _ = columns_of(slots, [extension.ids for extension in extensions])
        for i in range(0, len(columns.tokens), COLUMNS[-1]):
            batch = jax.tree.map(lambda x, i=i: x[i : i + COLUMNS[-1]], columns)
            cache = self._feed(params, cache, batch)
        return cache

    def _feed(self, params: EngineParams, cache: KVCache, columns: DecodeBatch) -> KVCache:
        """Prefill up to ``COLUMNS[-1]`` ids, a column for each."""
        context = self._context
        width = bucket(COLUMNS, len(columns.tokens))
        padded = pad_decode_batch(columns, width - len(columns.tokens))
        return context.call(
            ("columns", cache.count, width),
            functools.partial(programs.feed_columns, context.config),
            (1,),
            *(params, cache, padded, context.adapters.stacks),
            out=context.cache_sharding,
        )

    def program_keys(self) -> set[tuple]:
        return {("columns", self._context.cache_pages, width) for width in COLUMNS}

    def warm_ups(self) -> list[WarmUp]:
        warm_ups = []
        for width in COLUMNS:
            idle = make_decode_batch(width, self._context.shapes.context_pages)
            columns = self._context.with_defaults(idle)
            warm_ups.append(
                WarmUp(
                    f"prefill of {width} ids",
                    functools.partial(self._feed, columns=columns),
                )
            )
        return warm_ups


def write_chunks(
    context: EngineContext,
    cache: KVCache,
    chunks: KVCache,
    pages: np.ndarray,
    states: jax.Array | np.ndarray | None,
    size: int,
) -> KVCache:
    """Write chunks of ``size`` ids, as computed, to the pages they touch; ``cache`` is donated.

    Args:
        states: int32 [R], slots of the contexts' states; None for models without.
    """
    return context.call(
        ("write", cache.count, len(pages), size),
        recurrent_states.write_chunks,
        (0,),
        *(cache, chunks, pages, states),
        out=context.cache_sharding,
    )


def _fill_row(row: np.ndarray, pages: Sequence[int]) -> None:
    """Write as many pages to the beginning of a row as it has room for."""
    fitting = pages[: len(row)]
    row[: len(fitting)] = fitting
