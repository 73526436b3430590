"""Advantages by name (``algorithm.adv_estimator``): from scored trajectories to numbers per token.

::

    one number per trajectory                       grpo dr_grpo rloo opo grpo_passk
    one per turn                                    gigpo mt_grpo igpo
    along trees of branches                         tree_grpo treerl arpo
    compared over the whole step                    gpg gdpo remax reinforce_plus_plus(_baseline)
    with a running mean per role                    rae
    with a critic                                   gae
    0 everywhere: only the KL to a teacher trains   none

``estimators`` is the mathematics, on plain arrays. ``registry`` reads trajectories and
configuration for it, and ``scored_batch`` is what it reads.
"""

from jax_agent_rl.learner.advantages.registry import Advantages
from jax_agent_rl.learner.advantages.scored_batch import ScoredBatch

__all__ = ["Advantages", "ScoredBatch"]
