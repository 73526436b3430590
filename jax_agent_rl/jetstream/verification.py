"""Verification of drafts: a pass over the last id of each context and the ids of its draft.

With CPU kernels it is a decode step with a column for each id, of as few columns as a batch needs.
Elsewhere it is a prompt chunk of each context, all of the same length, and a draw at each of its
positions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_agent_rl.jetstream import programs
from jax_agent_rl.jetstream.adapters import AdapterStacks
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.context import EngineContext, WarmUp
from jax_agent_rl.jetstream.decode_batch import (
    DecodeBatch,
    Sampled,
    columns_of,
    make_decode_batch,
    pad_decode_batch,
)
from jax_agent_rl.jetstream.forward import EngineParams, next_logits, prefill_chunks
from jax_agent_rl.jetstream.kv_cache import KVCache, count_pages, gather_pages
from jax_agent_rl.jetstream.prefill import write_chunks
from jax_agent_rl.jetstream.recurrent_states import gather_states, states_after
from jax_agent_rl.jetstream.sampling import sample
from jax_agent_rl.jetstream.shapes import bucket
from jax_agent_rl.models.config import DecoderConfig

COLUMNS = (8, 16, 24, 32, 64)
"""Columns of the programs that verify with CPU kernels.

From 16 on a step takes about as much longer as it has more of them: counts lie close to each other,
so that few columns are left without an id.
"""


class ColumnVerifier:
    """Verifies drafts with kernels for CPUs, a column for each id."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        # Most positions of a context in one pass.
        self._longest = 1 + context.shapes.num_speculative_tokens

    @property
    def _column_counts(self) -> list[int]:
        """Columns compiled for."""
        max_columns = self._longest * self._context.shapes.max_concurrent_decodes
        counts = []
        smaller = 0
        for columns in COLUMNS:
            if smaller < max_columns:  # otherwise the smaller program takes all there can be
                counts.append(columns)
            smaller = columns
        return counts

    def columns(self, count: int) -> list[int]:
        """Return how many positions of ``count`` contexts the programs can feed, ascending."""
        return [columns for columns in self._column_counts if columns > count]

    def verify(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, Sampled]:
        """Verify drafts, see :meth:`~jax_agent_rl.jetstream.engine.JaxEngine.verify`."""
        context = self._context
        slots = context.with_defaults(slots)
        fed = [(last_id, *draft) for last_id, draft in zip(slots.tokens, drafts, strict=True)]
        columns, slot, index = columns_of(slots, fed)
        count = len(slot)
        width = bucket(COLUMNS, count)
        columns = pad_decode_batch(columns, width - count)
        # One step, which no number of finished slots ends early.
        limits = np.array([1, width + 1], np.int32)
        cache, out = context.call(
            ("verify", cache.count, width),
            programs.decode_program(context.config, 1, context.split, context.kernels),
            (1,),
            *(params, cache, columns, limits, None, context.adapters.stacks),
            out=(context.cache_sharding, context.replicated),
        )

        drawn = Sampled.of(np.asarray(out))
        ids = np.full((self._longest, len(drafts)), -1, np.int32)
        log_probs = np.zeros(ids.shape, np.float32)
        ids[index, slot] = drawn.ids[0, :count]
        log_probs[index, slot] = drawn.log_probs[0, :count]
        _drop_rejected(ids, drafts)
        return cache, Sampled(ids, log_probs)

    def program_keys(self) -> set[tuple]:
        count = self._context.cache_pages
        return {("verify", count, columns) for columns in self._column_counts}

    def warm_ups(self) -> list[WarmUp]:
        warm_ups = []
        for columns in self._column_counts:
            idle = make_decode_batch(columns, self._context.shapes.context_pages)
            warm_ups.append(_warm_up(self, idle, f"verification of {columns} ids"))
        return warm_ups


class ChunkVerifier:
    """Verifies drafts with a chunk of each context, as long as the longest draft."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        # Positions of a context in one pass.
        self._size = 1 + context.shapes.num_speculative_tokens

    @property
    def _spans(self) -> tuple[int, ...]:
        """Cached positions that the programs attend to."""
        return self._context.shapes.prefill_spans[1:]

    def columns(self, count: int) -> list[int]:
        """Return how many positions of ``count`` contexts the programs can feed, ascending."""
        return [self._size * self._context.shapes.width(count)]

    def verify(
        self,
        params: EngineParams,
        cache: KVCache,
        slots: DecodeBatch,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[KVCache, Sampled]:
        """Verify drafts, see :meth:`~jax_agent_rl.jetstream.engine.JaxEngine.verify`."""
        context = self._context
        slots = context.with_defaults(slots)
        count = len(drafts)
        size = self._size
        page = context.shapes.page
        width = context.shapes.width(count)
        span = bucket(self._spans, int(slots.positions.max()))

        tokens = np.zeros((width, size), np.int32)
        chunk_pages = np.full((width, count_pages(size, page)), NULL_PAGE, np.int32)
        for row, draft in enumerate(drafts):
            tokens[row, : 1 + len(draft)] = (slots.tokens[row], *draft)
            first_page = slots.positions[row] // page
            pages = slots.pages[row, first_page:][: chunk_pages.shape[1]]
            chunk_pages[row, : len(pages)] = pages

        context_slots = replace(slots, pages=slots.pages[:, : span // page])
        context_slots = pad_decode_batch(context_slots, width - count)
        lengths = None
        if context.has_states:
            lengths = np.zeros(width, np.int32)
            lengths[:count] = [1 + len(draft) for draft in drafts]
        chunks, out = context.call(
            ("verify", cache.count, width, span),
            functools.partial(verify_chunks, context.config, context.split),
            (),
            *(params, cache, tokens, context_slots, chunk_pages, context.adapters.stacks, lengths),
            out=(context.cache_sharding, context.replicated),
        )
        cache = write_chunks(context, cache, chunks, chunk_pages, context_slots.states, size)

        drawn = Sampled.of(np.array(out))
        ids = drawn.ids.reshape(width, size)[:count].T.copy()
        log_probs = drawn.log_probs.reshape(width, size)[:count].T.copy()
        _drop_rejected(ids, drafts)
        _drop_after_stop(ids, np.asarray(slots.stop_ids))
        return cache, Sampled(ids, log_probs)

    def program_keys(self) -> set[tuple]:
        count = self._context.cache_pages
        keys: set[tuple] = set()
        for width in self._context.shapes.slot_buckets:
            keys.add(("write", count, width, self._size))
            for span in self._spans:
                keys.add(("verify", count, width, span))
        return keys

    def warm_ups(self) -> list[WarmUp]:
        shapes = self._context.shapes
        warm_ups = []
        for width in shapes.slot_buckets:
            for span in self._spans:
                idle = make_decode_batch(width, shapes.context_pages, span)
                name = f"verification for {width} slots of {span} positions"
                warm_ups.append(_warm_up(self, idle, name))
        return warm_ups


def _warm_up(verifier: ColumnVerifier | ChunkVerifier, idle: DecodeBatch, name: str) -> WarmUp:
    """Return a verification of empty drafts."""
    drafts: list[tuple[int, ...]] = [()] * len(idle.tokens)

    def run(params: EngineParams, cache: KVCache) -> KVCache:
        cache, _ = verifier.verify(params, cache, idle, drafts)
        return cache

    return WarmUp(name, run)


def accepted_ids(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many drafted ids are accepted.

    Args:
        draft: the drafted ids.
        drawn: the draws [len(draft) + 1] at their positions and the next.
    """
    for i, token in enumerate(draft):
        if token != drawn[i]:
            return i
    return len(draft)


def _drop_rejected(ids: np.ndarray, drafts: Sequence[Sequence[int]]) -> None:
    """Mark the draws after each draft's first rejected id with -1, in place.

    Args:
        ids: int32 [positions, slots], the draws.
        drafts: of each slot.
    """
    for slot, draft in enumerate(drafts):
        accepted = accepted_ids(draft, ids[:, slot].tolist())
        ids[accepted + 1 :, slot] = -1


def _drop_after_stop(ids: np.ndarray, stop_ids: np.ndarray) -> None:
    """Mark the draws after each slot's first stop id with -1, in place.

    Args:
        ids: int32 [positions, slots], the draws.
        stop_ids: int32 [slots, n], padded with -1.
    """
    is_stop = (ids[:, :, None] == stop_ids) & (stop_ids >= 0)
    stops_before = np.cumsum(is_stop.any(axis=2), axis=0) - is_stop.any(axis=2)
    ids[stops_before > 0] = -1


def _fed_ids(
    tokens: jax.Array, drawn: jax.Array, lengths: jax.Array, stop_ids: jax.Array
) -> jax.Array:
    """Return how many ids of each verified chunk belong to its context, int32 [W].

    These are the last id of the context and the accepted ones of its draft up to a stop id, which
    is not fed.

    Args:
        tokens: int32 [W, T], the last id and the draft, padded.
        drawn: int32 [W, T], the draws after each.
        lengths: int32 [W], ids of the chunks without padding.
        stop_ids: int32 [W, n].
    """
    drafted = tokens[:, 1:]
    in_draft = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
    is_stop = jnp.any(drafted[:, :, None] == stop_ids[:, None], axis=2)
    accepted = in_draft & (drafted == drawn[:, :-1]) & ~is_stop
    return 1 + jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def verify_chunks(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: EngineParams,
    cache: KVCache,
    tokens: jax.Array,
    slots: DecodeBatch,
    chunk_pages: jax.Array,
    adapters: AdapterStacks | None = None,
    lengths: jax.Array | None = None,
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
        lengths: int32 [W], ids of each context without padding; None for models without states.

    Returns:
        The content of ``chunk_pages``, as ``programs.compute_chunks`` does, and the states after
        the accepted ids; and int32 [2, 1, W T]: drawn ids and the bits of their log-probs.
    """
    count = tokens.shape[1]
    starts = slots.positions
    rows = gather_pages(cache, slots.pages, starts)
    rows = replace(rows, states=gather_states(cache.states, slots.states))
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
        lengths=lengths,
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
    chunks = programs.pages_of_chunks(cache, layers, tokens, starts, chunk_pages)
    if lengths is None:
        return chunks, out
    # The states so far are of whole drafts: return to those before, and feed what was accepted.
    fed = _fed_ids(tokens, ids.reshape(tokens.shape), lengths, slots.stop_ids)
    return replace(chunks, states=states_after(rows.states, chunks.states, fed)), out
