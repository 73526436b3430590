"""Losses that single out the tokens whose log-prob and advantage covary most: they cost entropy.

Which tokens those are is a property of the whole mini-batch, so they are chosen before it is cut into micro-batches
(numpy, on log-probs of the current policy), and the losses only look at ``Terms.chosen``.

References: Cui et al. 2025, The Entropy Mechanism of RL for Reasoning LMs, arXiv 2505.22617.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jax_agent_rl.learner.losses.terms import LOG_RATIO_LIMIT, LossConfig, TermLoss, Terms, changed, log_ratio


def clip_cov(terms: Terms, config: LossConfig) -> TermLoss:
    """PPO's clipped surrogate without dual clip; the chosen tokens are left out."""
    ratio, advantage = jnp.exp(log_ratio(terms)), terms.advantage
    plain = -advantage * ratio
    surrogate = jnp.maximum(plain, -advantage * jnp.clip(ratio, 1 - config.low, 1 + config.high))
    return TermLoss(surrogate * (1 - terms.chosen), ratio, jnp.maximum(changed(surrogate, plain), terms.chosen))


def kl_cov(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A r``, plus ``ppo_kl_coef |log r|`` for the selected tokens."""
    delta = log_ratio(terms)
    ratio = jnp.exp(delta)
    penalty = config.own.ppo_kl_coef * jnp.abs(delta) * terms.chosen
    return TermLoss(-terms.advantage * ratio + penalty, ratio, terms.chosen)


def covariances(logprobs_T: np.ndarray, advantages_T: np.ndarray) -> np.ndarray:
    """Return ``(A - mean A)(log pi - mean log pi)`` of each of a mini-batch's T tokens, float64."""
    return (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


def choose_clip_cov(
    logprobs_T: np.ndarray, old_T: np.ndarray, advantages_T: np.ndarray, config: LossConfig, rng: np.random.Generator
) -> np.ndarray:
    """Select a random ``clip_cov_ratio`` of the tokens (at least one) with covariance within the bounds; bool [T].

    Tokens that PPO's clip silences anyway are not chosen.
    """
    covariance = covariances(logprobs_T, advantages_T)
    ratio = np.exp(np.clip(logprobs_T - old_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain, clipped = -advantages_T * ratio, -advantages_T * np.clip(ratio, 1 - config.low, 1 + config.high)
    between = (covariance > config.own.clip_cov_lb) & (covariance < config.own.clip_cov_ub) & (clipped <= plain)
    candidates = np.flatnonzero(between)
    count = min(len(candidates), max(1, int(config.own.clip_cov_ratio * len(covariance))))
    return _mask(rng.choice(candidates, count, replace=False) if count else candidates, len(covariance))


def choose_kl_cov(
    logprobs_T: np.ndarray, old_T: np.ndarray, advantages_T: np.ndarray, config: LossConfig, rng: np.random.Generator
) -> np.ndarray:
    """Select the ``kl_cov_ratio`` of the tokens (at least one) with the largest covariance; bool [T]."""
    covariance = covariances(logprobs_T, advantages_T)
    count = max(1, int(config.own.kl_cov_ratio * len(covariance)))
    return _mask(np.argsort(-covariance, kind="stable")[:count], len(covariance))


def _mask(indices: np.ndarray, length: int) -> np.ndarray:
    mask = np.zeros(length, bool)
    mask[indices] = True
    return mask


SELECTORS = {"clip_cov": choose_clip_cov, "kl_cov": choose_kl_cov}


def select_terms(
    current: Sequence[np.ndarray],
    terms: Mapping[str, Sequence[np.ndarray]],
    active: Sequence[np.ndarray],
    config: LossConfig,
    *,
    seed: int,
) -> list[np.ndarray]:
    """Select the tokens that a covariance loss treats apart, over the active ones of a whole mini-batch.

    Args:
        current: per trajectory log-probs [S] under the current policy.
        terms: the policy's terms by name; ``old_logprob`` defaults to ``current``.
        active: per trajectory bool [S].
        config: of the loss; its name selects the rule.
        seed: of the random choice.

    Returns:
        per trajectory float64 [S], 1 where selected.
    """
    logprob, old, advantage = (
        np.concatenate([v[m] for v, m in zip(values, active, strict=True)])
        for values in (current, terms.get("old_logprob", current), terms["advantage"])
    )
    chosen = [np.zeros(len(mask)) for mask in active]
    if len(logprob):
        picked = SELECTORS[config.own.loss_mode](logprob, old, advantage, config, np.random.default_rng(seed))
        parts = np.split(picked, np.cumsum([mask.sum() for mask in active])[:-1])
        for own, mask, part in zip(chosen, active, parts, strict=True):
            own[mask] = part
    return chosen
