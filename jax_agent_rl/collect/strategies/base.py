"""Interface of a rollout strategy, which decides which trajectories of a group are started, and from where.

A group grows in waves. The strategy returns one, its trajectories run concurrently, and when all of them have ended,
the strategy is called again with everything so far, until it returns none::

    next_wave(nothing yet)  ─► [prompt, prompt]           wave 0   t0, t1
    next_wave(t0, t1)       ─► [fork of t0, fork of t1]   wave 1   t2, t3
    next_wave(t0 … t3)      ─► []                         select: which leaves are kept

Branches thus depend on what was sampled and on the seed, never on which trajectory ended first: runs are reproducible.
The price is that a wave waits for its slowest trajectory; other groups use the engine meanwhile.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jax_agent_rl.agents.context import derive_seed
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
    """Result of a start: a scored trajectory, or None if it was lost."""

    trajectory_id: str
    start: Start
    trajectory: Trajectory | None

    @property
    def tree_id(self) -> str:
        return self.start.fork.tree_id if self.start.fork else self.trajectory_id


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
        return sum(map(len, self.waves))

    @property
    def trees(self) -> Mapping[str, list[Trajectory]]:
        """Surviving trajectories by tree, in order of their start; empty trees included."""
        trees: dict[str, list[Trajectory]] = {}
        for outcome in (outcome for wave in self.waves for outcome in wave):
            members = trees.setdefault(outcome.tree_id, [])
            if outcome.trajectory is not None:
                members.append(outcome.trajectory)
        return trees

    def random(self, *what: int | str) -> random.Random:
        """Return the random generator of one decision."""
        return random.Random(derive_seed(self.seed, *what))


class Strategy(ABC):
    """Stateless: one instance serves all groups."""

    branches: ClassVar[bool] = True
    """Whether trajectories may branch: agents must support it, and engines should keep the KV of sessions."""

    @abstractmethod
    def next_wave(self, growth: Growth) -> Sequence[Start]:
        """Return the trajectories to start next; none ends the group. A fork names a surviving trajectory."""

    def select(self, growth: Growth) -> list[Trajectory]:
        """Return the trajectories to keep of a group that has ended; by default all that survived."""
        return [trajectory for tree in growth.trees.values() for trajectory in tree]


class Chains(Strategy):
    """``group_size`` independent chains from the prompt."""

    branches = False

    def next_wave(self, growth: Growth) -> Sequence[Start]:
        return [] if growth.waves else [Start()] * growth.group_size


def at_prompt(tree_id: str) -> Fork:
    """Return the fork of a new chain that counts as part of a tree."""
    return Fork(tree_id=tree_id, parent_id=tree_id, turns=0)


def at_turn(parent: Trajectory, turn: int, tokens: int = 0) -> Fork:
    """Return the fork before turn ``turn`` of a trajectory, or after the turn's first ``tokens`` ids."""
    return Fork(tree_id=parent.tree_id, parent_id=parent.trajectory_id, turns=turn, tokens=tokens)
