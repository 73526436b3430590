"""Per-token policy losses and the weights that aggregate them. Shapes: K loss terms (sampled tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """``low``/``high``: clip range below and above 1; ``dual``: bound of the loss for negative advantages."""

    low: float
    high: float
    dual: float


def ppo_clip(
    logprobs_K: jax.Array, old_logprobs_K: jax.Array, advantages_K: jax.Array, clip: ClipConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The clipped surrogate with clip-higher and dual clip.

    Returns:
        per-term loss, ratio ``exp(logp - old)``, and 1.0 where clipping changed the loss; all [K].

    References: Schulman et al. 2017, arXiv 1707.06347; dual clip: Ye et al. 2020, arXiv 1912.09729; clip-higher:
    Yu et al. 2025 (DAPO), arXiv 2503.14476.
    """
    ratio = jnp.exp(jnp.clip(logprobs_K - old_logprobs_K, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain = -advantages_K * ratio
    clipped = -advantages_K * jnp.clip(ratio, 1 - clip.low, 1 + clip.high)
    loss = jnp.maximum(plain, clipped)
    bounded = jnp.where(advantages_K < 0, jnp.minimum(loss, -advantages_K * clip.dual), loss)
    return bounded, ratio, (bounded != plain).astype(jnp.float32)


def term_weights(mode: str, lengths_N: Sequence[int]) -> np.ndarray:
    """What one sampled token of each trajectory weighs, so that the loss is a plain weighted sum.

    The weights come from the *whole* update (all rows, micro-batches, devices): however the batch is cut, the sum of
    the parts is the same loss and the same gradient.

    Args:
        mode: ``token-mean`` 1/Σlengths; ``seq-mean-token-mean`` 1/(N·length); ``seq-mean-token-sum`` 1/N.
        lengths_N: sampled tokens per trajectory, all >= 1.

    Returns:
        float64 [N].
    """
    lengths = np.asarray(lengths_N, np.float64)
    match mode:
        case "token-mean":
            return np.full(len(lengths), 1 / lengths.sum())
        case "seq-mean-token-mean":
            return 1 / (len(lengths) * lengths)
        case "seq-mean-token-sum":
            return np.full(len(lengths), 1 / len(lengths))
        case _:
            raise ValueError(f"unknown loss_agg_mode {mode!r}")
