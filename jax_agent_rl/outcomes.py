"""What a trajectory earned, before and after everything that changes it, and who reads which.

:attr:`Trajectory.score` is what the reward function returned and never changes.
:attr:`Trajectory.reward` is that less the penalties of ``algorithm.shaping``. ``reward_parts``
holds the other numbers of the function, and the penalties::

    reward function ─► score ─► accuracy     right or wrong: the part `accuracy`, or `acc` as in verl, else the score
                         │
                        (1) shaping: overlong, repetition
                         ▼
                       reward
                         │
                        (2) + rewards of turns (algorithm.turn_reward): tool rewards, or the share of calls that work
                         ▼
                       total        S of the estimators
                         │
                        (3) - KL per token (algorithm.kl.where=reward), in the learner
                        (4) - baseline, scaled: mean of the group, greedy rollout, RAE's mean, critic
                        (5) whitened over the step
                        (6) - KL per token (algorithm.kl.where=advantage)
                         ▼
                       advantages ─► (7) clipped, corrected for off-policy tokens: the loss

Tool rewards and turn scores are a part of the score only if the reward function reads them. Every
reader reads at one place, the same in all trainers:

==================================  ==================================  ==============================================
reader                              reads                               so that
==================================  ==================================  ==============================================
filter_zero_variance, refills,      accuracy, or score and turns (2):   (1) cannot make a group look mixed that is all
zero_variance_share                 ``algorithm.filter_metric``         right or all wrong. A group of equal totals is
                                                                        left out as well: it has no advantages
estimators                          total, after (3)                    every change is learned from
estimator gdpo                      reward, and reward_parts            penalties are in its key ``score``
estimator mt_grpo                   reward, and (2) apart               outcome and turns are compared separately
baselines of remax and rae          total                               they have what they are subtracted from
held-out accuracy, target_accuracy  accuracy                            it is comparable whatever is penalized
eval, rollout, doctor               score                               shaping is for training alone
reward_mean, best and worst         reward                              they show what is learned from
trajectories, report, role metrics
score_mean, warnings                score                               a penalty is no lost ability
strategies, trees, buffer           nothing                             what is sampled does not depend on rewards
groups continued after a restart    score                               (1) is applied to it as in the first run
==================================  ==================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax_agent_rl.types import ToolCallRecord, Trajectory, Turn

ACCURACY_PARTS = ("accuracy", "acc")
"""Parts of a reward that say whether the answer was right; the first one that is there. verl's is
``acc``."""


def accuracy(trajectory: Trajectory) -> float:
    """Return whether the answer was right, as its reward function says: its part of that name, else its score."""
    for name in ACCURACY_PARTS:
        if name in trajectory.reward_parts:
            return trajectory.reward_parts[name]
    return trajectory.score


TURN_REWARDS: dict[str, Callable[[Sequence[ToolCallRecord]], float]] = {
    "none": lambda calls: 0.0,
    "tool_reward": lambda calls: sum(call.reward for call in calls),
    "tool_success": lambda calls: sum(call.error is None for call in calls) / len(calls),
}
"""Rewards of a turn's calls, by ``algorithm.turn_reward``."""


def reward_of_turn(turn: Turn, source: str) -> float:
    """Return what a turn earns besides the reward, by ``algorithm.turn_reward``; 0 without tool calls."""
    return TURN_REWARDS[source](turn.tool_calls) if turn.tool_calls else 0.0


def turn_rewards_sum(trajectory: Trajectory, source: str) -> float:
    """Return what the turns of all sequences of a trajectory earn."""
    total = 0.0
    for part in (*trajectory.segments, trajectory):
        for turn in part.turns:
            total += reward_of_turn(turn, source)
    return total


def total_reward(trajectory: Trajectory, source: str) -> float:
    """Return S, what estimators compare: the shaped reward and the turns' rewards."""
    return trajectory.reward + turn_rewards_sum(trajectory, source)


def unshaped_total(trajectory: Trajectory, source: str) -> float:
    """Return what S would be without the penalties of ``algorithm.shaping``."""
    return trajectory.score + turn_rewards_sum(trajectory, source)
