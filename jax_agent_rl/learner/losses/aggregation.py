"""What each token weighs, so that the loss is a plain weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def term_weights(mode: str, active: Sequence[np.ndarray], scale_factor: int | None = None) -> list[np.ndarray]:
    """Weights of the terms of one optimizer update.

    The weights come from the *whole* update (all rows, micro-batches, devices): however the batch is cut, the sum of
    the parts is the same loss and the same gradient. N counts the trajectories with an active term.

    Args:
        mode: ``token-mean`` 1/Σlengths; ``token-sum`` 1; ``seq-mean-token-sum`` 1/N; ``seq-mean-token-mean``
            1/(N·length); ``seq-mean-token-sum-norm`` 1/(N·scale_factor).
        active: per trajectory bool [S]: which of its sampled tokens are trained on.
        scale_factor: the constant of the last mode.

    Returns:
        per trajectory float64 [S], 0 where not active.

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
