"""The observation loss (ECHO): the policy learns to predict what tools and environments answer.

::

    L = L_policy + coef * mean over observed ids of -log p(id | all ids before it)

Observed ids were inserted after a turn, so nobody sampled them, and no advantage weighs them. A
failed trajectory says as much of its environment as one that solved its task.

References: Shrivastava et al. 2026, ECHO: Terminal Agents Learn World Models for Free,
    arXiv 2605.24517.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from jax_agent_rl.types import Trajectory

IsText = Callable[[Sequence[int]], Sequence[bool]]
"""Returns which of the ids inserted after a turn are to be predicted, [L]."""


def all_ids(appended_ids: Sequence[int]) -> list[bool]:
    """Select every id inserted after a turn, those of the chat template as well."""
    return [True] * len(appended_ids)


def observed_positions(sequence: Trajectory, is_text: IsText) -> np.ndarray:
    """Return the positions of the observed ids in the response of one sequence, int64 [O].

    Images and videos are not predicted, nor is what is inserted beside them.
    """
    positions = [np.zeros(0, np.int64)]
    start = 0
    for turn in sequence.turns:
        start += len(turn.output.token_ids)
        end = start + len(turn.appended_ids)
        # What carries a policy loss is predicted already.
        if turn.appended_ids and not turn.appended_media and not turn.learn_appended:
            positions.append(start + np.flatnonzero(is_text(turn.appended_ids)))
        start = end
    return np.concatenate(positions)


def observation_weights(
    trajectory_ids: Sequence[str], counts: Sequence[int], masked: Collection[str]
) -> np.ndarray:
    """Return the weight of an observed id of each trajectory of an update, float64 [N].

    All observed ids of the update weigh the same, and together 1.

    Args:
        counts: observed ids of each trajectory.
        masked: ids of trajectories that are not trained on.
    """
    is_trained = np.array([name not in masked for name in trajectory_ids], bool)
    total = np.asarray(counts)[is_trained].sum()
    return is_trained / max(total, 1)
