"""Policy losses with one ratio per trajectory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.learner.losses.terms import LossConfig, TermLoss, Terms, changed, log_ratio, sequence_mean

GSPO_LIMIT = 10.0


def gspo(terms: Terms, config: LossConfig) -> TermLoss:
    """The clipped surrogate of s, the geometric mean of the trajectory's ratios.

    Stop-gradient form: every token has the value ``sg(s)`` and the gradient of its own log-prob.

    References: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071.
    """
    mean = sequence_mean(terms.logprob - terms.old_logprob, terms)
    log_s = jax.lax.stop_gradient(mean - terms.logprob) + terms.logprob
    ratio = jnp.exp(jnp.minimum(log_s, GSPO_LIMIT))
    plain = -terms.advantage * ratio
    loss = jnp.maximum(plain, -terms.advantage * jnp.clip(ratio, 1 - config.low, 1 + config.high))
    return TermLoss(loss, ratio, changed(loss, plain))


def geo_mean(terms: Terms, config: LossConfig) -> TermLoss:
    """``-A`` times the geometric mean of the trajectory's ratios, each clipped in the log to [-low, high].

    The clip is one-sided as PPO's is: what lowers the objective passes. Every token has its trajectory's loss, so the
    mean over tokens, then trajectories, is the paper's loss.

    References: Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv 2507.20673.
    """
    delta, sign = log_ratio(terms), jnp.sign(terms.advantage)
    clipped = jnp.clip(delta, -config.low, config.high)
    pessimistic = sign * jnp.minimum(sign * delta, sign * clipped)
    ratio = jnp.exp(sequence_mean(pessimistic, terms))
    return TermLoss(-sequence_mean(terms.advantage, terms) * ratio, ratio, changed(pessimistic, delta))
