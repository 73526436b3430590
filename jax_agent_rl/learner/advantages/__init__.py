"""Advantages by name (``algorithm.adv_estimator``): from the scored trajectories of a step to a number per token.

::

    one number per trajectory                       grpo dr_grpo rloo opo grpo_passk
    one per turn                                    gigpo mt_grpo
    along trees of branches                         tree_grpo treerl arpo
    compared over the whole step                    gpg gdpo remax reinforce_plus_plus(_baseline)
    with a running mean per role                    rae
    with a critic                                   gae
    0: what is learned from is the KL to a teacher  none

``estimators`` is the mathematics, on plain arrays; the adapters here read trajectories and config. Shapes: N
trajectories, L ids of a response.

The response of a trajectory with segments is that of all its sequences, one after another: it is estimated as a whole,
in one piece or in many. What depends on time (returns, discounts, first turns) follows the order in which its turns
were sampled, which is another where sub-agents answered between two turns of their caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_agent_rl.config.algorithm import AlgorithmConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.learner.advantages import estimators
from jax_agent_rl.learner.advantages.estimators import PerToken
from jax_agent_rl.outcomes import reward_of_turn
from jax_agent_rl.trajectory_graph import TrajectoryGraph, inherited, timeline
from jax_agent_rl.types import Group, Trajectory, Turn
from jax_agent_rl.utils.plugins import load_installed


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """A whole step, before it is cut into mini-batches.

    Attributes:
        trajectories: in order of their groups.
        groups: int [N], number of each trajectory's group and role: whose rewards compare.
        masks: bool [L] each, ``loss_mask``: what was sampled, and observations that are trained on.
        rewards: token rewards; a turn's stand at its last sampled token, the final one at the last of all.
        greedy: float64 [N], total reward of the greedy rollout of the same prompt (ReMax); NaN where there is none.
        baselines: float64 [N], total reward to expect of the same role (RAE); 0 where nothing is known.
        values: float64 [L + 1] each, the critic's value of the state before every id and after the last; or None.
    """

    trajectories: Sequence[Trajectory]
    groups: np.ndarray
    masks: list[np.ndarray]
    rewards: PerToken
    greedy: np.ndarray
    baselines: np.ndarray
    values: list[np.ndarray] | None = None

    @property
    def totals(self) -> np.ndarray:
        """float64 [N]: S, the sum of each trajectory's token rewards."""
        return np.array([rewards.sum() for rewards in self.rewards])

    @property
    def members(self) -> list[np.ndarray]:
        """For each group and role the indices of its trajectories."""
        return [np.flatnonzero(self.groups == g) for g in range(int(self.groups.max(initial=-1)) + 1)]

    @property
    def orders(self) -> list[np.ndarray]:
        """For each trajectory the places of its response in the order of time, int64 [L]."""
        return [
            np.concatenate([np.arange(at, at + len(t.output.token_ids) + len(t.appended_ids)) for at, t in turns])
            for turns in map(timeline, self.trajectories)
        ]

    def broadcast(self, per_trajectory: np.ndarray) -> PerToken:
        """Spread one number per trajectory over all its sampled tokens."""
        return [value * mask for value, mask in zip(per_trajectory, self.masks, strict=True)]


def scored_batch(groups: Sequence[Group], *, turn_reward: str) -> ScoredBatch:
    """Lay out scored groups.

    Args:
        groups: of the step.
        turn_reward: ``algorithm.turn_reward``, what a turn with tool calls earns besides the (shaped) reward.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    masks = [np.concatenate([np.asarray(s.loss_mask, bool) for s in t.sequences]) for t in trajectories]
    rewards = []
    for trajectory, mask in zip(trajectories, masks, strict=True):
        own = turn_rewards(trajectory, turn_reward)
        own[-1] += trajectory.reward
        rewards.append(np.zeros(len(mask)))
        rewards[-1][[at + len(turn.output.token_ids) - 1 for at, turn in timeline(trajectory)]] = own
    counts = [len(g.trajectories) for g in groups]
    greedy = [np.nan if g.greedy_reward is None else g.greedy_reward for g in groups]
    parts = [(number, t.role) for number, group in enumerate(groups) for t in group.trajectories]
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    return ScoredBatch(
        trajectories=trajectories,
        groups=np.array([numbers[part] for part in parts], np.intp),
        masks=masks,
        rewards=rewards,
        greedy=np.repeat(np.asarray(greedy, np.float64), counts),
        baselines=np.array([g.baselines.get(t.role or "", 0.0) for g in groups for t in g.trajectories], np.float64),
    )


def all_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of all sequences of a trajectory in the order of time."""
    return [turn for _, turn in timeline(trajectory)]


def turn_spans(trajectory: Trajectory) -> list[slice]:
    """Return each turn's span in the response: sampled ids, and appended ones if they are trained on."""
    return [
        slice(at, at + len(turn.output.token_ids) + len(turn.appended_ids) * turn.learn_appended)
        for at, turn in timeline(trajectory)
    ]


def turn_rewards(trajectory: Trajectory, source: str) -> np.ndarray:
    """Return one reward per turn in the order of time, float64; ``source`` is ``algorithm.turn_reward``."""
    return np.array([reward_of_turn(turn, source) for turn in all_turns(trajectory)], np.float64)


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
    return _per_trajectory(samples, lambda members: estimators.opo(totals[members], lengths[members]))


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
    return Advantages(advantages=estimators.gdpo(parts, weights, samples.members, samples.masks))


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
        pairs.append(estimators.gae(*arrays, gamma=config.gamma, lam=config.lam, value_after=value_after))
    whitened = estimators.whiten([advantages for advantages, _ in pairs], samples.masks)
    return Advantages(advantages=whitened, returns=[returns for _, returns in pairs])


def _gigpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    gigpo = config.gigpo

    def one(group: np.ndarray) -> list[np.ndarray]:
        members = [samples.trajectories[i] for i in group]
        return estimators.gigpo(
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
        pairs = estimators.mt_grpo(samples.totals[group] - scores, scores, firsts, config.turn_advantage_coef)
        return [
            np.where(np.arange(len(all_turns(t))) < first, *pair)
            for t, first, pair in zip(members, firsts, pairs, strict=True)
        ]

    return _by_turns(samples, one)


def _tree_grpo(samples: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    totals, ids = samples.totals, np.array([t.tree_id for t in samples.trajectories])
    return _per_trajectory(samples, lambda members: estimators.tree_grpo(totals[members], ids[members]))


def _by_nodes(samples: ScoredBatch, one: Callable[[np.ndarray, estimators.Paths], list[np.ndarray]]) -> Advantages:
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
    return _by_nodes(samples, functools.partial(estimators.arpo, hard=config.shared_tokens == "hard"))


ESTIMATORS: dict[str, Estimator] = {
    **{
        estimator.__name__: functools.partial(_outcome, estimator)
        for estimator in (estimators.grpo, estimators.dr_grpo, estimators.rloo, estimators.grpo_passk)
    },
    "opo": _opo,
    "none": lambda x, config: Advantages(advantages=[np.zeros(len(mask)) for mask in x.masks]),
    "rae": lambda x, config: Advantages(advantages=x.broadcast(x.totals - x.baselines)),
    "gpg": lambda x, config: Advantages(advantages=x.broadcast(estimators.gpg(x.totals, x.members))),
    "gdpo": _gdpo,
    "remax": _in_time(lambda x, config: Advantages(advantages=estimators.remax(x.rewards, x.masks, x.greedy))),
    "reinforce_plus_plus": _in_time(
        lambda x, config: Advantages(advantages=estimators.reinforce_plus_plus(x.rewards, x.masks, config.gamma))
    ),
    "reinforce_plus_plus_baseline": lambda x, config: Advantages(
        advantages=estimators.reinforce_plus_plus_baseline(x.totals, x.members, x.masks)
    ),
    "gae": _in_time(_gae),
    "gigpo": _gigpo,
    "mt_grpo": _mt_grpo,
    "tree_grpo": _tree_grpo,
    "treerl": lambda x, config: _by_nodes(x, estimators.treerl),
    "arpo": _arpo,
}
