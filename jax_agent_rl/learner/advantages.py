"""Group advantages: one number per trajectory from the rewards of its group (all of one prompt).

Shapes: G trajectories of one group. Plain float64 numpy: groups are small, and exactness is worth more than speed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPSILON = 1e-6


def grpo(rewards_G: np.ndarray) -> np.ndarray:
    """``(r - mean) / (std + 1e-6)`` with the unbiased standard deviation.

    A group of one has mean 0 and deviation 1, so its advantage is (up to epsilon) its reward.

    References: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300 (equation for outcome supervision).
    """
    if len(rewards_G) == 1:
        return rewards_G / (1 + EPSILON)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)


def dr_grpo(rewards_G: np.ndarray) -> np.ndarray:
    """``r - mean``: no division, so easy and hard prompts are not weighted up.

    References: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: np.ndarray) -> np.ndarray:
    """Reward minus the mean of the *others*: ``n / (n - 1) * (r - mean)``; a group of one keeps its reward.

    References: Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740.
    """
    count = len(rewards_G)
    if count == 1:
        return rewards_G.copy()
    return (rewards_G - rewards_G.mean()) * count / (count - 1)


ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def advantages(estimator: str, rewards_G: np.ndarray) -> np.ndarray:
    """Float64 advantages [G] by the estimator's name (``algorithm.adv_estimator``)."""
    return ESTIMATORS[estimator](np.asarray(rewards_G, np.float64))
