"""What a sample of rollouts says about a policy: pass@k and how sure one may be of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
_Z = 1.959964  # of 95 %


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the interval that holds the true one with 95 % confidence; None where there is none."""

    mean: float
    low: float | None
    high: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that at least one of ``k`` samples passes, estimated without bias from ``samples`` >= k of them.

    ``1 - C(samples - passed, k) / C(samples, k)``, as in Chen et al. 2021 (https://arxiv.org/abs/2107.03374), eq. 1.
    ``1 - (1 - passed/samples) ** k`` would be too low.

    >>> pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4), pass_at_k(4, 2, 3)
    (0.5, 0.8333, 1.0)

    Raises:
        ValueError: ``k`` is more than ``samples``, or ``passed`` is.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples of which {passed} passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def estimate(values: Sequence[float], *, seed: int, share: bool = False) -> Estimate:
    """Mean over prompts, with the percentile bootstrap over *prompts*: samples of one prompt are not independent.

    Args:
        values: one per prompt.
        seed: of the resampling.
        share: the values are in [0, 1]. Where all are the same, 0 perhaps, resampling would claim certainty; then the
            interval is Wilson's for such a share of so many prompts. Other values that are all the same have none:
            nothing says how far from them the next one may be.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no prompts to take a mean of")
    array = np.asarray(values, np.float64)
    if array.min() == array.max():
        return wilson(float(array[0]), len(array)) if share else Estimate(float(array[0]), None, None)
    rng = np.random.default_rng(seed)
    means = [rng.choice(array, len(array)).mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(array.mean()), float(low), float(high))


def wilson(share: float, trials: int) -> Estimate:
    """A share of so many independent trials, with Wilson's score interval (1927).

    >>> wilson(0.0, 20)
    Estimate(mean=0.0, low=0.0, high=0.16112515...)
    """
    square = _Z**2 / trials
    centre = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt((share * (1 - share) + square / 4) / trials) / (1 + square)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(share, low if share > 0 else 0.0, high if share < 1 else 1.0)  # exactly, but for rounding
