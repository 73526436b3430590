"""Losses by name (``algorithm.policy_loss.loss_mode``).

::

    one ratio per token                   vanilla decoupled cispo gpg sapo dppo_tv dppo_kl dro
    one ratio per trajectory              gspo geo_mean
    tokens selected over the mini-batch   clip_cov kl_cov

They are in ``policy``; here are also the KL to the reference, and the weights of tokens, which make the loss a plain
weighted sum, compared with the defaults of verl and TRL.

Both take a mean over tokens, but of different batches: verl's ``loss_agg_mode=token-mean`` divides by the tokens of the
update (its mini-batch), TRL's ``loss_type=dapo`` by those of the rollout batch (``num_items_in_batch``), even if it is
cut into several updates. Where the ratio is the same for all tokens, it is the ratio of the gradients.

References: verl ``core_algos.agg_loss`` (commit 1dda039), TRL ``GRPOTrainer._compute_loss`` (commit f2cd577).
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


# --- KL to the reference ----------------------------------------------------------------------------------------------

_MAX_DELTA = 20.0
_LEAST_REST = 1e-4
"""Least probability of all ids that are not candidates together. What is left of 1 after float32 log-probs, which are
exact to some 1e-5, is not known much better; and a probability outside of them costs at most 9 nats."""
_MAX_KL_STEP = 0.2  # of the adaptive controller


def kl_forward(estimator: str, logprob: Any, ref_logprob: Any, xp: ModuleType = np) -> Any:
    """Estimate the KL per token from ``d = logprob - ref_logprob``.

    k1 ``d``, abs ``|d|``, k2 ``d^2 / 2``, k3 ``exp(-d) + d - 1`` (d clamped to +-20).

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
            back = xp.clip(-delta, -_MAX_DELTA, _MAX_DELTA)
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
        jnp.log(jnp.maximum(1 - jnp.sum(p, axis=-1), _LEAST_REST)) for p in (probabilities, jnp.exp(ref_logprobs))
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
    error = float(np.clip(kl / target - 1, -_MAX_KL_STEP, _MAX_KL_STEP))
    return coef * (1 + error * trajectories / horizon)


# --- aggregation ------------------------------------------------------------------------------------------------------


def term_weights(mode: str, active: Sequence[np.ndarray], scale_factor: int | None = None) -> list[np.ndarray]:
    """Return the weights of the terms of one optimizer update.

    The weights come from the *whole* update (all rows, micro-batches, devices): however the batch is cut, the sum of
    the parts is the same loss and the same gradient. N counts the sequences with an active term: trajectories with all
    their segments, or with ``algorithm.segment_weight=segment`` the segments.

    Args:
        mode: ``token-mean`` 1/Σlengths; ``token-sum`` 1; ``seq-mean-token-sum`` 1/N; ``seq-mean-token-mean``
            1/(N·length); ``seq-mean-token-sum-norm`` 1/(N·scale_factor).
        active: per sequence bool [S]: which of its sampled tokens are trained on.
        scale_factor: the constant of the last mode.

    Returns:
        per sequence float64 [S], 0 where not active.

    References: Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783, for the constant.
    """
    lengths = np.array([mask.sum() for mask in active], np.float64)
    tokens, sequences = max(lengths.sum(), 1.0), max(np.count_nonzero(lengths), 1)
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
    mode: str, updates: Sequence[Sequence[int]], scale_factor: int | None
) -> dict[str, tuple[float, float]]:
    """Return, by peer, the smallest and largest ratio of a token's weight here to its weight there.

    Args:
        mode: ``algorithm.loss_agg_mode``.
        updates: of each optimizer update of a step the lengths of its sequences, in trained tokens; none is 0.
        scale_factor: ``algorithm.loss_scale_factor``.
    """
    tokens = sum(map(sum, updates))
    ratios: dict[str, list[float]] = {peer: [] for peer in _PEERS}
    for lengths in updates:
        weights = term_weights(mode, [np.ones(length, bool) for length in lengths], scale_factor)
        own = [float(weight[0]) for weight in weights]
        ratios["verl"] += [weight * sum(lengths) for weight in own]
        ratios["trl"] += [weight * tokens for weight in own]
    return {peer: (min(values), max(values)) for peer, values in ratios.items()}


def describe_aggregation(config: Config) -> str:
    """Describe the aggregation in force, with the ratios for trajectories of one segment and of equal length.

    Empty where every token weighs what it does in the other frameworks' defaults: there is nothing to say.
    """
    algorithm, rollout, length = config.algorithm, config.rollout, config.agent.max_response_length
    formula = AGGREGATION_FORMULAS[algorithm.loss_agg_mode].format(
        scale_factor=algorithm.loss_scale_factor, units=_UNITS[algorithm.segment_weight]
    )
    prompts = np.array_split(np.arange(rollout.prompts_per_step), config.learner.num_minibatches)
    updates = [[length] * (len(part) * rollout.group_size) for part in prompts]
    counts = [len(lengths) for lengths in updates]
    over = "/".join(map(str, dict.fromkeys(counts)))
    alike = "have" if algorithm.segment_weight == "session" else "are one segment of"
    varies = depends_on_lengths(algorithm, len(updates))
    equal = f", if all {alike} agent.max_response_length={length}" if varies else ""
    ratios = _describe_ratios(algorithm, updates)
    if not ratios:
        return ""
    return (
        f"loss aggregation: {algorithm.loss_agg_mode} = {formula}, over each update's {over} trajectories{equal}: "
        f"{ratios}"
    )


def describe_batch(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    """Describe the ratios for the lengths of a batch, see :func:`weight_ratios`; empty where all are 1."""
    lengths = [length for update in updates for length in update]
    ratios = _describe_ratios(algorithm, updates)
    if not ratios:
        return ""
    return (
        f"loss aggregation: {algorithm.loss_agg_mode}, over this batch's {len(lengths)} "
        f"{_UNITS[algorithm.segment_weight]} of {min(lengths)} "
        f"to {max(lengths)} trained tokens: {ratios}"
    )


def depends_on_lengths(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Return whether the ratios do; a mean over all tokens of one update is the same everywhere."""
    return algorithm.loss_agg_mode != "token-mean" or updates > 1


def _describe_ratios(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    ratios = weight_ratios(algorithm.loss_agg_mode, updates, algorithm.loss_scale_factor)
    factors = {name: _factor(*ratios[peer]) for peer, name in _PEERS.items()}
    if set(factors.values()) == {_SAME}:
        return ""
    return "a token's weight is " + ", ".join(f"{factor} that of {name}" for name, factor in factors.items())


_SAME = "x1"


def _factor(low: float, high: float) -> str:
    least, most = f"x{low:.4g}", f"x{high:.4g}"
    return least if least == most else f"{least} to {most}"
