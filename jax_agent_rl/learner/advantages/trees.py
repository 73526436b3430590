"""Estimators for trees of trajectories, whose branches share their beginnings. All of one group (one prompt).

Nodes and paths are those of :class:`~jax_agent_rl.trajectory_graph.TrajectoryGraph`; every function here also takes
plain chains, which share nothing::

    t1 = a ─ b ─ c          nodes (turns)      paths   t1 = [0 1 2]
    t2 = a ─ b ─ d          a b c d  e                 t2 = [0 1 3]
    t3 = e                  0 1 2 3  4                 t3 = [4]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_agent_rl.learner.advantages.outcome import grpo, rloo

Paths = Sequence[Sequence[int]]
"""For each trajectory the numbers of its nodes."""


def tree_grpo(rewards_G: np.ndarray, trees_G: Sequence[str]) -> np.ndarray:
    """GRPO over all of the prompt plus GRPO within each tree, float64 [G]; a tree of one leaf adds nothing.

    Args:
        rewards_G: float64 [G].
        trees_G: which tree each trajectory is of (``Trajectory.tree_id``).

    References: Ji et al. 2025, Tree Search for LLM Agent RL, arXiv 2509.21240.
    """
    advantages = grpo(rewards_G)
    ids = np.asarray(trees_G)
    for tree_id in np.unique(ids):
        tree = ids == tree_id
        if tree.sum() > 1:
            advantages[tree] += grpo(rewards_G[tree])
    return advantages


def treerl(rewards_G: np.ndarray, paths: Paths) -> list[np.ndarray]:
    """Credit of every node: its value plus what it gained over its parent, float64 [nodes of the path] each.

    A leaf's reward is what it has over the mean of the other leaves; the value V of a node is the mean over the leaves
    below it, that of the prompt over all. The credit is ``(V(n) + (V(n) - V(parent))) / sqrt(L(n))``, L(n) being the
    number of those leaves: so many trajectories train on the node.

    References: Hou et al. 2025, TreeRL, arXiv 2506.11902.
    """
    leaves = rloo(rewards_G)
    values, shared = _node_means(leaves, paths), np.bincount(np.concatenate([np.asarray(path) for path in paths]))
    credits = []
    for path in paths:
        own = values[np.asarray(path)]
        parents = np.concatenate([[leaves.mean()], own[:-1]])
        credits.append((2 * own - parents) / np.sqrt(shared[np.asarray(path)]))
    return credits


def arpo(rewards_G: np.ndarray, paths: Paths, *, hard: bool) -> list[np.ndarray]:
    """GRPO; with ``hard``, a node common to several trajectories has the mean of their advantages.

    Returns:
        per trajectory float64 [nodes of its path].

    References: Dong et al. 2025, Agentic Reinforced Policy Optimization, arXiv 2507.19849.
    """
    advantages = grpo(rewards_G)
    if hard:
        means = _node_means(advantages, paths)
        return [means[np.asarray(path)] for path in paths]
    return [np.full(len(path), a) for a, path in zip(advantages, paths, strict=True)]


def _node_means(leaves_G: np.ndarray, paths: Paths) -> np.ndarray:
    """For every node the mean over the trajectories that go through it."""
    nodes = np.concatenate([np.asarray(path, np.int64) for path in paths])
    of_leaf = np.repeat(leaves_G, [len(path) for path in paths])
    return np.bincount(nodes, weights=of_leaf) / np.bincount(nodes)
