"""Advantage estimators by name: what each reads of trajectories and configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages import estimators
from jax_agent_rl.learner.advantages.estimators import PerToken
from jax_agent_rl.learner.advantages.scored_batch import (
    ScoredBatch,
    all_turns,
    turn_rewards,
    turn_spans,
)
from jax_agent_rl.trajectory_graph import TrajectoryGraph, inherited
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.plugins import load_installed


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The advantages of a step.

    Attributes:
        advantages: per token.
        returns: per token, the critic's targets; None without a critic.
    """

    advantages: PerToken
    returns: PerToken | None = None


Estimator = Callable[[ScoredBatch, AlgorithmConfig], Advantages]


def compute_advantages(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of all trajectories of a step; 0 at tokens the policy did not sample."""
    return find_estimator(config.adv_estimator)(samples, config)


def find_estimator(name: str) -> Estimator:
    """Return the estimator of a name, also one that an installed package registers."""
    return ESTIMATORS.get(name) or load_installed("advantages", name)


def _per_trajectory(
    samples: ScoredBatch,
    estimate: Callable[[np.ndarray], np.ndarray],
) -> Advantages:
    """Spread one number per trajectory over its tokens.

    Args:
        estimate: takes the indices of a group's trajectories, and returns their numbers.
    """
    advantages = np.zeros(len(samples.trajectories))
    for members in samples.members:
        advantages[members] = estimate(members)
    return Advantages(advantages=samples.broadcast(advantages))


def _outcome(
    estimator: Callable[[np.ndarray], np.ndarray],
    samples: ScoredBatch,
    config: AlgorithmConfig,
) -> Advantages:
    totals = samples.totals
    return _per_trajectory(samples, lambda members: estimator(totals[members]))


def _opo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    totals = samples.totals
    lengths = np.array([mask.sum() for mask in samples.masks])

    def estimate(members: np.ndarray) -> np.ndarray:
        return estimators.opo(totals[members], lengths[members])

    return _per_trajectory(samples, estimate)


def _in_time(estimator: Estimator) -> Estimator:
    """Let an estimator read every response in the order in which its turns were sampled."""

    def estimate(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
        orders = samples.orders
        values = None
        if samples.values is not None:
            values = []
            for response_values, order in zip(samples.values, orders, strict=True):
                before_ids = response_values[:-1]
                after_last = response_values[-1]
                values.append(np.append(before_ids[order], after_last))
        samples_in_time = replace(
            samples,
            masks=_reorder(samples.masks, orders),
            rewards=_reorder(samples.rewards, orders),
            values=values,
        )
        estimated = estimator(samples_in_time, config)

        original_orders = [np.argsort(order) for order in orders]
        returns = None
        if estimated.returns is not None:
            returns = _reorder(estimated.returns, original_orders)
        advantages = _reorder(estimated.advantages, original_orders)
        return Advantages(advantages=advantages, returns=returns)

    return estimate


def _reorder(arrays: Sequence[np.ndarray], orders: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array[order] for array, order in zip(arrays, orders, strict=True)]


def _gdpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    keys = config.gdpo.reward_keys
    weights = dict.fromkeys(keys, 1.0)
    if config.gdpo.reward_weights:
        weights = dict(zip(keys, config.gdpo.reward_weights, strict=True))

    parts = {}
    for key in keys:
        parts[key] = np.array([_reward_part(t, key) for t in samples.trajectories])
    advantages = estimators.gdpo(parts, weights, samples.members, samples.masks)
    return Advantages(advantages=advantages)


def _reward_part(trajectory: Trajectory, key: str) -> float:
    if key == "score":
        return trajectory.reward
    if key not in trajectory.reward_parts:
        raise ConfigError(
            f"algorithm.gdpo.reward_keys names {key!r}, the reward of {trajectory.trajectory_id}"
            f" has {['score', *trajectory.reward_parts]}; let the reward function return it for"
            " every trajectory"
        )
    return trajectory.reward_parts[key]


def _gae(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    if samples.values is None:
        raise ValueError("gae needs the critic's values")

    advantages = []
    returns = []

    for i, trajectory in enumerate(samples.trajectories):
        is_bootstrapped = config.bootstrap == "truncated" and trajectory.finish_reason.truncated
        response_advantages, response_returns = estimators.gae(
            samples.rewards[i],
            samples.values[i][:-1],
            samples.masks[i],
            gamma=config.gamma,
            lam=config.lam,
            value_after=float(samples.values[i][-1]) if is_bootstrapped else 0.0,
        )

        advantages.append(response_advantages)
        returns.append(response_returns)

    whitened = estimators.whiten(advantages, samples.masks)
    return Advantages(advantages=whitened, returns=returns)


def _gigpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    gigpo = config.gigpo
    totals = samples.totals

    def estimate(members: np.ndarray) -> list[np.ndarray]:
        rewards = []
        observations = []
        for i in members:
            rewards.append(_rewards_of_turns(samples, i))
            observations.append(_observations(samples.trajectories[i]))
        return estimators.gigpo(
            totals[members],
            rewards,
            observations,
            gamma=gigpo.gamma,
            step_advantage_w=gigpo.step_advantage_w,
            divide_by_std=gigpo.mode == "mean_std_norm",
            similarity=gigpo.similarity,
        )

    return _by_turns(samples, estimate)


def _igpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    def estimate(members: np.ndarray) -> list[np.ndarray]:
        rewards = [_rewards_of_turns(samples, i) for i in members]
        return estimators.igpo(rewards, config.igpo.gamma)

    return _by_turns(samples, estimate)


def _rewards_of_turns(samples: ScoredBatch, index: int) -> np.ndarray:
    """Return what each turn of a trajectory earns, float64 [turns]; the last has the reward."""
    spans = turn_spans(samples.trajectories[index])
    return np.array([samples.rewards[index][span].sum() for span in spans])


def _observations(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Return the token ids that the policy saw before each turn, in the order of time.

    They are a prompt, or what was appended to the previous turn. For a segment that goes on where
    another turn of its trajectory ended, they are what follows that turn.
    """
    # Not its sequences: what a history window repeats is not an observation.
    contexts = (*trajectory.segments, trajectory)
    inherited_lengths = inherited(contexts) if trajectory.segments else [0]

    observations = []
    turn_numbers = []
    for context, inherited_length in zip(contexts, inherited_lengths, strict=True):
        observations.append(context.prompt_ids[inherited_length:])
        observations += [turn.appended_ids for turn in context.turns[:-1]]
        for turn in context.turns:
            turn_numbers.append(-1 if turn.number is None else turn.number)
    return [observations[i] for i in np.argsort(turn_numbers, kind="stable")]


def _mt_grpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    totals = samples.totals

    def estimate(members: np.ndarray) -> list[np.ndarray]:
        trajectories = [samples.trajectories[i] for i in members]
        turn_scores = np.array([turn_rewards(t, config.turn_reward).sum() for t in trajectories])
        result_turns = [_turns_to_first_result(t) for t in trajectories]
        pairs = estimators.mt_grpo(
            totals[members] - turn_scores,
            turn_scores,
            result_turns,
            config.turn_advantage_coef,
        )

        advantages = []
        for trajectory, result_turn, pair in zip(trajectories, result_turns, pairs, strict=True):
            turn_numbers = np.arange(len(all_turns(trajectory)))
            advantage_before, advantage_after = pair
            advantages.append(
                np.where(turn_numbers < result_turn, advantage_before, advantage_after)
            )
        return advantages

    return _by_turns(samples, estimate)


def _turns_to_first_result(trajectory: Trajectory) -> int:
    """Return the number of turns up to the first tool call, this one included; 0 without any."""
    for number, turn in enumerate(all_turns(trajectory), start=1):
        if turn.tool_calls:
            return number
    return 0


def _tree_grpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    totals = samples.totals
    tree_ids = np.array([trajectory.tree_id for trajectory in samples.trajectories])

    def estimate(members: np.ndarray) -> np.ndarray:
        return estimators.tree_grpo(totals[members], tree_ids[members])

    return _per_trajectory(samples, estimate)


def _by_nodes(
    samples: ScoredBatch,
    estimate: Callable[[np.ndarray, estimators.Paths], list[np.ndarray]],
) -> Advantages:
    """Spread numbers of nodes over their tokens, and over what was appended after them.

    Args:
        estimate: takes the totals of a group, and the paths of its graph; returns one number for
            each node of each path.
    """
    totals = samples.totals
    advantages = [np.zeros(len(mask)) for mask in samples.masks]
    for members in samples.members:
        graph = TrajectoryGraph.of([samples.trajectories[i] for i in members])
        estimated = estimate(totals[members], graph.paths)
        for i, path, ends, values in zip(members, graph.paths, graph.ends, estimated, strict=True):
            mask = samples.masks[i]
            starts = np.asarray(ends) - [len(graph.nodes[node].ids) for node in path]
            # The path is in the order of time, tokens are in the order of sequences.
            order = np.argsort(starts)
            node_of_token = np.searchsorted(starts[order], np.arange(len(mask)), side="right") - 1
            advantages[i] = values[order][node_of_token] * mask
    return Advantages(advantages=advantages)


def _by_turns(
    samples: ScoredBatch,
    estimate: Callable[[np.ndarray], list[np.ndarray]],
) -> Advantages:
    """Spread numbers of turns over their tokens.

    Args:
        estimate: takes the indices of a group's trajectories; returns one number for each turn.
    """
    advantages = [np.zeros(len(mask)) for mask in samples.masks]
    for members in samples.members:
        for i, per_turn in zip(members, estimate(members), strict=True):
            spans = turn_spans(samples.trajectories[i])
            for span, value in zip(spans, per_turn, strict=True):
                advantages[i][span] = value
    return Advantages(advantages=advantages)


def _treerl(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    return _by_nodes(samples, estimators.treerl)


def _arpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    is_hard = config.shared_tokens == "hard"
    return _by_nodes(samples, functools.partial(estimators.arpo, hard=is_hard))


def _none(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    return Advantages(advantages=[np.zeros(len(mask)) for mask in samples.masks])


def _rae(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    return Advantages(advantages=samples.broadcast(samples.totals - samples.baselines))


def _gpg(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    advantages = estimators.gpg(samples.totals, samples.members)
    return Advantages(advantages=samples.broadcast(advantages))


def _remax(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    advantages = estimators.remax(samples.rewards, samples.masks, samples.greedy)
    return Advantages(advantages=advantages)


def _reinforce_plus_plus(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    advantages = estimators.reinforce_plus_plus(samples.rewards, samples.masks, config.gamma)
    return Advantages(advantages=advantages)


def _reinforce_plus_plus_baseline(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    advantages = estimators.reinforce_plus_plus_baseline(
        samples.totals,
        samples.members,
        samples.masks,
    )
    return Advantages(advantages=advantages)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": functools.partial(_outcome, estimators.grpo),
    "dr_grpo": functools.partial(_outcome, estimators.dr_grpo),
    "rloo": functools.partial(_outcome, estimators.rloo),
    "grpo_passk": functools.partial(_outcome, estimators.grpo_passk),
    "opo": _opo,
    "none": _none,
    "rae": _rae,
    "gpg": _gpg,
    "gdpo": _gdpo,
    "remax": _in_time(_remax),
    "reinforce_plus_plus": _in_time(_reinforce_plus_plus),
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "gae": _in_time(_gae),
    "gigpo": _gigpo,
    "mt_grpo": _mt_grpo,
    "igpo": _igpo,
    "tree_grpo": _tree_grpo,
    "treerl": _treerl,
    "arpo": _arpo,
}
