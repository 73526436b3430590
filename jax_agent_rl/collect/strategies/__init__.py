"""Rollout strategies (``rollout.strategy``): which trajectories of a group are started, and from where.

::

    base.py        waves, starts, what a strategy is asked
    chain.py       independent chains
    tree_grpo.py   chains expanded at turns drawn at random
    treerl.py      branches at the most uncertain ids
    arpo.py        branches where a tool result made the policy uncertain
"""

from jax_agent_rl.collect.strategies.arpo import Arpo
from jax_agent_rl.collect.strategies.base import Growth, Outcome, Start, Strategy
from jax_agent_rl.collect.strategies.chain import Chains
from jax_agent_rl.collect.strategies.tree_grpo import TreeGrpo
from jax_agent_rl.collect.strategies.treerl import TreeRL
from jax_agent_rl.config.strategy import StrategyConfig

__all__ = ["Arpo", "Chains", "Growth", "Outcome", "Start", "Strategy", "TreeGrpo", "TreeRL", "make_strategy"]


def make_strategy(config: StrategyConfig) -> Strategy:
    """The strategy of a run."""
    match config.name:
        case "chain":
            return Chains()
        case "tree_grpo":
            return TreeGrpo(config.tree_grpo)
        case "treerl":
            return TreeRL(config.treerl)
        case "arpo":
            return Arpo(config.arpo)
