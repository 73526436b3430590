"""What a learner makes of groups before its optimizer: packed terms, and the policy's gradient."""

from __future__ import annotations

from collections.abc import Sequence

from jax_agent_rl.learner.batch import Batch
from jax_agent_rl.learner.learner import Learner
from jax_agent_rl.learner.optimized_params import Statistics
from jax_agent_rl.models.config import Params
from jax_agent_rl.types import Group


def policy_batch(learner: Learner, groups: Sequence[Group]) -> Batch:
    """The policy's batch of a step of one update."""
    (mini_batch,), experience = learner.prepare(groups)
    (update,) = experience.updates
    _, batch = learner.batches(mini_batch, update)[-1]
    return batch


def policy_gradient(learner: Learner, groups: Sequence[Group]) -> tuple[Params, Statistics]:
    """The accumulated gradient of a step of one update, and its statistics."""
    return learner.gradients(learner.policy, policy_batch(learner, groups), iter)
