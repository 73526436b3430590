"""Input and output of a policy loss. Shapes: R rows, K loss terms (sampled tokens) a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_agent_rl.config.algorithm import PolicyLossConfig

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Constants of the losses.

    Attributes:
        low: clip range below 1.
        high: clip range above 1.
        dual: dual clip, bound of the loss for negative advantages in units of them; None without one.
        own: the name of the loss, and keys that single losses read.
    """

    low: float
    high: float
    dual: float | None
    own: PolicyLossConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Terms:
    """Everything a loss may look at.

    Attributes:
        logprob: float32 [R, K], of the policy that is trained; differentiable.
        old_logprob: of the policy before this step (the proximal policy, where the rollout's is older).
        rollout_logprob: of the policy that sampled (the behaviour policy).
        advantage: float32 [R, K].
        active: float32 [R, K], 1 for terms that are trained on.
        sequence: int32 [R, K], the trajectory, or segment of one, that a term belongs to, numbered within its row.
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
    """Float32 [R, K] each: the loss, the ratio in it, and 1 where clipping or masking changed the loss."""

    loss: jax.Array
    ratio: jax.Array
    clipped: jax.Array


def log_ratio(terms: Terms) -> jax.Array:
    """Return ``log pi - log pi_old``, clamped to +-20."""
    return jnp.clip(terms.logprob - terms.old_logprob, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_mean(values: jax.Array, terms: Terms) -> jax.Array:
    """Average over the active terms of each sequence, at each of its terms; [R, K] to [R, K].

    A sequence lies in one row as a whole, so the mean does not depend on how rows are cut into micro-batches.
    """

    def row(values: jax.Array, active: jax.Array, sequence: jax.Array) -> jax.Array:
        total = jax.ops.segment_sum(values * active, sequence, num_segments=len(values))
        count = jax.ops.segment_sum(active, sequence, num_segments=len(values))
        return (total / jnp.maximum(count, 1.0))[sequence]

    return jax.vmap(row)(values, terms.active, terms.sequence)


def changed(after: jax.Array, before: jax.Array) -> jax.Array:
    """Return 1.0 where clipping made a difference."""
    return (after != before).astype(jnp.float32)
