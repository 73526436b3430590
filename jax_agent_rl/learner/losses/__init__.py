"""Losses: ``policy`` by name, ``kl`` to a reference, ``aggregation`` of tokens."""

from jax_agent_rl.learner.losses.policy import LossConfig, TermLoss, Terms

__all__ = ["LossConfig", "TermLoss", "Terms"]
