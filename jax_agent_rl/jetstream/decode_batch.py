"""What one decode dispatch runs: a slot for each context, and padding up to a compiled width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jax_agent_rl.jetstream.block_manager import NULL_PAGE

MAX_STOP_IDS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """What the W slots of one decode dispatch run; arrays of length W.

    Attributes:
        pages: int32 [W, n], of each slot's context in order, 0 where it has none (yet); all of an unused slot's are.
        tokens: int32, the last id of each context, not yet in the cache.
        positions: int32, where it goes: the number of ids the cache holds.
        remaining: int32, ids still allowed; 0 marks a slot that does not run.
        temperature, top_p: float32.
        top_k: int32.
        seed: uint32.
        stop_ids: int32 [W, n], ids that end the generation, padded with -1.
        offsets: int32, what pictures add to rotary positions; None where the model sees nothing.
        adapter: int32, number of the adapter among the engine's from 1 on, 0 for the plain model; None where it has
            none.
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


def make_decode_batch(count: int, pages: int) -> DecodeBatch:
    """Numpy slots of a given number, with room for ``pages`` each, greedy and not running, to be filled in."""
    arrays: dict[str, Any] = dict(  # numpy's on the host, which programs take for jax's
        pages=np.full((count, pages), NULL_PAGE, np.int32),
        tokens=np.zeros(count, np.int32),
        positions=np.zeros(count, np.int32),
        remaining=np.zeros(count, np.int32),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        seed=np.zeros(count, np.uint32),
        stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
    )
    return DecodeBatch(**arrays)


def idle_decode_batch(count: int, pages: int, position: int) -> DecodeBatch:
    """Slots without pages, to compile programs with."""
    slots = make_decode_batch(count, pages)
    slots.positions[:] = position
    return slots


def pad_decode_batch(slots: DecodeBatch, extra: int) -> DecodeBatch:
    """With ``extra`` slots that do not run."""
    if not extra:
        return slots
    optional = {name: np.zeros(extra, np.int32) for name in ("offsets", "adapter") if getattr(slots, name) is not None}
    padding = replace(make_decode_batch(extra, slots.pages.shape[1]), **optional)
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), slots, padding)
