"""The inventory of a run's devices: programs, and arrays resident between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jax_agent_rl.models.mesh import Device

Phase = Literal["learner", "weights", "rollout"]
Tokens = Literal["prompts", "sampled", "trained"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a run.

    Attributes:
        name: for people.
        phase: of a step, in which it runs.
        traced: to be compiled.
        mesh: what it runs on; a compiler numbers its devices in this order.
        holds: names of the :class:`Resident` arrays that are among its arguments.
        donates: names of residents whose memory, or as much, its outputs take.
        loops: how often a loop runs whose end is found while it runs.
        tokens: that a full call takes or gives.
        of: which tokens of a step these are; None where the program is not about tokens.
        calls: how often a step runs it, over all those tokens; 0 where its time does not count.
    """

    name: str
    phase: Phase
    traced: jax.stages.Traced
    mesh: Mesh
    holds: frozenset[str] = frozenset()
    donates: frozenset[str] = frozenset()
    loops: int = 1
    tokens: int = 0
    of: Tokens | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Arrays that stay on devices between programs.

    Attributes:
        name: for people.
        arrays: a tree of described arrays.
        absent: phases of a step in which they are not there.
    """

    name: str
    arrays: Any
    absent: frozenset[Phase] = frozenset()

    @functools.cached_property
    def bytes(self) -> Mapping[Device, int]:
        """Bytes on each device that holds some, without padding."""
        sums: dict[Device, int] = {}
        for x in jax.tree.leaves(self.arrays):
            size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for device in x.sharding.device_set:
                sums[device] = sums.get(device, 0) + size
        return sums


@dataclass(kw_only=True)
class Inventory:
    """Programs and resident arrays of a run, or of a phase of it."""

    programs: list[Program] = field(default_factory=list)
    residents: list[Resident] = field(default_factory=list)

    def keep(self, name: str, arrays: Any, *, absent: frozenset[Phase] = frozenset()) -> frozenset[str]:
        """Record resident arrays, if there are any; return their name for :attr:`Program.holds`."""
        if not jax.tree.leaves(arrays):
            return frozenset()
        self.residents.append(Resident(name=name, arrays=arrays, absent=absent))
        return frozenset({name})
