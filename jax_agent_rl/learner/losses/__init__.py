"""Losses by name (``algorithm.policy_loss.loss_mode``).

::

    policy.py       one ratio per token: vanilla decoupled cispo gpg sapo dppo_tv dppo_kl dro
                    one ratio per trajectory: gspo geo_mean
                    tokens selected over the mini-batch: clip_cov kl_cov
    kl.py           KL to the reference, and its controller
    aggregation.py  token weights, compared with those of verl and TRL
"""

from __future__ import annotations

from collections.abc import Callable

from jax_agent_rl.learner.losses import policy
from jax_agent_rl.learner.losses.policy import LossConfig, TermLoss, Terms
from jax_agent_rl.utils.plugins import load_installed

PolicyLoss = Callable[[Terms, LossConfig], TermLoss]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": policy.vanilla,
    "decoupled": policy.decoupled,
    "gspo": policy.gspo,
    "geo_mean": policy.geo_mean,
    "cispo": policy.cispo,
    "gpg": policy.gpg,
    "sapo": policy.sapo,
    "clip_cov": policy.clip_cov,
    "kl_cov": policy.kl_cov,
    "dppo_tv": policy.dppo_tv,
    "dppo_kl": policy.dppo_kl,
    "dro": policy.dro,
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Return the loss of a name, also one that an installed package registers."""
    return POLICY_LOSSES.get(name) or load_installed("losses", name)
