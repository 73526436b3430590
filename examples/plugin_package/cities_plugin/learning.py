"""What the learner uses: a policy loss and an advantage estimator."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.learner.advantages import Advantages, ScoredBatch
from jax_agent_rl.learner.losses import LossConfig, TermLoss, Terms


def plain_gradient(terms: Terms, config: LossConfig) -> TermLoss:
    """Return ``-A log pi``: the policy gradient of Williams (1992), without a ratio. Float32 [R, K]
    each.
    """
    ones = jnp.ones_like(terms.logprob)
    return TermLoss(loss=-terms.advantage * terms.logprob, ratio=ones, clipped=jnp.zeros_like(ones))


def sign(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return +1 for trajectories above their group's mean reward, -1 for those below."""
    per_trajectory = np.zeros(len(samples.totals))
    for members in samples.members:
        per_trajectory[members] = np.sign(samples.totals[members] - samples.totals[members].mean())
    return Advantages(advantages=samples.broadcast(per_trajectory))
