"""Advantages of whole trajectories within their group. Shapes: G trajectories of one group.

Plain float64 numpy: groups are small, and exactness is worth more than speed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPSILON = 1e-6


def grpo(rewards_G: np.ndarray, lengths_G: np.ndarray | None = None) -> np.ndarray:
    """``(S - mean) / (std + 1e-6)`` with the unbiased standard deviation.

    A group of one has mean 0 and deviation 1, so its advantage is (up to epsilon) its reward.

    References: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300 (equation for outcome supervision).
    """
    if len(rewards_G) == 1:
        return rewards_G / (1 + EPSILON)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)


def dr_grpo(rewards_G: np.ndarray, lengths_G: np.ndarray | None = None) -> np.ndarray:
    """``S - mean``: no division, so easy and hard prompts are not weighted up.

    References: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: np.ndarray, lengths_G: np.ndarray | None = None) -> np.ndarray:
    """Reward minus the mean of the *others*: ``n / (n - 1) * (S - mean)``; a group of one keeps its reward.

    References: Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740.
    """
    count = len(rewards_G)
    if count == 1:
        return rewards_G.copy()
    return (rewards_G - rewards_G.mean()) * count / (count - 1)


def opo(rewards_G: np.ndarray, lengths_G: np.ndarray) -> np.ndarray:
    """Reward minus its length-weighted mean, the baseline of least variance; a group of one keeps its reward.

    Args:
        rewards_G: float64 [G].
        lengths_G: sampled tokens of each.

    References: Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
    """
    if len(rewards_G) == 1:
        return rewards_G.copy()
    return rewards_G - np.average(rewards_G, weights=lengths_G)


def grpo_passk(rewards_G: np.ndarray, lengths_G: np.ndarray | None = None) -> np.ndarray:
    """Only the best gets an advantage: its lead over the second, by the standard deviation. The first of equals.

    References: Tang et al. 2025, Optimizing LMs for Inference Time Objectives, arXiv 2503.19595.
    """
    advantages_G = np.zeros(len(rewards_G))
    if len(rewards_G) > 1:
        second, best = np.sort(rewards_G)[-2:]
        advantages_G[rewards_G.argmax()] = (best - second) / (rewards_G.std(ddof=1) + EPSILON)
    return advantages_G


OUTCOME_ESTIMATORS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "grpo_passk": grpo_passk,
}
