"""What a step's groups say about the difficulty of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_agent_rl.data.curriculum import POOLS, DifficultyPools
from jax_agent_rl.outcomes import accuracy
from jax_agent_rl.types import Group


def record_pass_rates(pools: DifficultyPools, groups: Sequence[Group]) -> dict[str, float]:
    """Add the pass rates of a step's groups to the pools; return metrics.

    A group's pass rate is its mean accuracy. ``curriculum/drawn_<pool>`` counts the
    groups by the pool that their rows were drawn from. Rows of some pools are drawn less often than
    others, so the accuracy of what was drawn is no estimate of the accuracy on the data.
    ``curriculum/accuracy`` is one: each group weighs the inverse of the probability with which its
    row was admitted.

    Args:
        groups: of the step, before any filter. A group without a survivor says nothing.
    """
    drawn = dict.fromkeys(POOLS, 0)
    weights = []
    pass_rates = []
    for group in groups:
        if not group.trajectories:
            continue
        pass_rate = float(np.mean([accuracy(member) for member in group.trajectories]))
        drawn_row = pools.record(group.trajectories[0].row, pass_rate)
        if drawn_row is None:
            continue
        drawn[drawn_row.pool] += 1
        weights.append(1 / drawn_row.probability)
        pass_rates.append(pass_rate)

    metrics = {f"curriculum/drawn_{pool}": float(count) for pool, count in drawn.items()}
    if weights:
        metrics["curriculum/accuracy"] = float(np.average(pass_rates, weights=weights))
    return metrics | pools.end_step()
