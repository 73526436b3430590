"""Inputs of one dispatch: chunks to prefill, or a slot for each context to decode.

Both are padded to a width that a program was compiled for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.sampling import Truncation
from jax_agent_rl.jetstream.state_slots import NULL_STATE
from jax_agent_rl.models.vision_context import MultimodalContext
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.types.supports import mask_words

MAX_STOP_IDS = 8
PREFILL_ROWS = 4
"""Chunks computed together: the products of one short chunk mostly wait for the weights."""
ALL_ALLOWED = np.uint32(0xFFFFFFFF)
"""Bits of 32 ids that a grammar allows."""


@dataclass(frozen=True)
class Extension:
    """Ids to prefill into the pages of one context.

    Attributes:
        pages: numbers of the context's pages.
        start: position of the first id.
        ids: int32 [n].
        multimodal: the whole context, for a vision model.
        adapter: number of the LoRA adapter, 0 for the base model.
        state: slot of the context's recurrent state, for a model that has one.
    """

    pages: Sequence[int]
    start: int
    ids: np.ndarray
    multimodal: MultimodalContext | None = None
    adapter: int = 0
    state: int = NULL_STATE

    def until(self, position: int) -> Extension:
        """Return the part before a position."""
        return replace(self, ids=self.ids[: position - self.start])

    def after(self, count: int) -> Extension:
        """Return what remains once the first ``count`` ids are prefilled."""
        return replace(self, start=self.start + count, ids=self.ids[count:])


@dataclass(frozen=True)
class Sampled:
    """What a dispatch of S steps sampled.

    Attributes:
        ids: int32 [S, W]; -1 where the slot did not run.
        log_probs: float32 [S, W].
        support_bits: uint32 [ceil(V / 32), S, W], a bit for each id that could be drawn; None if no
            slot was restricted.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    support_bits: np.ndarray | None = None

    @classmethod
    def of(cls, out: np.ndarray) -> Sampled:
        """Read the output of :func:`~jax_agent_rl.jetstream.programs.decode`."""
        support_bits = None
        if len(out) > 2:
            support_bits = out[2:].view(np.uint32)
        return cls(ids=out[0], log_probs=out[1].view(np.float32), support_bits=support_bits)

    def of_slot(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return ids [S], log-probs [S] and support bits [S, ceil(V / 32)] of one slot."""
        support_bits = None
        if self.support_bits is not None:
            support_bits = self.support_bits[:, :, slot].T
        return self.ids[:, slot], self.log_probs[:, slot], support_bits


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
        states: int32, slots of the contexts' recurrent states, the null slot for idle ones; None
            for models without.
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
    states: jax.Array | None = None

    @property
    def restricted(self) -> bool:
        """Whether any slot draws from a part of the vocabulary."""
        return self.truncation is not None or self.allowed is not None


def truncation_of(samplings: Sequence[SamplingParams]) -> Truncation | None:
    """Return ``DecodeBatch.truncation`` of slots with these parameters."""
    if not any(sampling.truncated for sampling in samplings):
        return None
    return Truncation(
        np.array([sampling.top_p for sampling in samplings]).astype(np.float32),
        np.array([sampling.top_k for sampling in samplings]).astype(np.int32),
        np.array([sampling.min_p for sampling in samplings]).astype(np.float32),
    )


def slots_of(
    runs: Sequence[RunningRequest],
    pages: Sequence[Sequence[int]],
    context_pages: int,
    vocab_size: int,
) -> DecodeBatch:
    """Return a slot for each running request, without the LoRA adapters.

    Args:
        pages: pages of each request's context.
        context_pages: pages of the longest context, for which every slot has room.
        vocab_size: of the model, for the masks of grammars.
    """
    slots = make_decode_batch(len(runs), context_pages)
    for slot, (run, slot_pages) in enumerate(zip(runs, pages, strict=True)):
        slots.pages[slot, : len(slot_pages)] = slot_pages
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
    # In numpy, which jitted programs accept.
    arrays: dict[str, Any] = {
        "pages": np.full((count, pages), NULL_PAGE, np.int32),
        "tokens": np.zeros(count, np.int32),
        "positions": np.full(count, position, np.int32),
        "remaining": np.zeros(count, np.int32),
        "temperature": np.zeros(count, np.float32),
        "seed": np.zeros(count, np.uint32),
        "stop_ids": np.full((count, MAX_STOP_IDS), -1, np.int32),
    }
    return DecodeBatch(**arrays)


def columns_of(
    slots: DecodeBatch, ids: Sequence[Sequence[int] | np.ndarray]
) -> tuple[DecodeBatch, np.ndarray, np.ndarray]:
    """Return a slot for each of several consecutive ids of each context, for kernels on CPUs.

    Args:
        slots: the contexts; ``positions`` are the positions of their first ids.
        ids: ids to feed to each context.

    Returns:
        The slots, the context of each, int32 [n], and its index among the context's ids, int32 [n].
    """
    counts = np.array([len(context_ids) for context_ids in ids])
    context = np.repeat(np.arange(len(ids)), counts)
    first_columns = np.cumsum(counts) - counts
    index = np.arange(len(context)) - np.repeat(first_columns, counts)

    columns = jax.tree.map(lambda x: x[context], slots)
    tokens = np.concatenate([np.asarray(context_ids, np.int32) for context_ids in ids])
    positions = columns.positions + index.astype(np.int32)
    return replace(columns, tokens=tokens, positions=positions), context, index


def pad_decode_batch(slots: DecodeBatch, extra: int) -> DecodeBatch:
    """Append ``extra`` idle slots."""
    if not extra:
        return slots

    # Only fields that the batch has, so that the trees of both are equal.
    optional: dict[str, Any] = {}
    if slots.offsets is not None:
        optional["offsets"] = np.zeros(extra, np.int32)
    if slots.adapter is not None:
        optional["adapter"] = np.zeros(extra, np.int32)
    if slots.states is not None:
        optional["states"] = np.full(extra, NULL_STATE, np.int32)
    if slots.truncation is not None:
        optional["truncation"] = Truncation(
            np.ones(extra, np.float32), np.zeros(extra, np.int32), np.zeros(extra, np.float32)
        )
    if slots.allowed is not None:
        optional["allowed"] = np.full((extra, slots.allowed.shape[1]), ALL_ALLOWED)

    padding = replace(make_decode_batch(extra, slots.pages.shape[1]), **optional)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), slots, padding)


def batches_of(extensions: list[Extension]) -> Iterator[list[Extension]]:
    """Yield PREFILL_ROWS at a time; one or two left over run alone.

    For so few, several programs of one row are faster than computing padding.
    """
    for i in range(0, len(extensions), PREFILL_ROWS):
        batch = extensions[i : i + PREFILL_ROWS]
        if len(batch) > PREFILL_ROWS // 2:
            yield batch
        else:
            for extension in batch:
                yield [extension]
