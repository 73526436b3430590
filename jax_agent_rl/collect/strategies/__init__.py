"""Rollout strategies (``rollout.strategy``): which trajectories of a group are started, and from where.

::

    base.py    waves, starts, the interface of a strategy, independent chains
    trees.py   Tree-GRPO: random turns · TreeRL: the most uncertain ids · ARPO: uncertain turns after tool results
"""

from jax_agent_rl.collect.strategies.base import Chains, Growth, Outcome, Start, Strategy
from jax_agent_rl.collect.strategies.trees import Arpo, TreeGrpo, TreeRL
from jax_agent_rl.config.strategy import StrategyConfig

__all__ = ["Arpo", "Chains", "Growth", "Outcome", "Start", "Strategy", "TreeGrpo", "TreeRL", "make_strategy"]


def make_strategy(config: StrategyConfig) -> Strategy:
    """Return the strategy of a run."""
    match config.name:
        case "chain":
            return Chains()
        case "tree_grpo":
            return TreeGrpo(config.tree_grpo)
        case "treerl":
            return TreeRL(config.treerl)
        case "arpo":
            return Arpo(config.arpo)
