"""Generalized advantage estimation over responses in which the world speaks too."""

from __future__ import annotations

import numpy as np


def gae(
    rewards_L: np.ndarray,
    values_L: np.ndarray,
    mask_L: np.ndarray,
    *,
    gamma: float,
    lam: float,
    value_after: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t`` over sampled tokens.

    Inserted ids take no time: the next value and the running advantage are those of the next sampled token, and values
    at mask 0 never matter. A reward on an inserted id belongs to the sampled token before it.

    Args:
        rewards_L, values_L: float64 [L]; ``values_L[t]`` is of the state in which id t was sampled.
        mask_L: bool [L].
        value_after: value of the state after the last id: 0 where the trajectory ended by itself.

    Returns:
        advantages and returns (``A + V``), float64 [L]; 0 at mask 0.

    References: Schulman et al. 2015, arXiv 1506.02438.
    """
    advantages_L, returns_L = np.zeros(len(rewards_L)), np.zeros(len(rewards_L))
    next_value, running, pending = value_after, 0.0, 0.0
    for t in reversed(range(len(rewards_L))):
        pending += rewards_L[t]
        if mask_L[t]:
            running = pending + gamma * next_value - values_L[t] + gamma * lam * running
            next_value, pending = values_L[t], 0.0
            advantages_L[t], returns_L[t] = running, running + values_L[t]
    return advantages_L, returns_L
