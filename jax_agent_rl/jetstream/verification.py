"""Passes over several ids of each context: prefill with CPU kernels, and verification of drafts.

With CPU kernels both are a decode step with a column for each id. A tool's result of a few ids then
costs a few columns, where a prompt chunk would be padded, its pages gathered and written back; long
prompts take no longer than with XLA's products; and drafts take as few columns as a batch needs.
Elsewhere a verification is a prompt chunk of each context, all of the same length, and a draw at
each of its positions.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Extension,
    Sampled,
    columns_of,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import EngineParams, next_logits, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import KVCache, count_pages, gather_pages, write_pages
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.jetstream.shapes import EngineShapes, bucket
from jax_agent_rl.jetstream.speculation import accepted_ids
from jax_agent_rl.models.config import DecoderConfig

COLUMNS = (16, 32, 64)
"""Columns of the programs that prefill. More are no faster."""
VERIFIED_COLUMNS = (8, *COLUMNS)
"""Columns of the programs that verify drafts."""


class VerifyingEngine(abc.ABC):
    """The part of ``engine.JaxEngine`` that prefills by column and verifies drafts."""

    config: DecoderConfig
    shapes: EngineShapes
    mesh: Mesh
    split: Mesh | None
    replicated: NamedSharding
    cache_sharding: Any
    _stacks: AdapterStacks | None

    @property
    @abc.abstractmethod
    def kernels(self) -> programs.Kernels: ...

    @property
    def max_concurrent_decodes(self) -> int:
        return self.shapes.max_concurrent_decodes

    @abc.abstractmethod
    def _with_defaults(self, slots: DecodeBatch) -> DecodeBatch: ...

    @abc.abstractmethod
    def _call(
        self, key: tuple, function: Any, donate: tuple[int, ...], *args: Any, out: Any
    ) -> Any: ...

    @abc.abstractmethod
    def width(self, count: int) -> int: ...

    # --- a column for each id, with CPU kernels ---------------------------------------------------

    @property
    def _by_column(self) -> bool:
        return self.kernels is programs.Kernels.CPU

    @property
    def _prefills_columns(self) -> bool:
        return self._by_column and self.config.vision is None

    def _extend_columns(
        self, params: EngineParams, cache: KVCache, extensions: Sequence[Extension]
    ) -> KVCache:
        """Prefill ids into pages, those of each context in order."""
        slots = make_decode_batch(len(extensions), self.shapes.context_pages)
        for slot, extension in enumerate(extensions):
            slots.pages[slot, : len(extension.pages)] = extension.pages
            slots.positions[slot] = extension.start
        if self._stacks is not None:
            adapters = [extension.adapter for extension in extensions]
            slots = replace(slots, adapter=np.array(adapters, np.int32))
        columns, _, _ = columns_of(slots, [extension.ids for extension in extensions])
        for i in range(0, len(columns.tokens), COLUMNS[-1]):
            batch = jax.tree.map(lambda x, i=i: x[i : i + COLUMNS[-1]], columns)
            cache = self._feed(params, cache, batch)
        return cache

    def _feed(self, params: EngineParams, cache: KVCache, columns: DecodeBatch) -> KVCache:
        """Prefill up to ``COLUMNS[-1]`` ids, a column for each."""
        width = bucket(COLUMNS, len(columns.tokens))
        padded = pad_decode_batch(columns, width - len(columns.tokens))
        return self._call(
            ("columns", cache.count, width),
            functools.partial(programs.feed_columns, self.config),
            (1,),
            *(params, cache, padded, self._stacks),
            out=self.cache_sharding,
        )

    @property
    def _column_widths(self) -> tuple[int, ...]:
        return COLUMNS if self._prefills_columns else ()

    def _column_keys(self) -> set[tuple]:
        return {("columns", 1 + self.shapes.pages, width) for width in self._column_widths}

    def _warm_up_columns(self, params: EngineParams, cache: KVCache, width: int) -> KVCache:
        idle = self._with_defaults(make_decode_batch(width, self.shapes.context_pages))
        return self._feed(params, cache, idle)

    # --- verification -----------------------------------------------------------------------------

    @property
    def _longest(self) -> int:
        """Most positions of a context in one pass."""
        return 1 + self.shapes.num_speculative_tokens

    @property
    def _column_counts(self) -> list[int]:
        """Columns compiled for with CPU kernels."""
        max_columns = self._longest * self.max_concurrent_decodes
        counts = []
        smaller = 0
        for columns in VERIFIED_COLUMNS:
            if smaller < max_columns:  # otherwise the smaller program takes all there can be
                counts.append(columns)
            smaller = columns
        return counts

    def verified_columns(self, count: int) -> list[int]:
        """Return how many positions of ``count`` contexts the programs can feed, ascending."""
        if self._by_column:
            return [columns for columns in self._column_counts if columns > count]
        return [self._longest * self.width(count)]

    def verify(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, Sampled]:
        """Draw the ids after each context and after the accepted ids of its draft.

        Args:
            cache: donated.
            slots: as for :meth:`JaxEngine.decode`, not restricted, with pages for the drafts.
            drafts: of each slot; all together must fit the columns of :meth:`verified_columns`.
        """
        slots = self._with_defaults(slots)
        if self._by_column:
            cache, ids, log_probs = self._verify_columns(params, cache, slots, drafts)
        else:
            cache, ids, log_probs = self._verify_chunks(params, cache, slots, drafts)
        for slot, draft in enumerate(drafts):
            accepted = accepted_ids(draft, ids[:, slot].tolist())
            ids[accepted + 1 :, slot] = -1
        return cache, Sampled(ids, log_probs)

    def _verify_columns(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """Return the cache and the draws [longest, slots]: ids and log-probs."""
        fed = [(last_id, *draft) for last_id, draft in zip(slots.tokens, drafts, strict=True)]
        columns, slot, index = columns_of(slots, fed)
        count = len(slot)
        width = bucket(VERIFIED_COLUMNS, count)
        columns = pad_decode_batch(columns, width - count)
        # One step, which no number of finished slots ends early.
        limits = np.array([1, width + 1], np.int32)
        cache, out = self._call(
            ("verify", cache.count, width),
            programs.decode_program(self.config, 1, self.split, self.kernels),
            (1,),
            *(params, cache, columns, limits, None, self._stacks),
            out=(self.cache_sharding, self.replicated),
        )
        drawn = Sampled.of(np.asarray(out))
        ids = np.full((self._longest, len(drafts)), -1, np.int32)
        log_probs = np.zeros(ids.shape, np.float32)
        ids[index, slot] = drawn.ids[0, :count]
        log_probs[index, slot] = drawn.log_probs[0, :count]
        return cache, ids, log_probs

    def _verify_chunks(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """Return the cache and the draws [longest, slots]: ids and log-probs."""
        count = len(drafts)
        size = self._longest
        page = self.shapes.page
        width = self.width(count)
        span = bucket(self._verified_spans, int(slots.positions.max()))

        tokens = np.zeros((width, size), np.int32)
        chunk_pages = np.full((width, count_pages(size, page)), NULL_PAGE, np.int32)
        for row, draft in enumerate(drafts):
            tokens[row, : 1 + len(draft)] = (slots.tokens[row], *draft)
            first_page = slots.positions[row] // page
            pages = slots.pages[row, first_page:][: chunk_pages.shape[1]]
            chunk_pages[row, : len(pages)] = pages

        context_slots = replace(slots, pages=slots.pages[:, : span // page])
        context_slots = pad_decode_batch(context_slots, width - count)
        chunks, out = self._call(
            ("verify", cache.count, width, span),
            functools.partial(verify_chunks, self.config, self.split),
            (),
            *(params, cache, tokens, context_slots, chunk_pages, self._stacks),
            out=(self.cache_sharding, self.replicated),
        )
        cache = self._call(
            ("write", cache.count, width, size),
            write_pages,
            (0,),
            *(cache, chunks, chunk_pages),
            out=self.cache_sharding,
        )

        drawn = Sampled.of(np.array(out))
        ids = drawn.ids.reshape(width, size)[:count].T.copy()
        log_probs = drawn.log_probs.reshape(width, size)[:count].T.copy()
        return cache, ids, log_probs

    @property
    def _verified_spans(self) -> tuple[int, ...]:
        """Cached positions that the programs without CPU kernels attend to."""
        return self.shapes.prefill_spans[1:]

    def _verification_keys(self) -> set[tuple]:
        """Return the keys of all programs the shapes allow."""
        count = 1 + self.shapes.pages
        if not self.shapes.num_speculative_tokens:
            return set()
        if self._by_column:
            return {("verify", count, columns) for columns in self._column_counts}
        keys: set[tuple] = set()
        for width in self.shapes.slot_buckets:
            keys.add(("write", count, width, self._longest))
            for span in self._verified_spans:
                keys.add(("verify", count, width, span))
        return keys

    def _warm_up_verification(self, params: EngineParams, cache: KVCache) -> KVCache:
        """Compile and run every program the shapes allow."""
        for key in sorted(self._verification_keys()):
            if key[0] != "verify":
                continue
            width = key[2]
            position = 0 if self._by_column else key[3]
            idle = make_decode_batch(width, self.shapes.context_pages, position)
            cache, _ = self.verify(params, cache, idle, [()] * width)
        return cache


def verify_chunks(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    slots: DecodeBatch,
    chunk_pages: jax.Array,
    adapters: AdapterStacks | None = None,
) -> tuple[KVCache, jax.Array]:
    """Feed T ids of each of W contexts and draw an id after each, as ``programs.decode`` would.

    No slot may be restricted.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        mesh: the engine's mesh, if it has more than one device.
        cache: all pages.
        tokens: int32 [W, T], padded.
        slots: the contexts, with pages at least up to ``slots.positions``, where the ids begin.
        chunk_pages: int32 [W, m], pages the ids touch.
        adapters: the stacks ``slots.adapter`` indexes.

    Returns:
        The content of ``chunk_pages``, as ``programs.compute_chunks`` does, and int32 [2, 1, W T]:
        drawn ids and the bits of their log-probs.
    """
    count = tokens.shape[1]
    starts = slots.positions
    rows = gather_pages(cache, slots.pages, starts)
    layers = prefill_chunks(
        config,
        params,
        rows,
        tokens,
        starts,
        mesh=mesh,
        adapters=adapters,
        adapter=slots.adapter,
        rope_offsets=slots.offsets,
    )
    hidden = layers[-1][0]
    ids, logprobs, _ = sample(
        next_logits(config, params, hidden, mesh),
        temperature=jnp.repeat(slots.temperature, count),
        seed=jnp.repeat(slots.seed, count),
        position=(starts[:, None] + 1 + jnp.arange(count)).reshape(-1),
        mesh=mesh,
    )
    out = jnp.stack([ids, jax.lax.bitcast_convert_type(logprobs, jnp.int32)])[:, None]
    return programs.pages_of_chunks(cache, layers, tokens, starts, chunk_pages), out
