"""Inputs of one dispatch: chunks to prefill, or a slot for each context to decode, padded to a compiled width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.generation import mask_words
from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.sampling import Truncation
from jax_agent_rl.models.vision_context import MultimodalContext
from jax_agent_rl.types import SamplingParams

MAX_STOP_IDS = 8
PREFILL_ROWS = (
    4  # chunks computed together: a matrix product of one short chunk mostly waits for the weights
)
ALL_ALLOWED = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Extension:
    """Ids to prefill into the pages of one context.

    Attributes:
        pages: numbers of the context's pages.
        start: position of the first id.
        ids: int32 [n].
        multimodal: the whole context, for a vision model.
        adapter: as in :class:`DecodeBatch`.
    """

    pages: Sequence[int]
    start: int
    ids: np.ndarray
    multimodal: MultimodalContext | None = None
    adapter: int = 0

    def after(self, count: int) -> Extension:
        """Return the rest once the first ``count`` ids are done."""
        return replace(self, start=self.start + count, ids=self.ids[count:])


@dataclass(frozen=True)
class Sampled:
    """What a dispatch of S steps sampled.

    Attributes:
        ids: int32 [S, W]; -1 where the slot did not run.
        log_probs: float32 [S, W].
        kept: uint32 [ceil(V / 32), S, W], a bit for each id that was left to draw from; None if no
            slot was restricted.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    kept: np.ndarray | None = None

    @classmethod
    def of(cls, out: np.ndarray) -> Sampled:
        """Read the output of :func:`~jax_agent_rl.jetstream.programs.decode`."""
        return cls(
            out[0], out[1].view(np.float32), out[2:].view(np.uint32) if len(out) > 2 else None
        )

    def of_slot(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return ids [S], log-probs [S] and bits of kept ids [S, ceil(V / 32)] of one slot."""
        kept = None if self.kept is None else self.kept[:, :, slot].T
        return self.ids[:, slot], self.log_probs[:, slot], kept


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """The W slots of one decode dispatch; arrays of length W.

    Attributes:
        pages: int32 [W, n], pages of each slot's context in order; 0 where there is none.
        tokens: int32, the last id of each context, not yet in the cache.
        positions: int32, its position, which is the number of cached ids.
        remaining: int32, ids still allowed; 0 marks an idle slot.
        temperature: float32.
        seed: uint32.
        stop_ids: int32 [W, n], ids that end the generation, padded with -1.
        offsets: int32, what images add to rotary positions; None for text models.
        adapter: int32, index of the LoRA adapter counted from 1, 0 for the base model; None for
            engines without.
        truncation: top-p, top-k and min-p; None where no slot has any.
        allowed: uint32 [W, ceil(V / 32)], a bit for each id that the grammars allow next, so only
            for a dispatch of one step; None where no slot has a grammar.
    """

    pages: jax.Array
    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    temperature: jax.Array
    seed: jax.Array
    stop_ids: jax.Array
    offsets: jax.Array | None = None
    adapter: jax.Array | None = None
    truncation: Truncation | None = None
    allowed: jax.Array | None = None

    @property
    def restricted(self) -> bool:
        """Whether any slot draws from a part of the vocabulary."""
        return self.truncation is not None or self.allowed is not None


def truncation_of(slots: Sequence[SamplingParams]) -> Truncation | None:
    """Return ``DecodeBatch.truncation`` of slots with these parameters."""
    if not any(slot.truncated for slot in slots):
        return None
    values = [(slot.top_p, slot.top_k, slot.min_p) for slot in slots]
    top_p, top_k, min_p = (np.array(column) for column in zip(*values, strict=True))
    return Truncation(top_p.astype(np.float32), top_k.astype(np.int32), min_p.astype(np.float32))


def slots_of(
    runs: Sequence[RunningRequest],
    pages: Sequence[Sequence[int]],
    context_pages: int,
    vocab_size: int,
) -> DecodeBatch:
    """Return a slot for each of some requests, without their adapters.

    Args:
        runs: the requests.
        pages: of each one's context.
        context_pages: pages of the longest context.
        vocab_size: the model's.
    """
    slots = make_decode_batch(len(runs), context_pages)
    for slot, (run, own) in enumerate(zip(runs, pages, strict=True)):
        slots.pages[slot, : len(own)] = own
        slots.tokens[slot] = run.last_id
        slots.positions[slot] = len(run.request.prompt_ids) + len(run.token_ids) - 1
        slots.remaining[slot] = run.remaining
        slots.temperature[slot] = run.request.sampling.temperature
        slots.seed[slot] = run.seed
        slots.stop_ids[slot, : len(run.stop_ids)] = run.stop_ids
    if any(run.offset for run in runs):
        slots = replace(slots, offsets=np.array([run.offset for run in runs], np.int32))
    if any(run.grammar for run in runs):
        allowed = np.full((len(runs), mask_words(vocab_size)), ALL_ALLOWED)
        for run, row in zip(runs, allowed, strict=True):
            if run.grammar is not None:
                run.grammar.fill_allowed(row)
        slots = replace(slots, allowed=allowed)
    return replace(slots, truncation=truncation_of([run.request.sampling for run in runs]))


def make_decode_batch(count: int, pages: int, position: int = 0) -> DecodeBatch:
    """Return idle greedy slots as numpy arrays to fill in.

    Args:
        count: number of slots.
        pages: pages each slot has room for.
        position: position of every slot.
    """
    arrays: dict[str, Any] = dict(  # numpy, which jitted programs accept
        pages=np.full((count, pages), NULL_PAGE, np.int32),
        tokens=np.zeros(count, np.int32),
        positions=np.full(count, position, np.int32),
        remaining=np.zeros(count, np.int32),
        temperature=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint32),
        stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
    )
    return DecodeBatch(**arrays)


def columns_of(
    slots: DecodeBatch, ids: Sequence[Sequence[int] | np.ndarray]
) -> tuple[DecodeBatch, np.ndarray, np.ndarray]:
    """Return a slot for each of several ids of each context, at consecutive positions, for kernels on CPUs.

    Args:
        slots: the contexts; ``positions`` are those of their first ids.
        ids: of each context.

    Returns:
        The slots, the context of each, int32 [n], and its place among the context's ids, int32 [n].
    """
    counts = np.array([len(own) for own in ids])
    context = np.repeat(np.arange(len(ids)), counts)
    place = np.arange(len(context)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = jax.tree.map(lambda x: x[context], slots)
    tokens = np.concatenate([np.asarray(own, np.int32) for own in ids])
    return (
        replace(columns, tokens=tokens, positions=columns.positions + place.astype(np.int32)),
        context,
        place,
    )


def pad_decode_batch(slots: DecodeBatch, extra: int) -> DecodeBatch:
    """Append ``extra`` idle slots."""
    if not extra:
        return slots
    optional: dict[str, Any] = {
        name: np.zeros(extra, np.int32)
        for name in ("offsets", "adapter")
        if getattr(slots, name) is not None
    }
    if slots.truncation is not None:
        optional["truncation"] = Truncation(
            np.ones(extra, np.float32), np.zeros(extra, np.int32), np.zeros(extra, np.float32)
        )
    if slots.allowed is not None:
        optional["allowed"] = np.full((extra, slots.allowed.shape[1]), ALL_ALLOWED)
    padding = replace(make_decode_batch(extra, slots.pages.shape[1]), **optional)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), slots, padding)


def batches_of(extensions: list[Extension]) -> Iterator[list[Extension]]:
    """Yield PREFILL_ROWS at a time; one or two left over run alone, which is faster than computing padding."""
    for i in range(0, len(extensions), PREFILL_ROWS):
        batch = extensions[i : i + PREFILL_ROWS]
        if len(batch) > PREFILL_ROWS // 2:
            yield batch
        else:
            yield from ([one] for one in batch)
