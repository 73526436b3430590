"""What a learner is between two steps, and what a step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jax_agent_rl.learner.optimized_params import TrainState
from jax_agent_rl.models.sharding import place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerState:
    """Everything a resumed run needs of the learner.

    Attributes:
        policy: the policy's parameters and optimizer.
        critic: the critic's, with adv_estimator gae.
        kl_coef: float32, the KL controller's coefficient.
        steps: int32, calls of :meth:`Learner.update`.
        nonfinite: int32, updates skipped in a row.
    """

    policy: TrainState
    critic: TrainState | None
    kl_coef: jax.Array
    steps: jax.Array
    nonfinite: jax.Array


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """A learner state in host memory, to go back to. For arrays that one process holds.

    Attributes:
        arrays: of numpy.
        shardings: where they lay.
    """

    arrays: LearnerState
    shardings: Any

    @classmethod
    def of(cls, state: LearnerState) -> KeptState:
        """A copy: ``state`` may be donated."""
        return cls(arrays=jax.tree.map(np.array, state), shardings=jax.tree.map(lambda x: x.sharding, state))

    def placed(self) -> LearnerState:
        """On the devices again."""
        return jax.tree.map(place, self.arrays, self.shardings)


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one :meth:`Learner.update` did.

    Attributes:
        metrics: named floats for the log.
        skipped: an update had a non-finite gradient and changed nothing.
        rejected: ids of trajectories of which every token was rejected.
        tokens: of each trajectory that was trained on, by its id, numbers per token with loss, over all its sequences:
            float64 ``advantages`` and, where they were computed, ``old_logprobs``.
    """

    metrics: dict[str, float]
    skipped: bool
    rejected: frozenset[str] = frozenset()
    tokens: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
