"""Estimators with an advantage per turn."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from jax_agent_rl.learner.advantages.outcome import EPSILON, grpo

Observation = tuple[int, ...]


def anchor_groups(observations: Sequence[Observation], similarity: float) -> np.ndarray:
    """Assign numbers to steps by what the agent saw before them: equal numbers for the same anchor, int [steps].

    Args:
        observations: ids the world showed before each step (the prompt before the first).
        similarity: 1 takes equal ids only; below, a step joins the first anchor whose ``difflib`` ratio to it is at
            least this.

    References: Feng et al. 2025, GiGPO, arXiv 2505.10978, equation 6.
    """
    numbers: dict[Observation, int] = {}
    anchors: list[Observation] = []
    for observation in observations:
        if observation in numbers:
            continue
        near = (i for i, anchor in enumerate(anchors) if similarity < 1 and _alike(anchor, observation, similarity))
        number = next(near, len(anchors))
        if number == len(anchors):
            anchors.append(observation)
        numbers[observation] = number
    return np.array([numbers[o] for o in observations], np.int64)


def _alike(a: Observation, b: Observation, similarity: float) -> bool:
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return matcher.quick_ratio() >= similarity and matcher.ratio() >= similarity


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

    ``A = A_episode + w A_step`` with ``A_episode = (S - mean) / F`` over the group and ``A_step = (G - mean) / F`` over
    the steps that start from the same observation, where ``G_t = r_t + gamma G_{t+1}`` over turns. ``F`` is the
    standard deviation or 1. The only step of its anchor has no step advantage.

    Args:
        totals_G: float64 [G].
        turn_rewards: per trajectory one per turn; the last turn's includes the final reward.
        observations: per trajectory what each turn was sampled after.
        gamma: discount factor over turns.
        step_advantage_w: w.
        divide_by_std: F is the standard deviation, not 1.
        similarity: see :func:`anchor_groups`.

    Returns:
        per trajectory float64 [turns].

    References: Feng et al. 2025, arXiv 2505.10978, equations 3 to 8.
    """
    returns = [_returns(rewards, gamma) for rewards in turn_rewards]
    counts = [len(r) for r in returns]
    anchors = anchor_groups([o for per_turn in observations for o in per_turn], similarity)
    flat, steps = np.concatenate(returns), np.zeros(sum(counts))
    for anchor in np.unique(anchors):
        same = anchors == anchor
        if same.sum() > 1:
            steps[same] = _normalize(flat[same], divide_by_std)
    # A group of one is its own mean here (GRPO's rule, mean 0, would let it keep its reward).
    episode = np.repeat(_normalize(totals_G, divide_by_std), counts)
    return np.split(episode + step_advantage_w * steps, np.cumsum(counts)[:-1])


def _returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    returns, after = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        after = returns[t] = rewards[t] + gamma * after
    return returns


def _normalize(values: np.ndarray, divide_by_std: bool) -> np.ndarray:
    centred = values - values.mean()
    return centred / (values.std(ddof=1) + EPSILON) if divide_by_std and len(values) > 1 else centred


def mt_grpo(
    outcomes_G: np.ndarray, turn_scores_G: np.ndarray, result_turns: Sequence[int], coef: float
) -> list[np.ndarray]:
    """``A_outcome + c A_turn`` up to the turn whose tool result came first, ``A_outcome`` after it; of one group.

    Args:
        outcomes_G: final rewards.
        turn_scores_G: what the turns with tool calls earned.
        result_turns: for each trajectory how many turns it took to the first tool result, that one counted; 0: none.
        coef: c.

    Returns:
        per trajectory float64 [2]: the advantage before and after that result.

    References: Zeng et al. 2025, Turn-Level Credit Assignment, arXiv 2505.11821.
    """
    outcome, turn = grpo(outcomes_G), grpo(turn_scores_G)
    return [
        np.array([outcome[i] + coef * turn[i] if result else outcome[i], outcome[i]])
        for i, result in enumerate(result_turns)
    ]
