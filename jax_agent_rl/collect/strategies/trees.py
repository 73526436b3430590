"""Strategies that grow trees: chains branch at random turns, at uncertain ids, or after tool results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_agent_rl.collect.strategies.base import Growth, Start, Strategy, at_prompt, at_turn
from jax_agent_rl.config.strategy import ArpoConfig, TreeGrpoConfig, TreerlConfig
from jax_agent_rl.types import Fork, Trajectory


class TreeGrpo(Strategy):
    """Tree-GRPO: chains that are expanded at random turns.

    ``M`` first chains, each a tree. In each of ``L`` rounds, ``N`` nodes of every tree are drawn (with replacement)
    among its prompt and the turns that another turn followed, and one new chain continues from each. ``K`` leaves of
    each tree are kept; with ``K = 1 + L N``, all of them. M=2 N=1 L=1::

        round 0   t0 = a b c     t1 = d e
        round 1   t2 = a b + f   t3 = + g          drawn: turn b of t0's tree, the prompt of t1's

    References: Ji et al. 2025, Tree Search for LLM Agent Reinforcement Learning, arXiv 2509.21240; nodes are drawn as
    in the authors' code.
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
        kept = []
        for number, tree in enumerate(growth.trees.values()):
            k = min(self._config.k, len(tree))
            chosen = growth.random("select", number).sample(range(len(tree)), k)
            kept += [tree[i] for i in sorted(chosen)]
        return kept


def _inner_nodes(tree_id: str, tree: Sequence[Trajectory]) -> list[Fork]:
    """Return the prompt and every turn that another one followed, once: inherited turns belong to the parent."""
    nodes = [at_prompt(tree_id)]
    for trajectory in tree:
        inherited = trajectory.fork.turns if trajectory.fork else 0
        nodes += [at_turn(trajectory, turn) for turn in range(inherited + 1, trajectory.num_turns)]
    return nodes


class TreeRL(Strategy):
    """TreeRL (EPTree): branches where the policy was least certain, also in the middle of a turn.

    ``M`` first chains, each a tree. In each of ``L`` rounds, the ``N`` most uncertain ids of every tree are sampled
    anew, ``T`` times each, and continued. Uncertainty is the surprisal ``-log p`` of the sampled id, which engines
    report; it is an unbiased sample of the entropy and what the authors' code uses. M=1 N=1 L=1 T=2::

        round 0   t0 = a b c d e                       log p   -.1 -.2 -1.9 -.3 -.1
        round 1   t1 = a b + f g    t2 = a b + c h     c is drawn again: it may, by chance, be c

    An id is used in one round only. Every sampled id may be forked; the authors leave out those after the word
    "answer", a rule of their tasks' format.

    References: Hou et al. 2025, TreeRL, arXiv 2506.11902, section 3.1.
    """

    def __init__(self, config: TreerlConfig):
        self._config = config

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        round_, config = len(growth.waves), self._config
        if round_ == 0:
            return [Start()] * config.m
        if round_ > config.l:
            return []
        used = {outcome.start.fork for wave in growth.waves for outcome in wave}
        starts = []
        for tree in growth.trees.values():
            places = [place for trajectory in tree for place in _places(trajectory) if place[1] not in used]
            places.sort(key=lambda place: -place[0])  # stable: of equals, the first
            starts += [Start(fork=fork) for _, fork in places[: config.n] for _ in range(config.t)]
        return starts


def _places(trajectory: Trajectory) -> Iterator[tuple[float, Fork]]:
    """Yield the surprisal of every id the trajectory sampled itself, and the fork that samples it anew."""
    inherited = trajectory.num_inherited
    for number, turn in enumerate(trajectory.turns):
        for token, log_prob in enumerate(turn.output.log_probs):
            if inherited > 0:
                inherited -= 1
                continue
            fork = at_turn(trajectory, number, token)
            yield -log_prob, at_prompt(trajectory.tree_id) if fork.at_prompt else fork


class Arpo(Strategy):
    """ARPO: branches where an observation made the policy uncertain.

    ``initial_rollouts`` first chains of a total of ``group_size``. For every turn that follows an observation (a tool
    result, in the paper; here also what an environment or a simulated user answers), and each
    of ``beam_size - 1`` possible branches, a coin is tossed::

        dH  = H(first ids of the turn) - H(first ids of the trajectory's first turn)          nats per id
        branch before the turn  iff  clip(u - entropy_weight dH, 0, 1) <= branch_probability,   u uniform

    H is the mean surprisal of the first ``entropy_tokens`` sampled ids, an unbiased estimate of their entropy. (The
    authors sum over those ids and the ten most likely alternatives, and divide by the log of the vocabulary's size.)
    Earlier turns take precedence if the total does not suffice. Branches branch too. When nothing branches any more,
    new chains from the prompt make up the total; nothing is ever duplicated.

    References: Dong et al. 2025, Agentic Reinforced Policy Optimization, arXiv 2507.19849, section 3.1.
    """

    def __init__(self, config: ArpoConfig):
        self._config = config

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        if not growth.waves:
            return [Start()] * min(self._config.initial_rollouts, growth.group_size)
        budget = growth.group_size - growth.started
        living = [o.trajectory for o in growth.waves[-1] if o.trajectory is not None]
        turns = sorted((turn, index) for index, t in enumerate(living) for turn in _turns_after_observations(t))
        branches = [
            Start(fork=at_turn(living[index], turn))
            for turn, index in turns
            for _ in range(self._branches(living[index], turn, growth))
        ]
        return branches[:budget] or [Start(topped_up=True)] * budget

    def _branches(self, trajectory: Trajectory, turn: int, growth: Growth) -> int:
        """Return how many branches leave before this turn."""
        config = self._config
        rise = self._entropy(trajectory, turn) - self._entropy(trajectory, 0)
        tosses = growth.random("branch", trajectory.trajectory_id, turn)
        values = (tosses.random() - config.entropy_weight * rise for _ in range(config.beam_size - 1))
        return sum(min(max(value, 0.0), 1.0) <= config.branch_probability for value in values)

    def _entropy(self, trajectory: Trajectory, turn: int) -> float:
        first = trajectory.turns[turn].output.log_probs[: self._config.entropy_tokens]
        return -sum(first) / len(first)


def _turns_after_observations(trajectory: Trajectory) -> range:
    """Return its own turns that follow an observation, but the first of a branch, which was decided on before."""
    inherited = trajectory.fork.turns if trajectory.fork else 0
    return range(inherited + 1, trajectory.num_turns)
