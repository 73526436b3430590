"""The KL to the reference: estimators, its gradient, and the controller of its coefficient."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MAX_LOG_RATIO = 20.0

_MIN_OTHER_PROBABILITY = 1e-4
"""Lower bound for the probability of all ids together that are not candidates. It is what the
candidates leave of 1; float32 log-probs are exact to some 1e-5, so it is not known much better.
With this bound, the ids that are not candidates cost at most 9 nats."""

_MAX_KL_ERROR = 0.2
"""Relative errors of the KL are clipped to it, so that the coefficient changes slowly."""


def kl_forward(estimator: str, logprob: Any, ref_logprob: Any, xp: ModuleType = np) -> Any:
    """Estimate the KL per token from ``d = logprob - ref_logprob``.

    k1 ``d``, abs ``|d|``, k2 ``d^2 / 2``, k3 ``exp(-d) + d - 1`` (d clamped to +-20).

    Args:
        estimator: a trailing ``+`` is ignored.
        logprob: of the policy.
        ref_logprob: of the reference.
        xp: ``numpy`` or ``jax.numpy``, for arrays of this kind.

    References: Schulman 2020, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    log_ratio = logprob - ref_logprob
    match estimator.removesuffix("+"):
        case "k1":
            return log_ratio
        case "abs":
            return xp.abs(log_ratio)
        case "k2":
            return log_ratio * log_ratio / 2
        case "k3":
            ref_log_ratio = xp.clip(-log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            return xp.exp(ref_log_ratio) - ref_log_ratio - 1
    raise ValueError(
        f"unknown KL estimator {estimator!r}; there are k1, abs, k2, k3, and k1+, abs+, k3+"
    )


def kl_penalty(estimator: str, logprob: jax.Array, ref_logprob: jax.Array) -> jax.Array:
    """Return an estimator to differentiate; with ``+`` its gradient is k2's, the unbiased one."""
    value = kl_forward(estimator, logprob, ref_logprob, jnp)
    if not estimator.endswith("+"):
        return value
    unbiased = kl_forward("k2", logprob, ref_logprob, jnp)
    return unbiased + jax.lax.stop_gradient(value - unbiased)


def top_k_kl(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """Return KL(policy || reference) over k ids of each position, and all others as one.

    Merging ids never raises a KL. So this is a lower bound of the full KL, and equal to it if the
    ids are the vocabulary.

    Args:
        logprobs: float32 [..., k], of the policy; differentiable. -1e30 or less for excluded ids.
        ref_logprobs: of the reference, for the same ids.

    Returns:
        float32 [...].
    """
    probabilities = jnp.exp(logprobs)
    # Excluded ids count nothing, and their gradient is zero, not 0 x infinity.
    log_ratio = jnp.where(probabilities > 0, logprobs - ref_logprobs, 0.0)

    other_logprob = _other_logprob(probabilities)
    ref_other_logprob = _other_logprob(jnp.exp(ref_logprobs))
    candidates_kl = jnp.sum(probabilities * log_ratio, axis=-1)
    return candidates_kl + jnp.exp(other_logprob) * (other_logprob - ref_other_logprob)


def _other_logprob(probabilities: jax.Array) -> jax.Array:
    """Return the log-prob of all ids together that are not candidates, [..., k] to [...]."""
    other_probability = 1 - jnp.sum(probabilities, axis=-1)
    return jnp.log(jnp.maximum(other_probability, _MIN_OTHER_PROBABILITY))


def adapt_kl_coef(
    coef: float,
    kl: float,
    trajectories: int,
    *,
    target: float,
    horizon: int,
) -> float:
    """Return the KL coefficient after a step, by a proportional controller.

    Args:
        coef: before the step.
        kl: measured in the step, nats per token.
        trajectories: number of trajectories of the step.
        target: the wanted KL.
        horizon: trajectories over which the coefficient may change by 20 %.

    References: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv
    1909.08593.
    """
    error = float(np.clip(kl / target - 1, -_MAX_KL_ERROR, _MAX_KL_ERROR))
    return coef * (1 + error * trajectories / horizon)
