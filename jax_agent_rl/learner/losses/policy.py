"""Policy losses by name (``algorithm.policy_loss.loss_mode``), ``(Terms, LossConfig) -> TermLoss``.

::

    one ratio per token                   vanilla decoupled cispo gpg sapo dppo_tv dppo_kl dro
    one ratio per trajectory              gspo geo_mean
    tokens selected over the mini-batch   clip_cov kl_cov

Shapes: R rows, K terms (sampled tokens) per row. In formulas, A is the advantage and r the ratio to
    the old policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config.algorithm import PolicyLossConfig
from jax_agent_rl.utils.plugins import load_installed

sg = jax.lax.stop_gradient
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Constants of the losses.

    Attributes:
        low: clip range below 1.
        high: clip range above 1.
        dual: dual clip: for a negative advantage, the loss is at most ``-advantage * dual``. None
            without one.
        policy_loss: the name of the loss, and keys that single losses read.
    """

    low: float
    high: float
    dual: float | None
    policy_loss: PolicyLossConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Terms:
    """Everything a loss may look at.

    Attributes:
        logprob: float32 [R, K], of the policy that is trained; differentiable.
        old_logprob: of the policy before this step. If the rollout's policy is older, this is the
            proximal policy.
        rollout_logprob: of the policy that sampled (the behaviour policy).
        advantage: float32 [R, K].
        active: float32 [R, K], 1 for terms that are trained on.
        sequence: int32 [R, K], number within its row of the trajectory, or segment of one, that a
            term belongs to.
        chosen: float32 [R, K], 1 for terms that a covariance loss singles out.
    """

    logprob: jax.Array
    old_logprob: jax.Array
    rollout_logprob: jax.Array
    advantage: jax.Array
    active: jax.Array
    sequence: jax.Array
    chosen: jax.Array


class TermLoss(NamedTuple):
    """Float32 [R, K] each: the loss, the ratio in it, and 1 where a clip or a mask changed it.

    A clip or a mask changes nothing for a token of advantage 0, so such a token is never marked:
    every loss makes ``clipped`` with :func:`where_it_matters`. The exception is :func:`kl_cov`,
    whose penalty does not depend on the advantage.
    """

    loss: jax.Array
    ratio: jax.Array
    clipped: jax.Array


def log_ratio(terms: Terms) -> jax.Array:
    """Return ``log pi - log pi_old``, clamped to +-20."""
    return jnp.clip(terms.logprob - terms.old_logprob, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_mean(values: jax.Array, terms: Terms) -> jax.Array:
    """Average over the active terms of each sequence, at each of its terms; [R, K] to [R, K].

    A sequence lies in one row as a whole, so the mean does not depend on how rows are cut into
    micro-batches.
    """

    def row(values: jax.Array, active: jax.Array, sequence: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(values * active, sequence, num_segments=len(values))
        count = jax.ops.segment_sum(active, sequence, num_segments=len(values))
        return (total / jnp.maximum(count, 1.0))[sequence]

    return jax.vmap(row)(values, terms.active, terms.sequence)


def changed(after: jax.Array, before: jax.Array) -> jax.Array:
    """Return 1.0 where clipping made a difference."""
    return (after != before).astype(jnp.float32)


def where_it_matters(terms: Terms, clipped: jax.Array) -> jax.Array:
    """Return 1.0 for clipped terms whose loss the clip changes: not for those whose advantage is 0.

    Args:
        clipped: bool or 0 and 1, [R, K]: clipped, or left out.
    """
    return jnp.where((clipped > 0) & (terms.advantage != 0), 1.0, 0.0)


def _clipped_surrogate(
    ratio: jax.Array,
    terms: Terms,
    config: LossConfig,
) -> tuple[jax.Array, jax.Array]:
    """Return ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and ``-A r``."""
    unclipped = -terms.advantage * ratio
    clipped = -terms.advantage * jnp.clip(ratio, 1 - config.low, 1 + config.high)
    return jnp.maximum(unclipped, clipped), unclipped


def vanilla(terms: Terms, config: LossConfig) -> TermLoss:
    """PPO's clipped surrogate ``max(-A r, -A clip(r, 1 - low, 1 + high))``.

    With ``dual`` it is at most ``-A dual`` where A < 0.

    References: Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et al. 2020, arXiv 1912.09729;
    clip-higher: Yu et al. 2025 (DAPO), arXiv 2503.14476.
    """
    ratio = jnp.exp(log_ratio(terms))
    loss, unclipped = _clipped_surrogate(ratio, terms, config)
    if config.dual is not None:
        bounded = jnp.minimum(loss, -terms.advantage * config.dual)
        loss = jnp.where(terms.advantage < 0, bounded, loss)
    return TermLoss(loss, ratio, where_it_matters(terms, changed(loss, unclipped)))


def decoupled(terms: Terms, config: LossConfig) -> TermLoss:
    """:func:`vanilla` around the proximal policy, times its ratio to the behaviour policy.

    Tokens for which this second ratio is above ``behav_imp_weight_cap`` are left out.

    References: Hilton et al. 2021, Batch size-invariance, arXiv 2110.00641; Fu et al. 2025 (AReaL),
    arXiv 2505.24298.
    """
    surrogate = vanilla(terms, config)
    behaviour_log_ratio = terms.old_logprob - terms.rollout_logprob
    behaviour_ratio = jnp.exp(jnp.clip(behaviour_log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    is_below_cap = behaviour_ratio <= config.policy_loss.behav_imp_weight_cap
    loss = jnp.where(is_below_cap, surrogate.loss * behaviour_ratio, 0.0)
    clipped = jnp.maximum(surrogate.clipped, where_it_matters(terms, ~is_below_cap))
    return TermLoss(loss, surrogate.ratio, clipped)


def cispo(terms: Terms, config: LossConfig) -> TermLoss:
    """``-sg(clip(r)) A log pi``: the weight is clipped, the gradient never is.

    References: MiniMax 2025, MiniMax-M1, arXiv 2506.13585.
    """
    ratio = jnp.exp(log_ratio(terms))
    clipped = jnp.clip(ratio, 1 - config.low, 1 + config.high)
    loss = -sg(clipped) * terms.advantage * terms.logprob
    return TermLoss(loss, ratio, where_it_matters(terms, changed(clipped, ratio)))


def gpg(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A log pi``: the plain policy gradient.

    References: Chu et al. 2025, GPG, arXiv 2504.02546.
    """
    ratio = jnp.exp(log_ratio(terms))
    return TermLoss(-terms.advantage * terms.logprob, ratio, jnp.zeros_like(ratio))


def sapo(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A (4 / tau) sigmoid(tau (r - 1))``.

    It is steeper for tokens without a positive advantage.

    References: Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv 2511.20347.
    """
    ratio = jnp.exp(log_ratio(terms))
    tau = jnp.where(terms.advantage > 0, config.policy_loss.tau_pos, config.policy_loss.tau_neg)
    gate = jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TermLoss(-terms.advantage * gate, ratio, jnp.zeros_like(ratio))


def dppo_tv(terms: Terms, config: LossConfig) -> TermLoss:
    """Policy gradient with a truncated ratio, within a trust region.

    A token whose probability has already moved further than the clip range has no loss.
    ``low``/``high`` bound ``pi - pi_old``, the total variation of "this token or another".

    References: Qi et al. 2026, DPPO, arXiv 2602.04879.
    """
    difference = jnp.exp(terms.logprob) - jnp.exp(terms.old_logprob)
    is_trusted = jnp.where(
        terms.advantage > 0,
        difference <= config.high,
        difference >= -config.low,
    )
    return _trust_region_loss(terms, config, is_trusted)


def dppo_kl(terms: Terms, config: LossConfig) -> TermLoss:
    """:func:`dppo_tv` with a KL divergence in place of the total variation.

    It is the divergence of "this token or another" from the old policy to the new.

    References: Qi et al. 2026, DPPO, arXiv 2602.04879.
    """
    tiny = 1e-8  # keeps the log of the other tokens' probability finite
    new = jnp.exp(terms.logprob)
    old = jnp.exp(terms.old_logprob)
    new_others = -jnp.expm1(terms.logprob)  # probability of all other tokens together
    old_others = -jnp.expm1(terms.old_logprob)
    of_token = old * (terms.old_logprob - terms.logprob)
    of_others = old_others * jnp.log((old_others + tiny) / (new_others + tiny))
    divergence = of_token + of_others

    # What brings the probability back towards the old one is always allowed.
    may_rise = (divergence <= config.high) | (new <= old)
    may_fall = (divergence <= config.low) | (new >= old)
    is_trusted = jnp.where(terms.advantage > 0, may_rise, may_fall)
    return _trust_region_loss(terms, config, is_trusted)


def _trust_region_loss(terms: Terms, config: LossConfig, is_trusted: jax.Array) -> TermLoss:
    ratio = jnp.exp(log_ratio(terms))
    weight = sg(jnp.minimum(ratio, config.policy_loss.dppo_ratio_cap) * is_trusted)
    loss = -weight * terms.advantage * terms.logprob
    return TermLoss(loss, ratio, where_it_matters(terms, ~is_trusted))


def dro(terms: Terms, config: LossConfig) -> TermLoss:
    """``-(log pi A - beta / 2 d^2)``, d the log-ratio: off-policy without any ratio.

    References: Richemond et al. 2024, Offline Regularised RL for LLM alignment, arXiv 2405.19107.
    """
    delta = log_ratio(terms)
    loss = -(terms.logprob * terms.advantage - config.policy_loss.dro_beta / 2 * jnp.square(delta))
    return TermLoss(loss, jnp.exp(delta), jnp.zeros_like(delta))


GSPO_LIMIT = 10.0


def gspo(terms: Terms, config: LossConfig) -> TermLoss:
    """Return the clipped surrogate of s, the geometric mean of the trajectory's ratios.

    Stop-gradient form: every token has the value ``sg(s)`` and the gradient of its own log-prob.

    References: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071.
    """
    mean = sequence_mean(terms.logprob - terms.old_logprob, terms)
    log_s = sg(mean - terms.logprob) + terms.logprob
    ratio = jnp.exp(jnp.minimum(log_s, GSPO_LIMIT))
    loss, unclipped = _clipped_surrogate(ratio, terms, config)
    return TermLoss(loss, ratio, where_it_matters(terms, changed(loss, unclipped)))


def geo_mean(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A`` times the geometric mean of the trajectory's ratios.

    The logarithm of each ratio is clipped to [-low, high]. The clip is one-sided like PPO's: what
    lowers the objective passes. Every token has its trajectory's loss, so the mean over tokens,
    then trajectories, is the paper's loss.

    References: Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv 2507.20673.
    """
    delta = log_ratio(terms)
    sign = jnp.sign(terms.advantage)
    clipped = jnp.clip(delta, -config.low, config.high)
    pessimistic = sign * jnp.minimum(sign * delta, sign * clipped)
    ratio = jnp.exp(sequence_mean(pessimistic, terms))
    loss = -sequence_mean(terms.advantage, terms) * ratio
    return TermLoss(loss, ratio, where_it_matters(terms, changed(pessimistic, delta)))


# --- losses that single out tokens ----------------------------------------------------------------
#
# Tokens whose log-prob and advantage covary most cost entropy. Which tokens these are is a property
# of the whole mini-batch, so they are chosen before it is cut into micro-batches (numpy, on
# log-probs of the current policy). The losses only look at ``Terms.chosen``.
# References: Cui et al. 2025, The Entropy Mechanism of RL for Reasoning LMs, arXiv 2505.22617.


def clip_cov(terms: Terms, config: LossConfig) -> TermLoss:
    """PPO's clipped surrogate without dual clip; the chosen tokens are left out."""
    ratio = jnp.exp(log_ratio(terms))
    surrogate, unclipped = _clipped_surrogate(ratio, terms, config)
    clipped = jnp.maximum(changed(surrogate, unclipped), terms.chosen)
    return TermLoss(surrogate * (1 - terms.chosen), ratio, where_it_matters(terms, clipped))


def kl_cov(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A r``, plus ``ppo_kl_coef |log r|`` for the chosen tokens."""
    delta = log_ratio(terms)
    ratio = jnp.exp(delta)
    penalty = config.policy_loss.ppo_kl_coef * jnp.abs(delta) * terms.chosen
    return TermLoss(-terms.advantage * ratio + penalty, ratio, terms.chosen)


def covariances(logprobs_T: np.ndarray, advantages_T: np.ndarray) -> np.ndarray:
    """Return ``(A - mean A)(log pi - mean log pi)`` of each of a mini-batch's T tokens, float64."""
    return (advantages_T - advantages_T.mean()) * (logprobs_T - logprobs_T.mean())


def choose_clip_cov(
    logprobs_T: np.ndarray,
    old_T: np.ndarray,
    advantages_T: np.ndarray,
    config: LossConfig,
    rng: np.random.Generator,
) -> np.ndarray:
    """Choose random tokens with a covariance within the bounds; bool [T].

    Their number is ``clip_cov_ratio`` of all tokens, at least one. Tokens that PPO's clip silences
    anyway are not chosen.
    """
    covariance = covariances(logprobs_T, advantages_T)
    is_above = covariance > config.policy_loss.clip_cov_lb
    is_within = is_above & (covariance < config.policy_loss.clip_cov_ub)

    ratio = np.exp(np.clip(logprobs_T - old_T, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    unclipped_loss = -advantages_T * ratio
    clipped_loss = -advantages_T * np.clip(ratio, 1 - config.low, 1 + config.high)
    is_unclipped = clipped_loss <= unclipped_loss

    eligible = np.flatnonzero(is_within & is_unclipped)
    wanted = max(1, int(config.policy_loss.clip_cov_ratio * len(covariance)))
    count = min(len(eligible), wanted)
    if not count:
        return np.zeros(len(covariance), bool)
    return _mask(rng.choice(eligible, count, replace=False), len(covariance))


def choose_kl_cov(
    logprobs_T: np.ndarray,
    old_T: np.ndarray,
    advantages_T: np.ndarray,
    config: LossConfig,
    rng: np.random.Generator,
) -> np.ndarray:
    """Choose the tokens with the largest covariance; bool [T].

    Their number is ``kl_cov_ratio`` of all tokens, at least one.
    """
    covariance = covariances(logprobs_T, advantages_T)
    count = max(1, int(config.policy_loss.kl_cov_ratio * len(covariance)))
    largest_first = np.argsort(-covariance, kind="stable")
    return _mask(largest_first[:count], len(covariance))


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
    """Choose the tokens that a covariance loss singles out, among the active ones of a mini-batch.

    Args:
        current: per trajectory log-probs [S] under the current policy.
        terms: the policy's terms by name; ``old_logprob`` defaults to ``current``.
        active: per trajectory bool [S].
        config: the name of its loss selects the rule.

    Returns:
        per trajectory float64 [S], 1 where chosen.
    """

    def active_values(values: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([v[mask] for v, mask in zip(values, active, strict=True)])

    chosen = [np.zeros(len(mask)) for mask in active]
    logprob = active_values(current)
    if not len(logprob):
        return chosen

    is_chosen = SELECTORS[config.policy_loss.loss_mode](
        logprob,
        active_values(terms.get("old_logprob", current)),
        active_values(terms["advantage"]),
        config,
        np.random.default_rng(seed),
    )
    begin = 0
    for trajectory_chosen, mask in zip(chosen, active, strict=True):
        end = begin + mask.sum()
        trajectory_chosen[mask] = is_chosen[begin:end]
        begin = end
    return chosen


PolicyLoss = Callable[[Terms, LossConfig], TermLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "decoupled": decoupled,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "cispo": cispo,
    "gpg": gpg,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Return the loss of a name, also one that an installed package registers."""
    return POLICY_LOSSES.get(name) or load_installed("losses", name)
