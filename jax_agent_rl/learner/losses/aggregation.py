"""Token weights that make the loss a plain weighted sum, compared with the defaults of verl and TRL.

Both take a mean over tokens, but of different batches: verl's ``loss_agg_mode=token-mean`` divides by the tokens of the
update (its mini-batch), TRL's ``loss_type=dapo`` by those of the rollout batch (``num_items_in_batch``), even if it is
cut into several updates. Where the ratio is the same for all tokens, it is the ratio of the gradients.

References: verl ``core_algos.agg_loss`` (commit 1dda039), TRL ``GRPOTrainer._compute_loss`` (commit f2cd577).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_agent_rl.config import Config
from jax_agent_rl.config.algorithm import AlgorithmConfig


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


FORMULAS = {
    "token-mean": "sum(loss) / tokens",
    "token-sum": "sum(loss)",
    "seq-mean-token-sum": "sum(loss) / {units}",
    "seq-mean-token-mean": "mean over {units} of sum(loss) / tokens",
    "seq-mean-token-sum-norm": "sum(loss) / ({units} * {scale_factor})",
}
UNITS = {"session": "trajectories", "segment": "segments"}
PEERS = {"verl": "verl's default (token-mean)", "trl": "TRL's (loss_type=dapo)"}


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
    ratios: dict[str, list[float]] = {peer: [] for peer in PEERS}
    for lengths in updates:
        weights = term_weights(mode, [np.ones(length, bool) for length in lengths], scale_factor)
        own = [float(weight[0]) for weight in weights]
        ratios["verl"] += [weight * sum(lengths) for weight in own]
        ratios["trl"] += [weight * tokens for weight in own]
    return {peer: (min(values), max(values)) for peer, values in ratios.items()}


def describe_aggregation(config: Config) -> str:
    """Describe the aggregation in force, with the ratios for trajectories of one segment and of equal length."""
    algorithm, rollout, length = config.algorithm, config.rollout, config.agent.max_response_length
    formula = FORMULAS[algorithm.loss_agg_mode].format(
        scale_factor=algorithm.loss_scale_factor, units=UNITS[algorithm.segment_weight]
    )
    prompts = np.array_split(np.arange(rollout.prompts_per_step), config.learner.num_minibatches)
    updates = [[length] * (len(part) * rollout.group_size) for part in prompts]
    counts = [len(lengths) for lengths in updates]
    over = "/".join(map(str, dict.fromkeys(counts)))
    alike = "have" if algorithm.segment_weight == "session" else "are one segment of"
    varies = depends_on_lengths(algorithm, len(updates))
    equal = f", if all {alike} agent.max_response_length={length}" if varies else ""
    return (
        f"loss aggregation: {algorithm.loss_agg_mode} = {formula}, over each update's {over} trajectories{equal}: "
        f"{_describe_ratios(algorithm, updates)}"
    )


def describe_batch(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    """Describe the ratios for the lengths of a batch, see :func:`weight_ratios`."""
    lengths = [length for update in updates for length in update]
    return (
        f"loss aggregation: {algorithm.loss_agg_mode}, over this batch's {len(lengths)} "
        f"{UNITS[algorithm.segment_weight]} of {min(lengths)} "
        f"to {max(lengths)} trained tokens: {_describe_ratios(algorithm, updates)}"
    )


def depends_on_lengths(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Return whether the ratios do; a mean over all tokens of one update is the same everywhere."""
    return algorithm.loss_agg_mode != "token-mean" or updates > 1


def _describe_ratios(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    ratios = weight_ratios(algorithm.loss_agg_mode, updates, algorithm.loss_scale_factor)
    return "a token's weight is " + ", ".join(
        f"{_factor(*ratios[peer])} that of {name}" for peer, name in PEERS.items()
    )


def _factor(low: float, high: float) -> str:
    least, most = f"x{low:.4g}", f"x{high:.4g}"
    return least if least == most else f"{least} to {most}"
