"""Recurrent states on the device: slots of ``KVCache.states``, see ``jetstream.state_slots``.

Shapes: N slots, R rows. All arrays of a state have slots, or rows, as their first axis.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jax_agent_rl.jetstream.kv_cache import KVCache, write_pages
from jax_agent_rl.jetstream.state_slots import NULL_STATE

States = tuple[Any, ...]
"""The state of each layer, None for those that have none; empty for models without recurrent
layers."""


class StateChunk(Protocol):
    """What a chunk of each row brings to a layer's states.

    Attributes:
        state: the states after the chunks, padding left out.
    """

    state: Any

    def after(self, before: Any, counts: jax.Array) -> Any:
        """Return the states after the first ``counts``, int32 [R], tokens of each row."""
        ...


def states_after_chunks(chunks: tuple[StateChunk | None, ...]) -> States:
    """Return the states of all layers after whole chunks."""
    states: list[Any] = []
    for chunk in chunks:
        states.append(None if chunk is None else chunk.state)
    return tuple(states)


def states_after(
    before: States, chunks: tuple[StateChunk | None, ...], counts: jax.Array
) -> States:
    """Return the states of all layers after the first ``counts``, int32 [R], tokens of chunks.

    Args:
        before: rows from before the chunks.
        chunks: of all layers.
    """
    states: list[Any] = []
    for state, chunk in zip(before, chunks, strict=True):
        states.append(None if chunk is None else chunk.after(state, counts))
    return tuple(states)


def gather_states(states: States, slots: jax.Array | None) -> States:
    """Return the states of slots int32 [R] as rows; None for models without."""
    if slots is None:
        return states
    return jax.tree.map(lambda x: x.at[slots].get(mode="clip"), states)


def write_states(states: States, rows: States, slots: jax.Array | None) -> States:
    """Write rows to slots int32 [R], which are distinct except for the null slot."""
    if slots is None:
        return states

    def write(x: jax.Array, row: jax.Array) -> jax.Array:
        # What goes to the null slot is written past the end, which drops it.
        targets = jnp.where(slots == NULL_STATE, len(x), slots)
        return x.at[targets].set(row.astype(x.dtype), mode="drop")

    return jax.tree.map(write, states, rows)


def write_chunks(
    cache: KVCache, chunks: KVCache, pages: jax.Array, slots: jax.Array | None = None
) -> KVCache:
    """Write rows of pages and of states to the pages int32 [R, n] and the slots int32 [R]."""
    written = write_pages(cache, chunks, pages)
    return replace(written, states=write_states(cache.states, chunks.states, slots))


def where_rows(condition: jax.Array, rows: Any, others: Any) -> Any:
    """Take rows of a state where ``condition``, bool [R], is true, and others elsewhere."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, rows, others)


def copy_state(cache: KVCache, source_and_target: jax.Array) -> KVCache:
    """Copy the state of one slot over another; their numbers are int32 [2]."""
    return put_state(cache, get_state(cache, source_and_target[0]), source_and_target[1])


def get_state(cache: KVCache, slot: jax.Array) -> States:
    """Return a copy of the state of a slot, int32 [], as one row."""
    return jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=True), cache.states
    )


def put_state(cache: KVCache, row: States, slot: jax.Array) -> KVCache:
    """Overwrite the state of a slot, int32 [], with one row."""

    def put(x: jax.Array, row: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(x, row.astype(x.dtype), slot, axis=0)

    return replace(cache, states=jax.tree.map(put, cache.states, row))
