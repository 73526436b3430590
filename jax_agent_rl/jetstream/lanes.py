"""What one decode dispatch runs: a lane for each context, and padding up to a compiled width."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

MAX_STOP_IDS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lanes:
    """What the W lanes of one decode dispatch run; arrays of length W.

    Attributes:
        rows: int32, cache row of each lane; a row >= the cache's marks an unused lane.
        tokens: int32, the last id of each context, not yet in the cache.
        positions: int32, where it goes: the number of ids the cache holds.
        remaining: int32, ids still allowed; 0 marks a lane that does not run.
        temperature, top_p: float32.
        top_k: int32.
        seed: uint32.
        stop_ids: int32 [W, n], ids that end the generation, padded with -1.
        offsets: int32, what pictures add to rotary positions; None where the model sees nothing.
    """

    rows: jax.Array
    tokens: jax.Array
    positions: jax.Array
    remaining: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    stop_ids: jax.Array
    offsets: jax.Array | None = None


def make_lanes(count: int) -> Lanes:
    """Numpy lanes of a given number, greedy and not running, to be filled in."""
    return Lanes(
        rows=np.zeros(count, np.int32),
        tokens=np.zeros(count, np.int32),
        positions=np.zeros(count, np.int32),
        remaining=np.zeros(count, np.int32),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        seed=np.zeros(count, np.uint32),
        stop_ids=np.full((count, MAX_STOP_IDS), -1, np.int32),
    )


def idle_lanes(count: int, position: int) -> Lanes:
    """Lanes of rows that do not exist, to compile programs with."""
    lanes = make_lanes(count)
    lanes.positions[:] = position
    lanes.rows[:] = np.iinfo(np.int32).max
    return lanes


def pad_lanes(lanes: Lanes, extra: int, *, unused_row: int) -> Lanes:
    """With ``extra`` lanes that do not run."""
    if not extra:
        return lanes
    padding = make_lanes(extra)
    padding.rows[:] = unused_row
    if lanes.offsets is not None:
        padding = replace(padding, offsets=np.zeros(extra, np.int32))
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), lanes, padding)
