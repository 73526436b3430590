"""What a rollout strategy decides: which trajectories of a group are started, and from where.

A group grows in waves. The strategy is asked for one, its trajectories run side by side, and when all of them have
ended it is asked again, with everything so far, until it wants no more::

    next_wave(nothing yet)  ─► [prompt, prompt]           wave 0   t0, t1
    next_wave(t0, t1)       ─► [fork of t0, fork of t1]   wave 1   t2, t3
    next_wave(t0 … t3)      ─► []                         select: which leaves are kept

So what is branched from where depends on what was sampled and on the seed, never on which trajectory ended first: a run
can be repeated. The price is that a group's wave waits for its slowest trajectory; other groups use the engine
meanwhile.
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
        fork: where it leaves another one; None: a tree of its own, from the prompt.
        topped_up: it only makes up for branches that did not come about.
    """

    fork: Fork | None = None
    topped_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a start: a scored trajectory, or None if it was lost."""

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
        seed: the group's; what a strategy draws is derived from it.
        waves: outcomes of each wave, in the order in which the strategy asked for them.
    """

    group_size: int
    seed: int
    waves: Sequence[Sequence[Outcome]] = ()

    @property
    def started(self) -> int:
        return sum(map(len, self.waves))

    @property
    def trees(self) -> Mapping[str, list[Trajectory]]:
        """Surviving trajectories by tree, in the order in which they were started; every tree is there."""
        trees: dict[str, list[Trajectory]] = {}
        for outcome in (outcome for wave in self.waves for outcome in wave):
            members = trees.setdefault(outcome.tree_id, [])
            if outcome.trajectory is not None:
                members.append(outcome.trajectory)
        return trees

    def random(self, *what: int | str) -> random.Random:
        """Randomness of one decision."""
        return random.Random(derive_seed(self.seed, *what))


class Strategy(ABC):
    """Stateless: one instance serves all groups."""

    branches: ClassVar[bool] = True
    """Trajectories may leave others, so agents must be able to, and engines had better keep what they computed."""

    @abstractmethod
    def next_wave(self, growth: Growth) -> Sequence[Start]:
        """The trajectories to start next; none ends the group. A fork names a surviving trajectory of ``growth``."""

    def select(self, growth: Growth) -> list[Trajectory]:
        """The trajectories that are kept, of a group that has ended; the default keeps all that survived."""
        return [trajectory for tree in growth.trees.values() for trajectory in tree]


def at_prompt(tree_id: str) -> Fork:
    """A new chain that counts as part of a tree."""
    return Fork(tree_id=tree_id, parent_id=tree_id, turns=0)


def at_turn(parent: Trajectory, turn: int, tokens: int = 0) -> Fork:
    """Before turn ``turn`` of a trajectory, or after its first ``tokens`` ids."""
    return Fork(tree_id=parent.tree_id, parent_id=parent.trajectory_id, turns=turn, tokens=tokens)
