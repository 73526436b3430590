"""The programs that verify drafts (``jetstream.speculation``): one pass over several positions of each context.

With CPU kernels it is a decode step with a column for each position, in as few columns as a batch's drafts need.
Elsewhere it is a prompt chunk of each context, all of the same length, and a draw at each of its positions.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.columns import COLUMNS, ColumnEngine
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Sampled,
    columns_of,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import EngineParams, next_logits, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import KVCache, count_pages, gather_pages, write_pages
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.jetstream.shapes import bucket
from jax_agent_rl.jetstream.speculation import accepted_ids
from jax_agent_rl.models.config import DecoderConfig


class VerifyingEngine(ColumnEngine):
    """The part of :class:`~jax_agent_rl.jetstream.engine.JaxEngine` that verifies drafts."""

    @abc.abstractmethod
    def width(self, count: int) -> int:
        """Return the slots of the program that decodes ``count`` contexts."""

    @property
    def _longest(self) -> int:
        """Most positions of a context in one pass."""
        return 1 + self.shapes.num_speculative_tokens

    @property
    def _column_counts(self) -> list[int]:
        """Columns compiled for with CPU kernels."""
        most = self._longest * self.max_concurrent_decodes
        return [columns for columns, fewer in zip(COLUMNS, (0, *COLUMNS), strict=False) if fewer < most]

    def verified_columns(self, count: int) -> list[int]:
        """Return how many positions of ``count`` contexts the programs can feed, ascending."""
        if self._by_column:
            return [columns for columns in self._column_counts if columns > count]
        return [self._longest * self.width(count)]

    def verify(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, drafts: Sequence[Sequence[int]]
    ) -> tuple[KVCache, Sampled]:
        """Draw the ids after each context and after the ids of its draft, as far as these are accepted.

        Args:
            params: weights.
            cache: donated.
            slots: as for :meth:`JaxEngine.decode`, not restricted, with pages for the drafts.
            drafts: of each slot; all together must fit ``columns``.
        """
        run = self._verify_columns if self._by_column else self._verify_chunks
        cache, ids, log_probs = run(params, cache, self._completed(slots), drafts)
        for slot, draft in enumerate(drafts):
            ids[1 + accepted_ids(draft, ids[:, slot].tolist()) :, slot] = -1
        return cache, Sampled(ids, log_probs)

    def _verify_columns(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, drafts: Sequence[Sequence[int]]
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """Return the cache and the draws [longest, slots]: ids and log-probs."""
        columns, slot, place = columns_of(slots, [(t, *draft) for t, draft in zip(slots.tokens, drafts, strict=True)])
        width = bucket(COLUMNS, len(slot))
        columns = pad_decode_batch(columns, width - len(slot))
        program = programs.decode_program(self.config, 1, self.split, self._kernels)
        inputs = (params, cache, columns, np.array([1, width + 1], np.int32), None, self._stacks)
        out = (self._cache_sharding, self._replicated)
        cache, out = self._call(("verify", cache.count, width), program, (1,), *inputs, out=out)
        drawn = Sampled.of(np.asarray(out))
        ids = np.full((self._longest, len(drafts)), -1, np.int32)
        log_probs = np.zeros(ids.shape, np.float32)
        ids[place, slot], log_probs[place, slot] = drawn.ids[0, : len(slot)], drawn.log_probs[0, : len(slot)]
        return cache, ids, log_probs

    def _verify_chunks(
        self, params: EngineParams, cache: KVCache, slots: DecodeBatch, drafts: Sequence[Sequence[int]]
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """Return the cache and the draws [longest, slots]: ids and log-probs."""
        count, size, page = len(drafts), self._longest, self.shapes.page
        width, span = self.width(count), bucket(self._verified_spans, int(slots.positions.max()))
        tokens = np.zeros((width, size), np.int32)
        for row, (first, draft) in enumerate(zip(slots.tokens, drafts, strict=True)):
            tokens[row, : 1 + len(draft)] = first, *draft
        into = np.full((width, count_pages(size, page)), NULL_PAGE, np.int32)
        for row, (pages, position) in enumerate(zip(slots.pages, slots.positions, strict=True)):
            own = pages[position // page :][: into.shape[1]]
            into[row, : len(own)] = own
        before = pad_decode_batch(replace(slots, pages=slots.pages[:, : span // page]), width - count)
        program = functools.partial(verify_chunks, self.config, self.split)
        inputs, sharding = (params, cache, tokens, before, into, self._stacks), self._cache_sharding
        out = (sharding, self._replicated)
        new, out = self._call(("verify", cache.count, width, span), program, (), *inputs, out=out)
        key = ("write", cache.count, width, size)
        cache = self._call(key, write_pages, (0,), cache, new, into, out=sharding)
        drawn = Sampled.of(np.array(out))
        ids, log_probs = (x.reshape(width, size)[:count].T.copy() for x in (drawn.ids, drawn.log_probs))
        return cache, ids, log_probs

    @property
    def _verified_spans(self) -> tuple[int, ...]:
        """Cached positions that the programs without CPU kernels attend to."""
        return self.shapes.prefill_spans[1:]

    def _verification_keys(self) -> set[tuple]:
        """Return the keys of all programs the shapes allow."""
        count, widths = 1 + self.shapes.pages, self.shapes.slot_buckets
        if not self.shapes.num_speculative_tokens:
            return set()
        if self._by_column:
            return {("verify", count, columns) for columns in self._column_counts}
        written = {("write", count, width, self._longest) for width in widths}
        return written | {("verify", count, *shape) for shape in itertools.product(widths, self._verified_spans)}

    def _warm_up_verification(self, params: EngineParams, cache: KVCache) -> KVCache:
        """Compile and run every program the shapes allow."""
        pages = self.shapes.context_pages
        for key in sorted(self._verification_keys()):
            if key[0] == "verify":
                idle = make_decode_batch(key[2], pages, 0 if self._by_column else key[3])
                cache, _ = self.verify(params, cache, idle, [()] * key[2])
        return cache


def verify_chunks(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    slots: DecodeBatch,
    into: jax.Array,
    adapters: AdapterStacks | None = None,
) -> tuple[KVCache, jax.Array]:
    """Feed T ids of each of W contexts and draw an id after each, without restrictions, as ``programs.decode`` would.

    Args:
        config: the model, with the engine's ``num_kv_heads``.
        mesh: the engine's mesh, if it has more than one device.
        params: weights.
        cache: all pages.
        tokens: int32 [W, T], padded.
        slots: the contexts, with pages at least up to ``slots.positions``, where the ids begin.
        into: int32 [W, m], pages the ids touch.
        adapters: the stacks ``slots.adapter`` indexes.

    Returns:
        The pages ``into``, as ``programs.compute_chunks`` does, and int32 [2, 1, W T]: drawn ids and the bits of their
        log-probs.
    """
    count, starts = tokens.shape[1], slots.positions
    rows = gather_pages(cache, slots.pages, starts)
    offsets = (adapters, slots.adapter, slots.offsets)
    layers = prefill_chunks(config, params, rows, tokens, starts, None, mesh, *offsets)
    ids, logprobs, _ = sample(
        next_logits(config, params, layers[-1][0], mesh),
        temperature=jnp.repeat(slots.temperature, count),
        seed=jnp.repeat(slots.seed, count),
        position=(starts[:, None] + 1 + jnp.arange(count)).reshape(-1),
        mesh=mesh,
    )
    out = jnp.stack([ids, jax.lax.bitcast_convert_type(logprobs, jnp.int32)])[:, None]
    return programs.chunk_pages(cache, layers, tokens, starts, into), out
