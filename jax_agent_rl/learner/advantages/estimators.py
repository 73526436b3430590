"""Estimators on plain arrays: within a group (one prompt), and over a whole step.

Shapes: G trajectories of one group, N of a step, L ids of a response. Everything is float64 numpy:
groups are small, and exactness is worth more than speed.

For nodes and paths of trees see :class:`~jax_agent_rl.trajectory_graph.TrajectoryGraph`. The
branches of a tree share their beginnings. A chain, which shares nothing, is a tree as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

import numpy as np

PerToken = list[np.ndarray]
"""For each trajectory one number per response id, float64 [L]; 0 where the mask is 0."""
Observation = tuple[int, ...]
Paths = Sequence[Sequence[int]]
"""For each trajectory of a group the numbers of its nodes."""
EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


def grpo(rewards_G: np.ndarray) -> np.ndarray:
    """``(S - mean) / (std + 1e-6)`` with the unbiased standard deviation.

    A group of one has mean 0 and deviation 1, so its advantage is (up to epsilon) its reward.

    References: Shao et al. 2024, DeepSeekMath, arXiv 2402.03300 (equation for outcome supervision).
    """
    if len(rewards_G) == 1:
        return rewards_G / (1 + EPSILON)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)


def dr_grpo(rewards_G: np.ndarray) -> np.ndarray:
    """``S - mean``: no division, so easy and hard prompts are not weighted up.

    References: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783.
    """
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: np.ndarray) -> np.ndarray:
    """Reward minus the mean of the *others*: ``n / (n - 1) * (S - mean)``.

    A group of one keeps its reward.

    References: Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740.
    """
    count = len(rewards_G)
    if count == 1:
        return rewards_G.copy()
    return (rewards_G - rewards_G.mean()) * count / (count - 1)


def opo(rewards_G: np.ndarray, lengths_G: np.ndarray) -> np.ndarray:
    """Reward minus its length-weighted mean, the baseline of least variance.

    A group of one keeps its reward.

    Args:
        rewards_G: float64 [G].
        lengths_G: sampled tokens of each.

    References: Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
    """
    if len(rewards_G) == 1:
        return rewards_G.copy()
    return rewards_G - np.average(rewards_G, weights=lengths_G)


def grpo_passk(rewards_G: np.ndarray) -> np.ndarray:
    """Only the best gets an advantage: its lead over the second, by the standard deviation.

    Of equals, the first one is the best.

    References: Tang et al. 2025, Optimizing LMs for Inference Time Objectives, arXiv 2503.19595.
    """
    advantages_G = np.zeros(len(rewards_G))
    if len(rewards_G) > 1:
        second, best = np.sort(rewards_G)[-2:]
        advantages_G[rewards_G.argmax()] = (best - second) / (rewards_G.std(ddof=1) + EPSILON)
    return advantages_G


# --- one advantage per turn -----------------------------------------------------------------------


def anchor_groups(observations: Sequence[Observation], similarity: float) -> np.ndarray:
    """Assign a number to each step by what the agent saw before it, int [steps].

    Steps with the same anchor have equal numbers.

    Args:
        observations: token ids that the agent saw before each step (the prompt before the first).
        similarity: 1: only equal ids have the same anchor. Below 1, a step joins the first anchor
            whose ``difflib`` ratio to it is at least this.

    References: Feng et al. 2025, GiGPO, arXiv 2505.10978, equation 6.
    """
    number_of: dict[Observation, int] = {}
    anchors: list[Observation] = []
    for observation in observations:
        if observation in number_of:
            continue
        number = None
        if similarity < 1:
            number = _similar_anchor(anchors, observation, similarity)
        if number is None:
            number = len(anchors)
            anchors.append(observation)
        number_of[observation] = number
    return np.array([number_of[observation] for observation in observations], np.int64)


def _similar_anchor(
    anchors: Sequence[Observation],
    observation: Observation,
    similarity: float,
) -> int | None:
    """Return the number of the first anchor that is similar enough."""
    for number, anchor in enumerate(anchors):
        matcher = SequenceMatcher(None, anchor, observation, autojunk=False)
        # The quick ratio is an upper bound, and much cheaper.
        if matcher.quick_ratio() >= similarity and matcher.ratio() >= similarity:
            return number
    return None


def gigpo(
    totals_G: np.ndarray,
    turn_rewards: Sequence[np.ndarray],
    observations: Sequence[Sequence[Observation]],
    *,
    gamma: float,
    step_advantage_w: float,
    divide_by_std: bool,
    similarity: float,
) -> list[np.ndarray]:
    """Episode advantage plus step advantage, of one group.

    ``A = A_episode + w A_step`` with ``A_episode = (S - mean) / F`` over the group and
    ``A_step = (G - mean) / F`` over the steps that start from the same observation, where
    ``G_t = r_t + gamma G_{t+1}`` over turns. ``F`` is the standard deviation or 1. A step whose
    anchor no other step shares has no step advantage.

    Args:
        totals_G: float64 [G].
        turn_rewards: per trajectory one reward per turn; the last one includes the final reward.
        observations: per trajectory the token ids that the agent saw before each turn.
        gamma: discount factor over turns.
        step_advantage_w: w.
        divide_by_std: F is the standard deviation, not 1.
        similarity: see :func:`anchor_groups`.

    Returns:
        per trajectory float64 [turns].

    References: Feng et al. 2025, arXiv 2505.10978, equations 3 to 8.
    """
    counts = [len(rewards) for rewards in turn_rewards]
    returns_of = []
    for rewards in turn_rewards:
        all_turns = np.ones(len(rewards), bool)
        returns_of.append(discounted_returns(rewards, all_turns, gamma))

    # All steps of the group, one trajectory after another.
    returns = np.concatenate(returns_of)
    flat_observations = [o for per_turn in observations for o in per_turn]
    anchors = anchor_groups(flat_observations, similarity)
    step_advantages = np.zeros(len(returns))
    for anchor in np.unique(anchors):
        has_anchor = anchors == anchor
        if has_anchor.sum() > 1:
            step_advantages[has_anchor] = _normalize(returns[has_anchor], divide_by_std)

    # A group of one is its own mean here (GRPO's rule, mean 0, would let it keep its reward).
    episode_advantages = np.repeat(_normalize(totals_G, divide_by_std), counts)
    advantages = episode_advantages + step_advantage_w * step_advantages
    return np.split(advantages, np.cumsum(counts)[:-1])


def _normalize(values: np.ndarray, divide_by_std: bool) -> np.ndarray:
    centred = values - values.mean()
    if not divide_by_std or len(values) < 2:
        return centred
    return centred / (values.std(ddof=1) + EPSILON)


def mt_grpo(
    outcomes_G: np.ndarray,
    turn_scores_G: np.ndarray,
    result_turns: Sequence[int],
    coef: float,
) -> list[np.ndarray]:
    """Return the advantages of one group before and after the first tool result.

    They are ``A_outcome + c A_turn`` up to the turn with the first tool result, and ``A_outcome``
    after it.

    Args:
        outcomes_G: final rewards.
        turn_scores_G: rewards of the turns with tool calls, summed.
        result_turns: number of turns up to the first tool result, this one included; 0 without one.
        coef: c.

    Returns:
        per trajectory float64 [2]: the advantage before and after that result.

    References: Zeng et al. 2025, Turn-Level Credit Assignment, arXiv 2505.11821.
    """
    outcome_advantages = grpo(outcomes_G)
    turn_advantages = grpo(turn_scores_G)

    advantages = []
    for i, result_turn in enumerate(result_turns):
        outcome_advantage = outcome_advantages[i]
        early_advantage = outcome_advantage
        if result_turn:
            early_advantage = outcome_advantage + coef * turn_advantages[i]
        advantages.append(np.array([early_advantage, outcome_advantage]))
    return advantages


def igpo(turn_rewards: Sequence[np.ndarray], gamma: float) -> list[np.ndarray]:
    """Return the advantage of every turn of one group: its reward, and the later ones.

    The rewards of all turns of the group are scaled together to mean 0 and deviation 1. A turn's
    advantage is ``A_t = r_t + gamma A_{t+1}`` of these.

    Args:
        turn_rewards: per trajectory one reward per turn; the last one includes the final reward.
        gamma: discount factor over turns.

    Returns:
        per trajectory float64 [turns].

    References: Wang et al. 2025, Information Gain-based Policy Optimization, arXiv 2510.14967.
    """
    scaled = _normalize(np.concatenate(turn_rewards), divide_by_std=True)
    advantages = []
    begin = 0
    for rewards in turn_rewards:
        end = begin + len(rewards)
        all_turns = np.ones(len(rewards), bool)
        advantages.append(discounted_returns(scaled[begin:end], all_turns, gamma))
        begin = end
    return advantages


# --- along trees of branches ----------------------------------------------------------------------


def tree_grpo(rewards_G: np.ndarray, trees_G: Sequence[str] | np.ndarray) -> np.ndarray:
    """GRPO over all of the prompt plus GRPO within each tree, float64 [G].

    A tree of one leaf adds nothing.

    Args:
        rewards_G: float64 [G].
        trees_G: the tree that each trajectory belongs to (``Trajectory.tree_id``).

    References: Ji et al. 2025, Tree Search for LLM Agent RL, arXiv 2509.21240.
    """
    advantages = grpo(rewards_G)
    tree_ids = np.asarray(trees_G)
    for tree_id in np.unique(tree_ids):
        in_tree = tree_ids == tree_id
        if in_tree.sum() > 1:
            advantages[in_tree] += grpo(rewards_G[in_tree])
    return advantages


def treerl(rewards_G: np.ndarray, paths: Paths) -> list[np.ndarray]:
    """Return the credit of every node, float64 [nodes of the path] each.

    The reward of a leaf counts by its difference from the mean of the other leaves. The value V of
    a node is the mean over the leaves below it, the value of the prompt the mean over all leaves.
    The credit is ``(V(n) + (V(n) - V(parent))) / sqrt(L(n))``: the value, plus its gain over the
    parent. L(n) is the number of leaves below the node: that many trajectories train on it.

    References: Hou et al. 2025, TreeRL, arXiv 2506.11902.
    """
    leaf_values = rloo(rewards_G)
    prompt_value = leaf_values.mean()
    node_values = _node_means(leaf_values, paths)
    num_leaves = np.bincount(np.concatenate([np.asarray(path) for path in paths]))

    credits = []
    for path in paths:
        nodes = np.asarray(path)
        values = node_values[nodes]
        parent_values = np.concatenate([[prompt_value], values[:-1]])
        credits.append((2 * values - parent_values) / np.sqrt(num_leaves[nodes]))
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
    """Return for every node the mean over the trajectories that go through it."""
    nodes = np.concatenate([np.asarray(path, np.int64) for path in paths])
    leaf_of_node = np.repeat(leaves_G, [len(path) for path in paths])
    return np.bincount(nodes, weights=leaf_of_node) / np.bincount(nodes)


# --- over the whole step, or with a critic --------------------------------------------------------


def whiten(values: PerToken, masks: Sequence[np.ndarray]) -> PerToken:
    """Scale values to zero mean and unit variance (unbiased) over all tokens of the masks.

    Other tokens get 0, and so does a single token.
    """
    selected = np.concatenate([v[mask] for v, mask in zip(values, masks, strict=True)])
    mean = selected.mean() if len(selected) else 0.0
    variance = selected.var(ddof=1) if len(selected) > 1 else 1.0
    deviation = np.sqrt(variance + VARIANCE_EPSILON)
    return [(v - mean) / deviation * mask for v, mask in zip(values, masks, strict=True)]


def discounted_returns(rewards_L: np.ndarray, mask_L: np.ndarray, gamma: float) -> np.ndarray:
    """``G_t = r_t + gamma G_{t+1}``, where t counts sampled tokens only.

    So a tool result takes no time. A reward on a masked token belongs to the sampled token before
    it. Values at mask 0 are 0.

    >>> discounted_returns(np.array([0, 0, 0, 0, 2.0]), np.array([1, 1, 0, 0, 1], bool), 0.5)
    array([0.5, 1. , 0. , 0. , 2. ])
    """
    returns_L = np.zeros(len(rewards_L))
    next_return = 0.0
    reward = 0.0  # since the sampled token before
    for t in reversed(range(len(rewards_L))):
        reward += rewards_L[t]
        if mask_L[t]:
            next_return = reward + gamma * next_return
            returns_L[t] = next_return
            reward = 0.0
    return returns_L


def reinforce_plus_plus(rewards: PerToken, masks: Sequence[np.ndarray], gamma: float) -> PerToken:
    """Discounted returns, whitened over the step.

    References: Hu et al. 2025, REINFORCE++, arXiv 2501.03262.
    """
    returns = _all_returns(rewards, masks, gamma)
    return whiten(returns, masks)


def _all_returns(rewards: PerToken, masks: Sequence[np.ndarray], gamma: float) -> PerToken:
    pairs = zip(rewards, masks, strict=True)
    return [discounted_returns(rewards_L, mask_L, gamma) for rewards_L, mask_L in pairs]


def _broadcast(per_trajectory: np.ndarray, masks: Sequence[np.ndarray]) -> PerToken:
    """Spread one number per trajectory over the tokens of its mask."""
    return [value * mask for value, mask in zip(per_trajectory, masks, strict=True)]


def reinforce_plus_plus_baseline(
    totals: np.ndarray,
    members: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
) -> PerToken:
    """``S - mean`` of the group (a group of one keeps S), whitened over the step.

    References: Hu et al. 2025, REINFORCE++, arXiv 2501.03262.
    """
    return whiten(_broadcast(_centred(totals, members), masks), masks)


def _centred(totals: np.ndarray, members: Sequence[np.ndarray]) -> np.ndarray:
    """Return ``S - mean`` of each group, float64 [N]; a group of one keeps S."""
    centred = totals.astype(np.float64, copy=True)
    for group in members:
        if len(group) > 1:
            centred[group] -= totals[group].mean()
    return centred


def remax(rewards: PerToken, masks: Sequence[np.ndarray], greedy: np.ndarray) -> PerToken:
    """Reward still to come, minus the reward of the greedy rollout of the same prompt.

    Args:
        rewards: float64 [L] each.
        masks: bool [L] each.
        greedy: float64 [N].

    References: Li et al. 2023, ReMax, arXiv 2310.10505.
    """
    advantages = []
    returns = _all_returns(rewards, masks, 1.0)
    for returns_L, baseline, mask_L in zip(returns, greedy, masks, strict=True):
        advantages.append((returns_L - baseline) * mask_L)
    return advantages


RAE_DECAY = 0.95


def running_baseline(baseline: float, rewards: Sequence[float]) -> float:
    """Return the exponential moving average of a role's rewards.

    It is ``b <- 0.95 b + 0.05 R`` for each reward R, from b = 0. RAE's advantage is the reward
    minus ``b`` as it was before the step.

    References: Liu et al. 2025, SPIRAL, arXiv 2506.24119, role-conditioned advantage estimation.
    """
    for reward in rewards:
        baseline = RAE_DECAY * baseline + (1 - RAE_DECAY) * reward
    return baseline


def gpg(totals: np.ndarray, members: Sequence[np.ndarray]) -> np.ndarray:
    """``N / nonzero * (S - mean)``, float64 [N].

    Advantages are scaled up by the share of trajectories with a reward. A group of one keeps S.

    References: Chu et al. 2025, GPG, arXiv 2504.02546.
    """
    return _centred(totals, members) * len(totals) / max(1, np.count_nonzero(totals))


def gdpo(
    parts: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    members: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
) -> PerToken:
    """GRPO on every part of the reward by itself, weighted, summed, whitened over the step.

    Args:
        parts: float64 [N] by name.
        weights: by the same names.
        members: for each group the indices of its trajectories.
        masks: bool [L] each.

    References: Liu et al. 2026, GDPO, arXiv 2601.05242.
    """
    advantages = np.zeros(len(masks))
    for name, values in parts.items():
        for group in members:
            advantages[group] += weights[name] * grpo(values[group])
    return whiten(_broadcast(advantages, masks), masks)


def gae(
    rewards_L: np.ndarray,
    values_L: np.ndarray,
    mask_L: np.ndarray,
    *,
    gamma: float,
    lam: float,
    value_after: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """``A_t = delta_t + gamma lam A_{t+1}`` over sampled tokens.

    ``delta_t`` is ``r_t + gamma V_{t+1} - V_t``.
    Inserted ids take no time: the next value and the next advantage are those of the next sampled
    token, and values at mask 0 never matter. A reward on an inserted id belongs to the sampled
    token before it.

    Args:
        rewards_L: float64 [L].
        values_L: float64 [L]; ``values_L[t]`` is of the state in which id t was sampled.
        mask_L: bool [L].
        gamma: discount factor.
        lam: weight of longer returns.
        value_after: value of the state after the last id: 0 where the trajectory ended by itself.

    Returns:
        advantages and returns (``A + V``), float64 [L]; 0 at mask 0.

    References: Schulman et al. 2015, arXiv 1506.02438.
    """
    advantages_L = np.zeros(len(rewards_L))
    returns_L = np.zeros(len(rewards_L))
    next_value = value_after
    next_advantage = 0.0
    reward = 0.0  # since the sampled token before
    for t in reversed(range(len(rewards_L))):
        reward += rewards_L[t]
        if not mask_L[t]:
            continue

        advantage = reward + gamma * next_value - values_L[t] + gamma * lam * next_advantage
        advantages_L[t] = advantage
        returns_L[t] = advantage + values_L[t]

        next_value = values_L[t]
        next_advantage = advantage
        reward = 0.0
    return advantages_L, returns_L
