"""Rollout strategies: which trajectories of a group are started, and from where.

``rollout.strategy`` chooses one. A group grows in waves. The strategy returns a wave, whose
trajectories run concurrently. When all of them have ended, the strategy is called again with
everything so far, until it returns none::

    next_wave(nothing yet)  ─► [prompt, prompt]           wave 0   t0, t1
    next_wave(t0, t1)       ─► [fork of t0, fork of t1]   wave 1   t2, t3
    next_wave(t0 … t3)      ─► []                         select: which leaves are kept

Branches thus depend on what was sampled and on the seed, never on which trajectory ended first:
runs are reproducible. The price is that a wave waits for its slowest trajectory; other groups use
the engine meanwhile.

:class:`Chains` start all at the prompt. Trees branch: :class:`TreeGrpo` at random turns,
:class:`TreeRL` at the most uncertain ids, :class:`Arpo` at uncertain turns after an observation.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jax_agent_rl.agents.request import derive_seed
from jax_agent_rl.config.rollout import ArpoConfig, StrategyConfig, TreeGrpoConfig, TreerlConfig
from jax_agent_rl.types import Fork, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One trajectory to start.

    Attributes:
        fork: where it branches off another one; None: a tree of its own, from the prompt.
        topped_up: it makes up for branches that did not occur.
    """

    fork: Fork | None = None
    topped_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a start: a scored trajectory, of several roles one each, or none if it was lost."""

    trajectory_id: str
    start: Start
    trajectories: tuple[Trajectory, ...]

    @property
    def trajectory(self) -> Trajectory | None:
        return self.trajectories[0] if self.trajectories else None

    @property
    def tree_id(self) -> str:
        if self.start.fork is None:
            return self.trajectory_id
        return self.start.fork.tree_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """A group so far.

    Attributes:
        group_size: ``rollout.group_size``.
        seed: the group's; random decisions of a strategy derive from it.
        waves: outcomes of each wave, in the order of their starts.
    """

    group_size: int
    seed: int
    waves: Sequence[Sequence[Outcome]] = ()

    @property
    def started(self) -> int:
        return sum(len(wave) for wave in self.waves)

    @property
    def trees(self) -> Mapping[str, list[Trajectory]]:
        """Surviving trajectories by tree, in order of their start; empty trees included."""
        trees: dict[str, list[Trajectory]] = {}
        for wave in self.waves:
            for outcome in wave:
                trees.setdefault(outcome.tree_id, []).extend(outcome.trajectories)
        return trees

    def random(self, *what: int | str) -> random.Random:
        """Return the random generator of one decision."""
        return random.Random(derive_seed(self.seed, *what))


class Strategy(ABC):
    """Stateless: one instance serves all groups."""

    branches: ClassVar[bool] = True
    """Whether trajectories may branch: agents must support it, and engines should keep the KV of
    sessions."""

    @abstractmethod
    def next_wave(self, growth: Growth) -> Sequence[Start]:
        """Return the trajectories to start next; none ends the group.

        A fork names a surviving trajectory.
        """

    def select(self, growth: Growth) -> list[Trajectory]:
        """Return the trajectories to keep of a group that has ended; all survivors by default."""
        trajectories = []
        for tree in growth.trees.values():
            trajectories += tree
        return trajectories


class Chains(Strategy):
    """``group_size`` independent chains from the prompt."""

    branches = False

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        if growth.waves:
            return []
        return [Start()] * growth.group_size


def at_prompt(tree_id: str) -> Fork:
    """Return the fork of a new chain that counts as part of a tree."""
    return Fork(tree_id=tree_id, parent_id=tree_id, turns=0)


def at_turn(parent: Trajectory, turn: int, tokens: int = 0) -> Fork:
    """Return the fork before a trajectory's turn ``turn``, or after its first ``tokens`` ids."""
    return Fork(tree_id=parent.tree_id, parent_id=parent.trajectory_id, turns=turn, tokens=tokens)


class TreeGrpo(Strategy):
    """Tree-GRPO: chains that are expanded at random turns.

    ``M`` first chains, each a tree. In each of ``L`` rounds, ``N`` nodes of every tree are drawn
    (with replacement) among its prompt and the turns that another turn followed, and one new chain
    continues from each. ``K`` leaves of each tree are kept; with ``K = 1 + L N``, all of them. M=2
    N=1 L=1::

        round 0   t0 = a b c     t1 = d e
        round 1   t2 = a b + f   t3 = + g          drawn: turn b of t0's tree, the prompt of t1's

    References: Ji et al. 2025, Tree Search for LLM Agent Reinforcement Learning, arXiv 2509.21240;
    nodes are drawn as in the authors' code.
    """

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
        selected = []
        for number, tree in enumerate(growth.trees.values()):
            k = min(self._config.k, len(tree))
            indices = growth.random("select", number).sample(range(len(tree)), k)
            selected += [tree[index] for index in sorted(indices)]
        return selected


def _inner_nodes(tree_id: str, tree: Sequence[Trajectory]) -> list[Fork]:
    """Return the prompt and every turn that another one followed, once.

    Inherited turns belong to the parent.
    """
    nodes = [at_prompt(tree_id)]
    for trajectory in tree:
        inherited = trajectory.fork.turns if trajectory.fork else 0
        nodes += [at_turn(trajectory, turn) for turn in range(inherited + 1, trajectory.num_turns)]
    return nodes


class TreeRL(Strategy):
    """TreeRL (EPTree): branches where the policy was least certain, also in the middle of a turn.

    ``M`` first chains, each a tree. In each of ``L`` rounds, the ``N`` most uncertain ids of every
    tree are sampled again, ``T`` times each, and continued. Uncertainty is the surprisal ``-log p``
    of the sampled id, which engines report; it is an unbiased sample of the entropy and what the
    authors' code uses. M=1 N=1 L=1 T=2::

        round 0   t0 = a b c d e                       log p   -.1 -.2 -1.9 -.3 -.1
        round 1   t1 = a b + f g    t2 = a b + c h     c is drawn again: it may, by chance, be c

    An id is used in one round only. Every sampled id may be forked; the authors leave out those
    after the word "answer", a rule of their tasks' format.

    References: Hou et al. 2025, TreeRL, arXiv 2506.11902, section 3.1.
    """

    def __init__(self, config: TreerlConfig):
        self._config = config

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        config = self._config
        round_ = len(growth.waves)
        if round_ == 0:
            return [Start()] * config.m
        if round_ > config.l:
            return []

        used_forks = set()
        for wave in growth.waves:
            for outcome in wave:
                used_forks.add(outcome.start.fork)

        starts = []
        for tree in growth.trees.values():
            candidates = []
            for trajectory in tree:
                for surprisal, fork in _surprisals(trajectory):
                    if fork not in used_forks:
                        candidates.append((surprisal, fork))
            candidates.sort(key=lambda candidate: -candidate[0])  # stable: of equals, the first
            for _, fork in candidates[: config.n]:
                starts += [Start(fork=fork)] * config.t
        return starts


def _surprisals(trajectory: Trajectory) -> Iterator[tuple[float, Fork]]:
    """Yield the surprisal of every id the trajectory sampled itself.

    With it comes the fork that samples the id again.
    """
    inherited = trajectory.num_inherited
    for turn_number, turn in enumerate(trajectory.turns):
        for token, log_prob in enumerate(turn.output.log_probs):
            if inherited > 0:
                inherited -= 1
                continue
            fork = at_turn(trajectory, turn_number, token)
            if fork.at_prompt:
                fork = at_prompt(trajectory.tree_id)
            yield -log_prob, fork


class Arpo(Strategy):
    """ARPO: branches where an observation made the policy uncertain.

    ``initial_rollouts`` first chains of a total of ``group_size``. For every turn that follows an
    observation (a tool result, in the paper; here also what an environment or a simulated user
    answers), and each of ``beam_size - 1`` possible branches, a coin is tossed::

        dH  = H(first ids of the turn) - H(first ids of the trajectory's first turn)
        branch before the turn  iff  clip(u - entropy_weight dH, 0, 1) <= branch_probability

    u is uniform. H, in nats per id, is the mean surprisal of the first ``entropy_tokens`` sampled
    ids, an unbiased estimate of their entropy. (The authors sum over those ids and the ten most
    likely alternatives, and divide by the log of the vocabulary's size.) Earlier turns take
    precedence if the total does not suffice. Branches may branch again. When nothing branches any
    more, new chains from the prompt make up the total; nothing is ever duplicated.

    References: Dong et al. 2025, Agentic Reinforced Policy Optimization, arXiv 2507.19849, section
    3.1.
    """

    def __init__(self, config: ArpoConfig):
        self._config = config

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        if not growth.waves:
            return [Start()] * min(self._config.initial_rollouts, growth.group_size)
        budget = growth.group_size - growth.started
        survivors = [o.trajectory for o in growth.waves[-1] if o.trajectory is not None]
        turns = []
        for index, trajectory in enumerate(survivors):
            for turn in _turns_after_observations(trajectory):
                turns.append((turn, index))

        branches = []
        for turn, index in sorted(turns):  # earlier turns first, whichever trajectory they are of
            trajectory = survivors[index]
            count = self._count_branches(trajectory, turn, growth)
            branches += [Start(fork=at_turn(trajectory, turn))] * count
        if not branches:
            return [Start(topped_up=True)] * budget
        return branches[:budget]

    def _count_branches(self, trajectory: Trajectory, turn: int, growth: Growth) -> int:
        """Return how many branches leave before this turn."""
        config = self._config
        entropy_rise = self._entropy(trajectory, turn) - self._entropy(trajectory, 0)
        generator = growth.random("branch", trajectory.trajectory_id, turn)
        count = 0
        for _ in range(config.beam_size - 1):
            value = generator.random() - config.entropy_weight * entropy_rise
            if min(max(value, 0.0), 1.0) <= config.branch_probability:
                count += 1
        return count

    def _entropy(self, trajectory: Trajectory, turn: int) -> float:
        log_probs = trajectory.turns[turn].output.log_probs[: self._config.entropy_tokens]
        return -sum(log_probs) / len(log_probs)


def _turns_after_observations(trajectory: Trajectory) -> range:
    """Return the turns after an observation that the trajectory sampled itself.

    The first turn of a branch is left out: its parent decided about branches before it.
    """
    inherited = trajectory.fork.turns if trajectory.fork else 0
    return range(inherited + 1, trajectory.num_turns)


def make_strategy(config: StrategyConfig) -> Strategy:
    """Return the strategy of a run."""
    match config.name:
        case "chain":
            return Chains()
        case "tree_grpo":
            return TreeGrpo(config.tree_grpo)
        case "treerl":
            return TreeRL(config.treerl)
        case "arpo":
            return Arpo(config.arpo)
