"""Loss aggregation: the weights of tokens, which make the loss a plain weighted sum.

These weights are compared with the defaults of verl and TRL. Both take a mean over tokens, but of
different batches: verl's ``loss_agg_mode=token-mean`` divides by the tokens of the update (its
mini-batch), TRL's ``loss_type=dapo`` by the tokens of the rollout batch (``num_items_in_batch``),
even if this is cut into several updates. If the ratio of the weights is the same for all tokens, it
is the ratio of the gradients.

References: verl ``core_algos.agg_loss`` (commit 1dda039), TRL ``GRPOTrainer._compute_loss`` (commit
    f2cd577).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_agent_rl.config import Config
from jax_agent_rl.config.algorithm import AlgorithmConfig


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
