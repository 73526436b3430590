"""The experts that engines chose, laid out over packed rows for router replay (``jax_agent_rl.routed_experts``).

Sequences that share a node have one choice for it: that of the first sequence that knows one. They differ only where
the engine computed a prefix more than once, and rounded differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jax_agent_rl.types import Trajectory

if TYPE_CHECKING:
    from jax_agent_rl.learner.batch import Batch

UNKNOWN = -1  # the router chooses itself


def pack_routed(
    sequences: Sequence[Trajectory], paths: Iterable[tuple[int, int, np.ndarray]], rows: tuple[int, int]
) -> np.ndarray | None:
    """Return ``Batch.routed_experts``; None if no engine reported any.

    Args:
        sequences: of the batch.
        paths: row, number and nodes int64 [n] of each sequence.
        rows: R rows of T nodes.
    """
    reported = (turn.output.routed_experts for sequence in sequences for turn in sequence.turns)
    sizes = {routed.shape[1:] for routed in reported if routed is not None}
    if not sizes:
        return None
    (size,) = sizes  # one model made them all
    packed = np.full((*rows, *size), UNKNOWN, np.int16)
    for row, number, path in paths:
        for turn in sequences[number].turns:
            routed = turn.output.routed_experts
            if routed is None:
                continue
            nodes = path[routed.start : routed.end]
            fresh = packed[row, nodes, 0, 0] == UNKNOWN
            packed[row, nodes[fresh]] = np.reshape(routed.numbers, routed.shape)[: len(nodes)][fresh]
    return packed


def replay_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Return ``router_replay_share``: of the computed tokens, those that took the engine's experts."""
    computed = sum(int((batch.copies > 0).sum()) for batch in batches)
    arrays = (batch.routed_experts for batch in batches)
    known = sum(int((array[..., 0, 0] != UNKNOWN).sum()) for array in arrays if array is not None)
    return {"router_replay_share": known / computed}
