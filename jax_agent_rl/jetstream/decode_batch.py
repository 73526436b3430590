"""Inputs of one dispatch: chunks to prefill, or a slot for each context to decode, padded to a compiled width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.jetstream.block_manager import NULL_PAGE
from jax_agent_rl.models.vision.context import MultimodalContext

MAX_STOP_IDS = 8


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """The W slots of one decode dispatch; arrays of length W.

    Attributes:
        pages: int32 [W, n], pages of each slot's context in order; 0 where there is none.
        tokens: int32, the last id of each context, not yet in the cache.
        positions: int32, its position, which is the number of cached ids.
        remaining: int32, ids still allowed; 0 marks an idle slot.
        temperature, top_p: float32.
        top_k: int32.
        seed: uint32.
        stop_ids: int32 [W, n], ids that end the generation, padded with -1.
        offsets: int32, what images add to rotary positions; None for text models.
        adapter: int32, index of the LoRA adapter counted from 1, 0 for the base model; None for engines without.
    """

    pages: jax.Array
    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    stop_ids: jax.Array
    offsets: jax.Array | None = None
    adapter: jax.Array | None = None


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
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        seed=np.zeros(count, np.uint32),
        stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
    )
    return DecodeBatch(**arrays)


def pad_decode_batch(slots: DecodeBatch, extra: int) -> DecodeBatch:
    """Append ``extra`` idle slots."""
    if not extra:
        return slots
    optional = {name: np.zeros(extra, np.int32) for name in ("offsets", "adapter") if getattr(slots, name) is not None}
    padding = replace(make_decode_batch(extra, slots.pages.shape[1]), **optional)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), slots, padding)
