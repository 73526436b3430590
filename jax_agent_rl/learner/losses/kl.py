"""Distance of the policy to the reference, per token. d = log pi - log pi_ref."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LIMIT = 20.0
MAX_STEP = 0.2  # of the adaptive controller


def kl_forward(estimator: str, logprob: Any, ref_logprob: Any, xp: ModuleType = np) -> Any:
    """Estimate the KL per token: k1 ``d``, abs ``|d|``, k2 ``d^2 / 2``, k3 ``exp(-d) + d - 1`` (d clamped to +-20).

    Args:
        estimator: its name; a trailing ``+`` is ignored.
        logprob: of the policy.
        ref_logprob: of the reference.
        xp: ``numpy`` or ``jax.numpy``, whose arrays are given and returned.

    References: Schulman 2020, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    delta = logprob - ref_logprob
    match estimator.removesuffix("+"):
        case "k1":
            return delta
        case "abs":
            return xp.abs(delta)
        case "k2":
            return delta * delta / 2
        case "k3":
            back = xp.clip(-delta, -LIMIT, LIMIT)
            return xp.exp(back) - back - 1
    raise ValueError(f"unknown KL estimator {estimator!r}; there are k1, abs, k2, k3, and k1+, abs+, k3+")


def kl_penalty(estimator: str, logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
    """Return an estimator to differentiate; with ``+`` its gradient is k2's, the unbiased one."""
    value = kl_forward(estimator, logprob, ref_logprob, jnp)
    if not estimator.endswith("+"):
        return value
    unbiased = kl_forward("k2", logprob, ref_logprob, jnp)
    return unbiased + jax.lax.stop_gradient(value - unbiased)


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """Proportional controller of the KL coefficient.

    Attributes:
        target: wanted KL, nats per token.
        horizon: trajectories over which the coefficient may change by 20 %.

    References: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.
    """

    target: float
    horizon: int

    def next(self, coef: float, kl: float, trajectories: int) -> float:
        """Return the coefficient after a step that measured ``kl``."""
        error = float(np.clip(kl / self.target - 1, -MAX_STEP, MAX_STEP))
        return coef * (1 + error * trajectories / self.horizon)
