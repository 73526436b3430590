"""TreeRL (EPTree): branches where the policy was least certain, in the middle of a turn if need be.

``M`` first chains, each a tree. In each of ``L`` rounds, the ``N`` most uncertain ids of every tree are sampled anew,
``T`` times each, and go on from there. Uncertainty is the surprisal ``-log p`` of the id that was sampled, which
engines report; it is an unbiased sample of the entropy and what the authors' code uses. M=1 N=1 L=1 T=2::

    round 0   t0 = a b c d e                       log p   -.1 -.2 -1.9 -.3 -.1
    round 1   t1 = a b + f g    t2 = a b + c h     c is drawn again: it may, by chance, be c

A place is used in one round only. Every id the policy sampled may be forked; the authors leave out those after the word
"answer", a rule of their tasks' format.

References: Hou et al. 2025, TreeRL, arXiv 2506.11902, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax_agent_rl.collect.strategies.base import Growth, Start, Strategy, at_prompt, at_turn
from jax_agent_rl.config.strategy import TreerlConfig
from jax_agent_rl.types import Fork, Trajectory


class TreeRL(Strategy):
    """See the module docstring."""

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
    """Surprisal of every id the trajectory sampled itself, and the fork that samples it anew."""
    inherited = trajectory.num_inherited
    for number, turn in enumerate(trajectory.turns):
        for token, log_prob in enumerate(turn.output.log_probs):
            if inherited > 0:
                inherited -= 1
                continue
            fork = at_turn(trajectory, number, token)
            yield -log_prob, at_prompt(trajectory.tree_id) if fork.at_prompt else fork
