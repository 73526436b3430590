"""How much a token weighs in the loss here, and what the defaults of verl and TRL would give it.

Both take a mean over tokens, but of different batches: verl's ``loss_agg_mode=token-mean`` divides by the tokens of the
update (its mini-batch), TRL's ``loss_type=dapo`` by those of the rollout batch (``num_items_in_batch``), also where
that is cut into several updates. Where the ratio is the same for all tokens, it is the ratio of the gradients.

References: verl ``core_algos.agg_loss`` (commit 1dda039), TRL ``GRPOTrainer._compute_loss`` (commit f2cd577).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_agent_rl.config import Config
from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner.losses.aggregation import term_weights

FORMULAS = {
    "token-mean": "sum(loss) / tokens",
    "token-sum": "sum(loss)",
    "seq-mean-token-sum": "sum(loss) / trajectories",
    "seq-mean-token-mean": "mean of each trajectory's sum(loss) / tokens",
    "seq-mean-token-sum-norm": "sum(loss) / (trajectories * {scale_factor})",
}
PEERS = {"verl": "verl's default (token-mean)", "trl": "TRL's (loss_type=dapo)"}


def weight_ratios(
    mode: str, updates: Sequence[Sequence[int]], scale_factor: int | None
) -> dict[str, tuple[float, float]]:
    """By peer the smallest and the largest ratio of a token's weight here to its weight there.

    Args:
        mode: ``algorithm.loss_agg_mode``.
        updates: of each optimizer update of a step the lengths of its trajectories, in trained tokens; none is 0.
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


def at_start(config: Config) -> str:
    """The formula in force, with the ratios for trajectories of equal length."""
    algorithm, rollout, length = config.algorithm, config.rollout, config.agent.max_response_length
    formula = FORMULAS[algorithm.loss_agg_mode].format(scale_factor=algorithm.loss_scale_factor)
    prompts = np.array_split(np.arange(rollout.prompts_per_step), config.learner.num_minibatches)
    updates = [[length] * (len(part) * rollout.group_size) for part in prompts]
    counts = [len(lengths) for lengths in updates]
    over = "/".join(map(str, dict.fromkeys(counts)))
    equal = f", if all have agent.max_response_length={length}" if depends_on_lengths(algorithm, len(updates)) else ""
    return (
        f"loss aggregation: {algorithm.loss_agg_mode} = {formula}, over each update's {over} trajectories{equal}: "
        f"{_said(algorithm, updates)}"
    )


def of_batch(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    """The ratios for the lengths of a batch, see :func:`weight_ratios`."""
    lengths = [length for update in updates for length in update]
    return (
        f"loss aggregation: {algorithm.loss_agg_mode}, over this batch's {len(lengths)} trajectories of {min(lengths)} "
        f"to {max(lengths)} trained tokens: {_said(algorithm, updates)}"
    )


def depends_on_lengths(algorithm: AlgorithmConfig, updates: int) -> bool:
    """Whether the ratios do; a mean over all tokens of one update is the same mean everywhere."""
    return algorithm.loss_agg_mode != "token-mean" or updates > 1


def _said(algorithm: AlgorithmConfig, updates: Sequence[Sequence[int]]) -> str:
    ratios = weight_ratios(algorithm.loss_agg_mode, updates, algorithm.loss_scale_factor)
    return "a token's weight is " + ", ".join(
        f"{_factor(*ratios[peer])} that of {name}" for peer, name in PEERS.items()
    )


def _factor(low: float, high: float) -> str:
    least, most = f"x{low:.4g}", f"x{high:.4g}"
    return least if least == most else f"{least} to {most}"
