"""Distance of the policy to the reference, per token. d = log pi - log pi_ref."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LIMIT = 20.0
REST = 1e-4
"""Least probability of all ids that are not candidates together. What is left of 1 after float32 log-probs, which are
exact to some 1e-5, is not known much better; and a probability outside of them costs at most 9 nats."""
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


def top_k_kl(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """Return KL(policy || reference) over k ids of each position, and all others as one; [..., k] to [...].

    Merging ids never raises a KL: this is a lower bound of the whole one, equal to it if the ids are the vocabulary.

    Args:
        logprobs: of the policy, differentiable; -1e30 or less for ids that are excluded.
        ref_logprobs: of the reference, for the same ids.
    """
    probabilities = jnp.exp(logprobs)
    # Excluded ids count nothing, and their gradient is zero, not 0 x infinity.
    delta = jnp.where(probabilities > 0, logprobs - ref_logprobs, 0.0)
    rest, ref_rest = (
        jnp.log(jnp.maximum(1 - jnp.sum(p, axis=-1), REST)) for p in (probabilities, jnp.exp(ref_logprobs))
    )
    return jnp.sum(probabilities * delta, axis=-1) + jnp.exp(rest) * (rest - ref_rest)


def adapt_kl_coef(coef: float, kl: float, trajectories: int, *, target: float, horizon: int) -> float:
    """Return the KL coefficient after a step, by a proportional controller.

    Args:
        coef: before it.
        kl: that the step measured, nats per token.
        trajectories: of the step.
        target: the wanted KL.
        horizon: trajectories over which the coefficient may change by 20 %.

    References: Ziegler et al. 2019, Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593.
    """
    error = float(np.clip(kl / target - 1, -MAX_STEP, MAX_STEP))
    return coef * (1 + error * trajectories / horizon)
