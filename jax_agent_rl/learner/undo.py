"""Undo of a step: host memory keeps the learner's state before its updates, until all are done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import numpy as np

from jax_agent_rl.learner.cancellation import StepCancellation

Bounds = tuple[tuple[int | None, int | None], ...]
"""The part of an array that a shard holds: begin and end along each axis."""


class HostState:
    """A copy of a learner's state in host memory, for rollback.

    It holds the shards that are on devices of this process.

    Args:
        state: may be donated afterwards.
    """

    def __init__(self, state: Any) -> None:
        leaves, self._tree = jax.tree.flatten(state)
        self._arrays = [_HostArray(leaf) for leaf in leaves]

    def on_device(self) -> Any:
        """Place the state on its devices again."""
        return jax.tree.unflatten(self._tree, [array.on_device() for array in self._arrays])


class _HostArray:
    """A copy of one array of a state."""

    def __init__(self, array: jax.Array) -> None:
        self._shape = array.shape
        self._sharding = array.sharding
        self._shards: dict[Bounds, np.ndarray] = {}
        for shard in array.addressable_shards:
            self._shards[_bounds(shard.index)] = np.array(shard.data)

    def on_device(self) -> jax.Array:
        return jax.make_array_from_callback(
            self._shape,
            self._sharding,
            lambda index: self._shards[_bounds(index)],
        )


def _bounds(index: tuple[slice, ...] | None) -> Bounds:
    return tuple((part.start, part.stop) for part in index or ())


class Undoable(Protocol):
    """A learner whose updates can be undone.

    Attributes:
        state_before: the state before the updates that may be undone; None at other times.
    """

    state: Any
    state_before: HostState | None


@contextlib.contextmanager
def all_or_nothing(
    learner: Undoable, cancellation: StepCancellation, *, updates: int
) -> Iterator[None]:
    """Undo the updates made within if one fails or the step is cancelled.

    Args:
        updates: how many there are. A single one changes everything or nothing by itself, so no
            state is kept for it.
    """
    if updates == 1:
        yield
        return

    state_before = HostState(learner.state)
    learner.state_before = state_before
    try:
        with cancellation.revocable():
            yield
    except BaseException:
        learner.state = state_before.on_device()
        raise
    finally:
        learner.state_before = None
