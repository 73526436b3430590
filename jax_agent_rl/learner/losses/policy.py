"""Policy losses, ``(Terms, LossConfig) -> TermLoss``. A: advantage; r: ratio to the old policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_agent_rl.learner.losses.terms import LossConfig, TermLoss, Terms, changed, log_ratio, sequence_mean

sg = jax.lax.stop_gradient


def vanilla(terms: Terms, config: LossConfig) -> TermLoss:
    """PPO's clipped surrogate ``max(-A r, -A clip(r, 1 - low, 1 + high))``; with ``dual`` at most ``-A dual``, A < 0.

    References: Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et al. 2020, arXiv 1912.09729; clip-higher:
    Yu et al. 2025 (DAPO), arXiv 2503.14476.
    """
    ratio, advantage = jnp.exp(log_ratio(terms)), terms.advantage
    plain = -advantage * ratio
    loss = jnp.maximum(plain, -advantage * jnp.clip(ratio, 1 - config.low, 1 + config.high))
    if config.dual is not None:
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -advantage * config.dual), loss)
    return TermLoss(loss, ratio, changed(loss, plain))


def decoupled(terms: Terms, config: LossConfig) -> TermLoss:
    """:func:`vanilla` around the proximal policy, times the ratio of that to the behaviour policy.

    Tokens for which that second ratio is above ``behav_imp_weight_cap`` are left out.

    References: Hilton et al. 2021, Batch size-invariance, arXiv 2110.00641; Fu et al. 2025 (AReaL), arXiv 2505.24298.
    """
    surrogate = vanilla(terms, config)
    behaviour = jnp.exp(jnp.clip(terms.old_logprob - terms.rollout_logprob, -20.0, 20.0))
    kept = (behaviour <= config.own.behav_imp_weight_cap).astype(jnp.float32)
    return TermLoss(surrogate.loss * behaviour * kept, surrogate.ratio, jnp.maximum(surrogate.clipped, 1 - kept))


def cispo(terms: Terms, config: LossConfig) -> TermLoss:
    """``-sg(clip(r)) A log pi``: the weight is clipped, the gradient never is.

    References: MiniMax 2025, MiniMax-M1, arXiv 2506.13585.
    """
    ratio = jnp.exp(log_ratio(terms))
    clipped = jnp.clip(ratio, 1 - config.low, 1 + config.high)
    return TermLoss(-sg(clipped) * terms.advantage * terms.logprob, ratio, changed(clipped, ratio))


def gpg(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A log pi``: the plain policy gradient.

    References: Chu et al. 2025, GPG, arXiv 2504.02546.
    """
    ratio = jnp.exp(log_ratio(terms))
    return TermLoss(-terms.advantage * terms.logprob, ratio, jnp.zeros_like(ratio))


def sapo(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A (4 / tau) sigmoid(tau (r - 1))``: steeper for tokens without a positive advantage.

    References: Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv 2511.20347.
    """
    ratio = jnp.exp(log_ratio(terms))
    tau = jnp.where(terms.advantage > 0, config.own.tau_pos, config.own.tau_neg)
    gate = jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TermLoss(-terms.advantage * gate, ratio, jnp.zeros_like(ratio))


def dppo_tv(terms: Terms, config: LossConfig) -> TermLoss:
    """Policy gradient with a truncated ratio; nothing where the probability already moved further than the clip range.

    ``low``/``high`` bound ``pi - pi_old``, the total variation of "this token or another".

    References: Qi et al. 2026, DPPO, arXiv 2602.04879.
    """
    moved = jnp.exp(terms.logprob) - jnp.exp(terms.old_logprob)
    return _trusted(terms, config, jnp.where(terms.advantage > 0, moved <= config.high, moved >= -config.low))


def dppo_kl(terms: Terms, config: LossConfig) -> TermLoss:
    """As :func:`dppo_tv`, with the KL divergence of "this token or another" from the old policy to the new.

    References: Qi et al. 2026, DPPO, arXiv 2602.04879.
    """
    tiny = 1e-8  # keeps the log of the other tokens' probability finite
    new, old = jnp.exp(terms.logprob), jnp.exp(terms.old_logprob)
    new_rest, old_rest = -jnp.expm1(terms.logprob), -jnp.expm1(terms.old_logprob)
    divergence = old * (terms.old_logprob - terms.logprob) + old_rest * jnp.log((old_rest + tiny) / (new_rest + tiny))
    rises = (divergence <= config.high) | (new <= old)
    falls = (divergence <= config.low) | (new >= old)
    return _trusted(terms, config, jnp.where(terms.advantage > 0, rises, falls))


def _trusted(terms: Terms, config: LossConfig, inside: jax.Array) -> TermLoss:
    ratio = jnp.exp(log_ratio(terms))
    weight = sg(jnp.minimum(ratio, config.own.dppo_ratio_cap) * inside)
    return TermLoss(-weight * terms.advantage * terms.logprob, ratio, 1 - inside.astype(jnp.float32))


def dro(terms: Terms, config: LossConfig) -> TermLoss:
    """``-(log pi A - beta / 2 d^2)``, d the log-ratio: off-policy without any ratio.

    References: Richemond et al. 2024, Offline Regularised RL for LLM alignment, arXiv 2405.19107.
    """
    delta = log_ratio(terms)
    loss = -(terms.logprob * terms.advantage - config.own.dro_beta / 2 * jnp.square(delta))
    return TermLoss(loss, jnp.exp(delta), jnp.zeros_like(delta))


GSPO_LIMIT = 10.0


def gspo(terms: Terms, config: LossConfig) -> TermLoss:
    """Return the clipped surrogate of s, the geometric mean of the trajectory's ratios.

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
    """Return ``-A`` times the geometric mean of the trajectory's ratios, each clipped in the log to [-low, high].

    The clip is one-sided as PPO's is: what lowers the objective passes. Every token has its trajectory's loss, so the
    mean over tokens, then trajectories, is the paper's loss.

    References: Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv 2507.20673.
    """
    delta, sign = log_ratio(terms), jnp.sign(terms.advantage)
    clipped = jnp.clip(delta, -config.low, config.high)
    pessimistic = sign * jnp.minimum(sign * delta, sign * clipped)
    ratio = jnp.exp(sequence_mean(pessimistic, terms))
    return TermLoss(-sequence_mean(terms.advantage, terms) * ratio, ratio, changed(pessimistic, delta))
