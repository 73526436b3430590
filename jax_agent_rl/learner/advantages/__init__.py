"""Advantages by name (``algorithm.adv_estimator``): from the scored trajectories of a step to a number per token.

::

    within_group.py  one number per trajectory                       grpo dr_grpo rloo opo grpo_passk
                     one per turn                                    gigpo mt_grpo
                     along trees of branches                         tree_grpo treerl arpo
    step.py          compared over the whole step                    gpg gdpo remax reinforce_plus_plus(_baseline)
                     with a running mean per role                    rae
                     with a critic                                   gae
    (none)           0: what is learned from is the KL to a teacher  none

The functions in those files are the mathematics, on plain arrays; the adapters here read trajectories and config.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages import step, within_group
from jax_agent_rl.learner.scored_batch import PerToken, ScoredBatch, all_turns, turn_rewards, turn_spans
from jax_agent_rl.trajectory_graph import TrajectoryGraph, inherited
from jax_agent_rl.types import Trajectory
from jax_agent_rl.utils.plugins import load_installed


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """``advantages`` per token, and what the critic is to learn (``returns``; None without a critic)."""

    advantages: PerToken
    returns: PerToken | None = None


Estimator = Callable[[ScoredBatch, AlgorithmConfig], Advantages]


def compute(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Advantages of all trajectories of a step; 0 at tokens the policy did not sample."""
    return find_estimator(config.adv_estimator)(samples, config)


def find_estimator(name: str) -> Estimator:
    """Return the estimator of a name, also one that an installed package registers."""
    return ESTIMATORS.get(name) or load_installed("advantages", name)


def _per_trajectory(samples: ScoredBatch, one: Callable[[np.ndarray], np.ndarray]) -> Advantages:
    """Spread one number per trajectory over its tokens; ``one`` takes the indices of a group's trajectories."""
    advantages = np.zeros(len(samples.trajectories))
    for members in samples.members:
        advantages[members] = one(members)
    return Advantages(advantages=samples.broadcast(advantages))


def _outcome(
    estimator: Callable[[np.ndarray], np.ndarray], samples: ScoredBatch, config: AlgorithmConfig
) -> Advantages:
    totals = samples.totals
    return _per_trajectory(samples, lambda members: estimator(totals[members]))


def _opo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    totals, lengths = samples.totals, np.array([mask.sum() for mask in samples.masks])
    return _per_trajectory(samples, lambda members: within_group.opo(totals[members], lengths[members]))


def _in_time(estimator: Estimator) -> Estimator:
    """Let an estimator read every response in the order in which its turns were sampled."""

    def ordered(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
        orders = samples.orders
        values = samples.values and [
            np.append(v[:-1][order], v[-1]) for v, order in zip(samples.values, orders, strict=True)
        ]
        in_time = replace(
            samples, masks=_take(samples.masks, orders), rewards=_take(samples.rewards, orders), values=values
        )
        made, back = estimator(in_time, config), [np.argsort(order) for order in orders]
        returns = None if made.returns is None else _take(made.returns, back)
        return Advantages(advantages=_take(made.advantages, back), returns=returns)

    return ordered


def _take(arrays: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array[at] for array, at in zip(arrays, places, strict=True)]


def _gdpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    keys = config.gdpo.reward_keys
    weights = dict(zip(keys, config.gdpo.reward_weights or (1.0,) * len(keys), strict=True))
    parts = {key: np.array([_part(t, key) for t in samples.trajectories]) for key in keys}
    return Advantages(advantages=step.gdpo(parts, weights, samples.members, samples.masks))


def _part(trajectory: Trajectory, key: str) -> float:
    if key == "score":
        return trajectory.reward
    if key not in trajectory.reward_parts:
        raise ConfigError(
            f"algorithm.gdpo.reward_keys names {key!r}, the reward of {trajectory.trajectory_id} has "
            f"{['score', *trajectory.reward_parts]}; let the reward function return it for every trajectory"
        )
    return trajectory.reward_parts[key]


def _gae(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    if samples.values is None:
        raise ValueError("gae needs the critic's values")
    pairs = []
    for i, trajectory in enumerate(samples.trajectories):
        bootstraps = config.bootstrap == "truncated" and trajectory.finish_reason.truncated
        value_after = float(samples.values[i][-1]) if bootstraps else 0.0
        arrays = (samples.rewards[i], samples.values[i][:-1], samples.masks[i])
        pairs.append(step.gae(*arrays, gamma=config.gamma, lam=config.lam, value_after=value_after))
    whitened = step.whiten([advantages for advantages, _ in pairs], samples.masks)
    return Advantages(advantages=whitened, returns=[returns for _, returns in pairs])


def _gigpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    gigpo = config.gigpo

    def one(group: np.ndarray) -> list[np.ndarray]:
        members = [samples.trajectories[i] for i in group]
        return within_group.gigpo(
            samples.totals[group],
            [np.array([samples.rewards[i][span].sum() for span in turn_spans(samples.trajectories[i])]) for i in group],
            [_observations(t) for t in members],
            gamma=gigpo.gamma,
            step_advantage_w=gigpo.step_advantage_w,
            divide_by_std=gigpo.mode == "mean_std_norm",
            similarity=gigpo.similarity,
        )

    return _by_turns(samples, one)


def _observations(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """Return what each turn was sampled after, in the order of time: a prompt, or what was appended to the turn before.

    A segment that goes on where another turn of its trajectory ended was shown what follows that turn.
    """
    contexts = (*trajectory.segments, trajectory)  # not its sequences: a history window makes no observation
    begun = inherited(contexts) if trajectory.segments else [0]
    shown = [
        ids
        for c, known in zip(contexts, begun, strict=True)
        for ids in (c.prompt_ids[known:], *(turn.appended_ids for turn in c.turns[:-1]))
    ]
    whens = [-1 if turn.number is None else turn.number for c in contexts for turn in c.turns]
    return [shown[i] for i in np.argsort(whens, kind="stable")]


def _mt_grpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    def one(group: np.ndarray) -> list[np.ndarray]:
        members = [samples.trajectories[i] for i in group]
        scores = np.array([turn_rewards(t, config.turn_reward).sum() for t in members])
        firsts = [next((k + 1 for k, turn in enumerate(all_turns(t)) if turn.tool_calls), 0) for t in members]
        pairs = within_group.mt_grpo(samples.totals[group] - scores, scores, firsts, config.turn_advantage_coef)
        return [
            np.where(np.arange(len(all_turns(t))) < first, *pair)
            for t, first, pair in zip(members, firsts, pairs, strict=True)
        ]

    return _by_turns(samples, one)


def _tree_grpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    totals, ids = samples.totals, np.array([t.tree_id for t in samples.trajectories])
    return _per_trajectory(samples, lambda members: within_group.tree_grpo(totals[members], ids[members]))


def _by_nodes(samples: ScoredBatch, one: Callable[[np.ndarray, within_group.Paths], list[np.ndarray]]) -> Advantages:
    """Spread per-node numbers of each group's graph over the nodes' tokens and what was appended after them."""
    advantages = [np.zeros(len(mask)) for mask in samples.masks]
    for group in samples.members:
        graph = TrajectoryGraph.of([samples.trajectories[i] for i in group])
        per_node = one(samples.totals[group], graph.paths)
        for i, path, ends, values in zip(group, graph.paths, graph.ends, per_node, strict=True):
            starts = np.asarray(ends) - [len(graph.nodes[node].ids) for node in path]
            order = np.argsort(starts)  # the path is in the order of time
            places = np.searchsorted(starts[order], np.arange(len(samples.masks[i])), side="right") - 1
            advantages[i] = values[order][places] * samples.masks[i]
    return Advantages(advantages=advantages)


def _by_turns(samples: ScoredBatch, one: Callable[[np.ndarray], list[np.ndarray]]) -> Advantages:
    """Spread per-turn numbers of each group over the turns' tokens."""
    advantages = [np.zeros(len(mask)) for mask in samples.masks]
    for group in samples.members:
        for i, per_turn in zip(group, one(group), strict=True):
            for span, value in zip(turn_spans(samples.trajectories[i]), per_turn, strict=True):
                advantages[i][span] = value
    return Advantages(advantages=advantages)


def _arpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    return _by_nodes(samples, functools.partial(within_group.arpo, hard=config.shared_tokens == "hard"))


ESTIMATORS: dict[str, Estimator] = {
    **{
        estimator.__name__: functools.partial(_outcome, estimator)
        for estimator in (within_group.grpo, within_group.dr_grpo, within_group.rloo, within_group.grpo_passk)
    },
    "opo": _opo,
    "none": lambda x, config: Advantages(advantages=[np.zeros(len(mask)) for mask in x.masks]),
    "rae": lambda x, config: Advantages(advantages=x.broadcast(x.totals - x.baselines)),
    "gpg": lambda x, config: Advantages(advantages=x.broadcast(step.gpg(x.totals, x.members))),
    "gdpo": _gdpo,
    "remax": _in_time(lambda x, config: Advantages(advantages=step.remax(x.rewards, x.masks, x.greedy))),
    "reinforce_plus_plus": _in_time(
        lambda x, config: Advantages(advantages=step.reinforce_plus_plus(x.rewards, x.masks, config.gamma))
    ),
    "reinforce_plus_plus_baseline": lambda x, config: Advantages(
        advantages=step.reinforce_plus_plus_baseline(x.totals, x.members, x.masks)
    ),
    "gae": _in_time(_gae),
    "gigpo": _gigpo,
    "mt_grpo": _mt_grpo,
    "tree_grpo": _tree_grpo,
    "treerl": lambda x, config: _by_nodes(x, within_group.treerl),
    "arpo": _arpo,
}
