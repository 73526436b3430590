"""Estimators for trees of trajectories, whose branches share their first turns. All of one group (one prompt).

A tree is known by its ids alone: a node is one turn, and two trajectories share it iff they are equal, id by id, up to
its end. So every function here also takes plain chains, which share nothing::

    t1 = a ─ b ─ c          nodes (turns)      paths   t1 = [0 1 2]
    t2 = a ─ b ─ d          a b c d  e                 t2 = [0 1 3]
    t3 = e                  0 1 2 3  4                 t3 = [4]         trees {t1 t2} {t3}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_agent_rl.learner.advantages.outcome import grpo, rloo
from jax_agent_rl.types import Trajectory


def turn_paths(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """For each trajectory the nodes of its turns, int64 [turns]; see the module docstring."""
    numbers: dict[tuple[int, ...], int] = {}
    return [
        np.array([numbers.setdefault(ids, len(numbers)) for s in t.sequences for ids in _contexts(s)], np.int64)
        for t in trajectories
    ]


def _contexts(sequence: Trajectory) -> list[tuple[int, ...]]:
    """All ids up to the end of each turn."""
    ids, contexts = sequence.prompt_ids, []
    for turn in sequence.turns:
        contexts.append(ids + turn.output.token_ids)
        ids = contexts[-1] + turn.appended_ids
    return contexts


def tree_grpo(rewards_G: np.ndarray, paths: Sequence[np.ndarray]) -> np.ndarray:
    """GRPO over all of the prompt plus GRPO within each tree, float64 [G]; a tree of one leaf adds nothing.

    References: Ji et al. 2025, Tree Search for LLM Agent RL, arXiv 2509.21240.
    """
    advantages = grpo(rewards_G)
    roots = np.array([path[0] for path in paths])
    for root in np.unique(roots):
        tree = roots == root
        if tree.sum() > 1:
            advantages[tree] += grpo(rewards_G[tree])
    return advantages


def treerl(rewards_G: np.ndarray, paths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Credit of every turn: its value plus what it gained over its parent, float64 [turns] each.

    A leaf's reward is what it has over the mean of the other leaves; the value V of a node is the mean over the leaves
    below it, that of the prompt over all. The credit is ``V(n) + (V(n) - V(parent))``.

    References: Hou et al. 2025, TreeRL, arXiv 2506.11902.
    """
    leaves = rloo(rewards_G)
    values = _node_means(leaves, paths)
    credits = []
    for path in paths:
        own = values[path]
        parents = np.concatenate([[leaves.mean()], own[:-1]])
        credits.append(2 * own - parents)
    return credits


def arpo(rewards_G: np.ndarray, paths: Sequence[np.ndarray], *, hard: bool) -> list[np.ndarray]:
    """GRPO; with ``hard``, a turn common to several trajectories has the mean of their advantages.

    Returns:
        per trajectory float64 [turns].

    References: Dong et al. 2025, Agentic Reinforced Policy Optimization, arXiv 2507.19849.
    """
    advantages = grpo(rewards_G)
    if hard:
        means = _node_means(advantages, paths)
        return [means[path] for path in paths]
    return [np.full(len(path), a) for a, path in zip(advantages, paths, strict=True)]


def _node_means(leaves_G: np.ndarray, paths: Sequence[np.ndarray]) -> np.ndarray:
    """For every node the mean over the trajectories that go through it."""
    nodes = np.concatenate(paths)
    of_leaf = np.repeat(leaves_G, [len(path) for path in paths])
    return np.bincount(nodes, weights=of_leaf) / np.bincount(nodes)
