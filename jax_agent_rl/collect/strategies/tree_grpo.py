"""Tree-GRPO: chains that are expanded at turns drawn at random.

``M`` first chains, each a tree. In each of ``L`` rounds, ``N`` nodes of every tree are drawn (with replacement) among
its prompt and the turns that another turn followed, and one new chain continues from each. ``K`` leaves of each tree
are kept; with ``K = 1 + L N``, all of them. M=2 N=1 L=1::

    round 0   t0 = a b c     t1 = d e
    round 1   t2 = a b + f   t3 = + g          drawn: turn b of t0's tree, the prompt of t1's

References: Ji et al. 2025, Tree Search for LLM Agent Reinforcement Learning, arXiv 2509.21240; the drawing is that of
the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_agent_rl.collect.strategies.base import Growth, Start, Strategy, at_prompt, at_turn
from jax_agent_rl.config.strategy import TreeGrpoConfig
from jax_agent_rl.types import Fork, Trajectory


class TreeGrpo(Strategy):
    """See the module docstring."""

    def __init__(self, config: TreeGrpoConfig):
        self._config = config

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        round_ = len(growth.waves)
        if round_ == 0:
            return [Start()] * self._config.m
        if round_ > self._config.l:
            return []
        starts = []
        for number, (tree_id, tree) in enumerate(growth.trees.items()):
            nodes = _inner_nodes(tree_id, tree)
            drawn = growth.random("expand", round_, number).choices(nodes, k=self._config.n)
            starts += [Start(fork=fork) for fork in drawn]
        return starts

    def select(self, growth: Growth) -> list[Trajectory]:
        kept = []
        for number, tree in enumerate(growth.trees.values()):
            k = min(self._config.k, len(tree))
            chosen = growth.random("select", number).sample(range(len(tree)), k)
            kept += [tree[i] for i in sorted(chosen)]
        return kept


def _inner_nodes(tree_id: str, tree: Sequence[Trajectory]) -> list[Fork]:
    """The prompt, and every turn that another one followed, once: a branch's own begin where it left its parent."""
    nodes = [at_prompt(tree_id)]
    for trajectory in tree:
        inherited = trajectory.fork.turns if trajectory.fork else 0
        nodes += [at_turn(trajectory, turn) for turn in range(inherited + 1, trajectory.num_turns)]
    return nodes
