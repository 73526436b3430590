"""Losses by name (``algorithm.policy_loss.loss_mode``).

::

    one ratio per token                   vanilla decoupled cispo gpg sapo dppo_tv dppo_kl dro
    one ratio per trajectory              gspo geo_mean
    tokens selected over the mini-batch   clip_cov kl_cov

They are in ``policy``. Here are also the KL to the reference, and the weights of tokens, which make
the loss a plain weighted sum.

These weights are compared with the defaults of verl and TRL. Both take a mean over tokens, but of
different batches: verl's ``loss_agg_mode=token-mean`` divides by the tokens of the update (its
mini-batch), TRL's ``loss_type=dapo`` by the tokens of the rollout batch (``num_items_in_batch``),
even if this is cut into several updates. If the ratio of the weights is the same for all tokens, it
is the ratio of the gradients.

References: verl ``core_algos.agg_loss`` (commit 1dda039), TRL ``GRPOTrainer._compute_loss`` (commit
    f2cd577).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config import Config
from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner.losses import policy
from jax_agent_rl.learner.losses.policy import LossConfig, TermLoss, Terms
from jax_agent_rl.utils.plugins import load_installed

PolicyLoss = Callable[[Terms, LossConfig], TermLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": policy.vanilla,
    "decoupled": policy.decoupled,
    "gspo": policy.gspo,
    "geo_mean": policy.geo_mean,
    "cispo": policy.cispo,
    "gpg": policy.gpg,
    "sapo": policy.sapo,
    "clip_cov": policy.clip_cov,
    "kl_cov": policy.kl_cov,
    "dppo_tv": policy.dppo_tv,
    "dppo_kl": policy.dppo_kl,
    "dro": policy.dro,
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Return the loss of a name, also one that an installed package registers."""
    return POLICY_LOSSES.get(name) or load_installed("losses", name)


# --- KL to the reference --------------------------------------------------------------------------

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


# --- aggregation ----------------------------------------------------------------------------------


def term_weights(
    mode: str, active: Sequence[np.ndarray], scale_factor: int | None = None
) -> list[np.ndarray]:
    """Return the weights of the terms of one optimizer update.

    The weights come from the *whole* update (all rows, micro-batches, devices). However the batch
    is cut, the parts sum up to the same loss and the same gradient. N is the number of sequences
    with an active term: of trajectories with all their segments, or of segments with
    ``algorithm.segment_weight=segment``.

    Args:
        mode: ``token-mean`` 1/Σlengths; ``token-sum`` 1; ``seq-mean-token-sum`` 1/N;
            ``seq-mean-token-mean`` 1/(N·length); ``seq-mean-token-sum-norm`` 1/(N·scale_factor).
        active: per sequence bool [S], the sampled tokens that are trained on.
        scale_factor: the constant of the last mode.

    Returns:
        per sequence float64 [S], 0 where not active.

    References: Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783, for the constant.
    """
    lengths = np.array([mask.sum() for mask in active], np.float64)
    tokens = max(lengths.sum(), 1.0)
    sequences = max(np.count_nonzero(lengths), 1)
    match mode:
        case "token-mean":
            per_token = np.full(len(lengths), 1 / tokens)
        case "token-sum":
            per_token = np.ones(len(lengths))
        case "seq-mean-token-sum":
            per_token = np.full(len(lengths), 1 / sequences)
        case "seq-mean-token-mean":
            per_token = 1 / (sequences * np.maximum(lengths, 1.0))
        case "seq-mean-token-sum-norm":
            if scale_factor is None:
                raise ValueError("seq-mean-token-sum-norm needs algorithm.loss_scale_factor")
            per_token = np.full(len(lengths), 1 / (sequences * scale_factor))
        case _:
            raise ValueError(f"unknown loss_agg_mode {mode!r}")
    return [weight * mask for weight, mask in zip(per_token, active, strict=True)]


AGGREGATION_FORMULAS = {
    "token-mean": "sum(loss) / tokens",
    "token-sum": "sum(loss)",
    "seq-mean-token-sum": "sum(loss) / {units}",
    "seq-mean-token-mean": "mean over {units} of sum(loss) / tokens",
    "seq-mean-token-sum-norm": "sum(loss) / ({units} * {scale_factor})",
}
_UNITS = {"session": "trajectories", "segment": "segments"}
_PEERS = {"verl": "verl's default (token-mean)", "trl": "TRL's (loss_type=dapo)"}


def weight_ratios(
    mode: str,
    updates: Sequence[Sequence[int]],
    scale_factor: int | None,
) -> dict[str, tuple[float, float]]:
    """Return, by peer, the smallest and largest ratio of a token's weight here to its weight there.

    Args:
        mode: ``algorithm.loss_agg_mode``.
        updates: for each optimizer update of a step the lengths of its sequences, in trained
            tokens; none is 0.
        scale_factor: ``algorithm.loss_scale_factor``.
    """
    step_tokens = sum(sum(lengths) for lengths in updates)
    ratios: dict[str, list[float]] = {peer: [] for peer in _PEERS}
    for lengths in updates:
        update_tokens = sum(lengths)
        active = [np.ones(length, bool) for length in lengths]
        for weights in term_weights(mode, active, scale_factor):
            weight = float(weights[0])  # all tokens of a sequence have the same
            ratios["verl"].append(weight * update_tokens)
            ratios["trl"].append(weight * step_tokens)
    return {peer: (min(values), max(values)) for peer, values in ratios.items()}


def describe_aggregation(config: Config) -> str:
    """Describe the aggregation in force.

    The ratios are for trajectories of one segment and of equal length. The text is empty where
    every token weighs what it does in the other frameworks' defaults: there is nothing to say.
    """
    algorithm = config.algorithm
    length = config.agent.max_response_length
    formula = AGGREGATION_FORMULAS[algorithm.loss_agg_mode].format(
        scale_factor=algorithm.loss_scale_factor,
        units=_UNITS[algorithm.segment_weight],
    )

    prompts = np.arange(config.rollout.prompts_per_step)
    updates = []
    for update_prompts in np.array_split(prompts, config.learner.num_minibatches):
        updates.append([length] * (len(update_prompts) * config.rollout.group_size))
    counts = dict.fromkeys(str(len(lengths)) for lengths in updates)  # without repetitions
    scope = f"over each update's {'/'.join(counts)} trajectories"

    if depends_on_lengths(algorithm, len(updates)):
        are_equal = "have" if algorithm.segment_weight == "session" else "are one segment of"
        scope += f", if all {are_equal} agent.max_response_length={length}"
    ratios = _describe_ratios(algorithm, updates)
    if not ratios:
        return ""
    return f"loss aggregation: {algorithm.loss_agg_mode} = {formula}, {scope}: {ratios}"


def describe_batch(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    """Describe the ratios for the lengths of a batch; empty where all are 1.

    See :func:`weight_ratios`.
    """
    lengths = [length for update in updates for length in update]
    units = _UNITS[algorithm.segment_weight]
    ratios = _describe_ratios(algorithm, updates)
    if not ratios:
        return ""
    return (
        f"loss aggregation: {algorithm.loss_agg_mode}, over this batch's {len(lengths)} {units}"
        f" of {min(lengths)} to {max(lengths)} trained tokens: {ratios}"
    )


def depends_on_lengths(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Return whether the ratios depend on the lengths of trajectories.

    They do not for a mean over all tokens of a single update, which is the same everywhere.
    """
    return algorithm.loss_agg_mode != "token-mean" or updates > 1


_SAME = "x1"  # the factor of a weight that does not differ


def _describe_ratios(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    ratios = weight_ratios(algorithm.loss_agg_mode, updates, algorithm.loss_scale_factor)
    factors = {}
    for peer, name in _PEERS.items():
        low, high = ratios[peer]
        factors[name] = _format_range(low, high)
    if set(factors.values()) == {_SAME}:
        return ""
    parts = [f"{factor} that of {name}" for name, factor in factors.items()]
    return "a token's weight is " + ", ".join(parts)


def _format_range(low: float, high: float) -> str:
    lowest = f"x{low:.4g}"
    highest = f"x{high:.4g}"
    if lowest == highest:
        return lowest
    return f"{lowest} to {highest}"
