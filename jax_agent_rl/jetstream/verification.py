"""Passes over several ids of each context: prefill with CPU kernels, and verification (``jetstream.speculation``).

With CPU kernels both are a decode step with a column for each id. A tool's result of a few ids then
costs a few columns, where a prompt chunk would be padded, its pages gathered and written back; long
prompts take no longer than with XLA's products; and drafts take as few columns as a batch needs.
Elsewhere a verification is a prompt chunk of each context, all of the same length, and a draw at
each of its positions.
"""

from __future__ import annotations

import abc
import functools
import itertools
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
    """The part of :class:`~jax_agent_rl.jetstream.engine.JaxEngine` that prefills by column and verifies drafts."""

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
    def _completed(self, slots: DecodeBatch) -> DecodeBatch: ...

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
            slots = replace(
                slots, adapter=np.array([extension.adapter for extension in extensions], np.int32)
            )
        columns, *_ = columns_of(slots, [extension.ids for extension in extensions])
        for i in range(0, len(columns.tokens), COLUMNS[-1]):
            cache = self._feed(
                params, cache, jax.tree.map(lambda x, i=i: x[i : i + COLUMNS[-1]], columns)
            )
        return cache

    def _feed(self, params: EngineParams, cache: KVCache, columns: DecodeBatch) -> KVCache:
        width = bucket(COLUMNS, len(columns.tokens))
        inputs = (
            params,
            cache,
            pad_decode_batch(columns, width - len(columns.tokens)),
            self._stacks,
        )
        program = functools.partial(programs.feed_columns, self.config)
        return self._call(
            ("columns", cache.count, width), program, (1,), *inputs, out=self.cache_sharding
        )

    @property
    def _column_widths(self) -> tuple[int, ...]:
        return COLUMNS if self._prefills_columns else ()

    def _column_keys(self) -> set[tuple]:
        return {("columns", 1 + self.shapes.pages, width) for width in self._column_widths}

    def _warm_up_columns(self, params: EngineParams, cache: KVCache, width: int) -> KVCache:
        return self._feed(
            params, cache, self._completed(make_decode_batch(width, self.shapes.context_pages))
        )

    # --- verification -----------------------------------------------------------------------------

    @property
    def _longest(self) -> int:
        """Most positions of a context in one pass."""
        return 1 + self.shapes.num_speculative_tokens

    @property
    def _column_counts(self) -> list[int]:
        """Columns compiled for with CPU kernels."""
        most, fewer = self._longest * self.max_concurrent_decodes, (0, *VERIFIED_COLUMNS)
        return [
            columns for columns, less in zip(VERIFIED_COLUMNS, fewer, strict=False) if less < most
        ]

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
        """Draw the ids after each context and after the ids of its draft, as far as these are accepted.

        Args:
            params: weights.
            cache: donated.
            slots: as for :meth:`JaxEngine.decode`, not restricted, with pages for the drafts.
            drafts: of each slot; all together must fit the columns of :meth:`verified_columns`.
        """
        run = self._verify_columns if self._by_column else self._verify_chunks
        cache, ids, log_probs = run(params, cache, self._completed(slots), drafts)
        for slot, draft in enumerate(drafts):
            ids[1 + accepted_ids(draft, ids[:, slot].tolist()) :, slot] = -1
        return cache, Sampled(ids, log_probs)

    def _verify_columns(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, np.ndarray, np.ndarray]:
        """Return the cache and the draws [longest, slots]: ids and log-probs."""
        columns, slot, place = columns_of(
            slots, [(t, *draft) for t, draft in zip(slots.tokens, drafts, strict=True)]
        )
        width = bucket(VERIFIED_COLUMNS, len(slot))
        columns = pad_decode_batch(columns, width - len(slot))
        program = programs.decode_program(self.config, 1, self.split, self.kernels)
        inputs = (params, cache, columns, np.array([1, width + 1], np.int32), None, self._stacks)
        out = (self.cache_sharding, self.replicated)
        cache, out = self._call(("verify", cache.count, width), program, (1,), *inputs, out=out)
        drawn = Sampled.of(np.asarray(out))
        ids = np.full((self._longest, len(drafts)), -1, np.int32)
        log_probs = np.zeros(ids.shape, np.float32)
        ids[place, slot], log_probs[place, slot] = (
            drawn.ids[0, : len(slot)],
            drawn.log_probs[0, : len(slot)],
        )
        return cache, ids, log_probs

    def _verify_chunks(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
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
        before = pad_decode_batch(
            replace(slots, pages=slots.pages[:, : span // page]), width - count
        )
        program = functools.partial(verify_chunks, self.config, self.split)
        inputs, sharding = (params, cache, tokens, before, into, self._stacks), self.cache_sharding
        out = (sharding, self.replicated)
        new, out = self._call(("verify", cache.count, width, span), program, (), *inputs, out=out)
        key = ("write", cache.count, width, size)
        cache = self._call(key, write_pages, (0,), cache, new, into, out=sharding)
        drawn = Sampled.of(np.array(out))
        ids, log_probs = (
            x.reshape(width, size)[:count].T.copy() for x in (drawn.ids, drawn.log_probs)
        )
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
        return written | {
            ("verify", count, *shape) for shape in itertools.product(widths, self._verified_spans)
        }

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
        The pages ``into``, as ``programs.compute_chunks`` does, and int32 [2, 1, W T]: drawn ids
        and the bits of their log-probs.
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
