"""What a trajectory earned, before and after everything that changes it, and who reads which.

:attr:`Trajectory.score` is what the reward function returned and never changes.
:attr:`Trajectory.reward` is that less the penalties of ``algorithm.shaping``. ``reward_parts``
holds the other numbers of the function, and the penalties::

    reward function ─► score ─► accuracy     right or wrong: the part `accuracy`, or `acc` as in
                         │                   verl, else the score
                        (1) shaping: overlong, repetition
                         ▼
                       reward
                         │
                        (2) + rewards of turns (algorithm.turn_reward): tool rewards, or the
                         │    share of calls that work; progress divides the reward among turns
                         ▼
                       total        S of the estimators
                         │
                        (3) - KL per token (algorithm.kl.where=reward), in the learner
                        (4) - baseline, scaled: the group's mean, greedy rollout, RAE's mean, critic
                        (5) whitened over the step
                        (6) - KL per token (algorithm.kl.where=advantage)
                         ▼
                       advantages ─► (7) clipped, corrected for off-policy tokens: the loss

Tool rewards and turn scores are a part of the score only if the reward function reads them. Every
reader reads at one place, the same in all trainers:

============================  ================================  ====================================
reader                        reads                             so that
============================  ================================  ====================================
filter_zero_variance,         accuracy, or score and turns      (1) cannot make a group look mixed
refills, zero_variance_share  (2): ``algorithm.filter_metric``  that is all right or all wrong. A
                                                                group of equal totals is left out as
                                                                well: it has no advantages
estimators                    total, after (3)                  every change is learned from
estimator gdpo                reward, and reward_parts          penalties are in its key ``score``
estimator mt_grpo             reward, and (2) apart             outcome and turns are compared
                                                                separately
baselines of remax and rae    total                             they have what they are subtracted
                                                                from
held-out accuracy,            accuracy                          it is comparable whatever is
target_accuracy                                                 penalized
eval, rollout, doctor         score                             shaping is for training alone
reward_mean, best and worst   reward                            they show what is learned from
trajectories, report, role
metrics
score_mean, warnings          score                             a penalty is not a lost ability
strategies, trees, buffer     nothing                           what is sampled does not depend on
                                                                rewards
groups continued after a      score                             (1) is applied to it as in the first
restart                                                         run
============================  ================================  ====================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax_agent_rl.types import ToolCallRecord, Trajectory, Turn

ACCURACY_PARTS = ("accuracy", "acc")
"""Parts of a reward that say whether the answer was right; the first that a reward has counts.

verl names it ``acc``.
"""


def accuracy(trajectory: Trajectory) -> float:
    """Return whether the answer was right, as the reward function says.

    That is its part ``accuracy`` or ``acc``; the score if it returns neither.
    """
    for name in ACCURACY_PARTS:
        if name in trajectory.reward_parts:
            return trajectory.reward_parts[name]
    return trajectory.score


TURN_REWARDS: dict[str, Callable[[Sequence[ToolCallRecord]], float]] = {
    "none": lambda calls: 0.0,
    "tool_reward": lambda calls: sum(call.reward for call in calls),
    "tool_success": lambda calls: sum(call.error is None for call in calls) / len(calls),
    "progress": lambda calls: 0.0,
}
"""Rewards of a turn's calls, by ``algorithm.turn_reward``. Progress adds nothing to the total: it
divides the reward among the turns, see :func:`progress_rewards`."""

PROGRESS = "progress"
"""Key under which a reward function returns partial scores; its part ``progress/<n>`` is the score
after turn n, from 1."""


def partial_scores(trajectory: Trajectory, turn_scores: Sequence[float | None]) -> list[float]:
    """Return a verifier's partial score after every turn, of all that was done until then.

    These are what the reward function returned as ``progress``. Without, they are the sums of the
    scores that an environment gave until then.

    Args:
        turn_scores: ``Turn.score`` of the turns of all its sequences, in the order of time.
    """
    scores = []
    environment_total = 0.0
    for number, turn_score in enumerate(turn_scores, start=1):
        environment_total += turn_score or 0.0
        reported = trajectory.reward_parts.get(f"{PROGRESS}/{number}")
        scores.append(environment_total if reported is None else reported)
    return scores


def progress_rewards(scores: Sequence[float]) -> list[float]:
    """Return what each turn earns by the difference that it made to the partial score.

    The reward itself counts as the score after the last turn. The last turn gets it besides, so
    what it earns here is what the turns before it got already. The sum is 0: with the reward, all
    turns together earn the reward.

    >>> progress_rewards([0.25, 0.75, 1.0])
    [0.25, 0.5, -0.75]

    Args:
        scores: partial score after each turn.

    References: Wang et al. 2025, IGPO, arXiv 2510.14967: a turn's reward is the gain of the
    probability of the right answer. Ng et al. 1999, Policy Invariance Under Reward
    Transformations: differences of a potential leave the best policy as it is.
    """
    rewards = []
    previous = 0.0
    for score in scores[:-1]:
        rewards.append(score - previous)
        previous = score
    rewards.append(-previous)
    return rewards


def reward_of_turn(turn: Turn, source: str) -> float:
    """Return what a turn earns besides the reward; 0 without tool calls.

    Args:
        source: ``algorithm.turn_reward``, a key of :data:`TURN_REWARDS`.
    """
    if not turn.tool_calls:
        return 0.0
    return TURN_REWARDS[source](turn.tool_calls)


def turn_rewards_sum(trajectory: Trajectory, source: str) -> float:
    """Return what the turns of all sequences of a trajectory earn."""
    total = 0.0
    for sequence in (*trajectory.segments, trajectory):
        for turn in sequence.turns:
            total += reward_of_turn(turn, source)
    return total


def total_reward(trajectory: Trajectory, source: str) -> float:
    """Return S, what estimators compare: the shaped reward and the turns' rewards."""
    return trajectory.reward + turn_rewards_sum(trajectory, source)


def unshaped_total(trajectory: Trajectory, source: str) -> float:
    """Return what S would be without the penalties of ``algorithm.shaping``."""
    return trajectory.score + turn_rewards_sum(trajectory, source)
