"""Engines of one process that load and release their weights together.

A program with collectives has to be launched once, by one thread, while no engine computes. Every
engine's thread brings its old weights to a barrier, the last one to arrive does the work for all,
and each goes on with its result::

    engine 0 ──old weights──┐                                              ┌──► its shards
    engine 1 ──old weights──┼──► barrier ──► the last: one program for all ┼──► its shards
    engine 2 ──old weights──┘                                              └──► its shards
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.sharding import split_mesh
from jax_agent_rl.jetstream.weights import JointParams, WeightLoader, to_host
from jax_agent_rl.models.config import Params

REPLICA_ENDED = "another data-parallel engine of this process has ended"


class ReplicaGroup:
    """The barrier of the module docstring.

    Args:
        mesh: devices of all engines, which lie along ``data``.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.replicas = []
        for number, replica_mesh in enumerate(split_mesh(mesh)):
            self.replicas.append(Replica(self, number, replica_mesh))
        self._inputs: list[Any] = [None] * len(self.replicas)
        self._results: list[Any] = []
        self._work: Callable[[list[Any]], list[Any]] = list
        self._barrier = threading.Barrier(len(self.replicas), action=self._run)

    def meet(self, number: int, value: Any, work: Callable[[list[Any]], list[Any]]) -> Any:
        """Wait for all engines; return this one's part of ``work``'s result, or raise its error.

        Args:
            number: number of the calling engine.
            work: maps the values of all engines to a result for each; the same for all.

        Raises:
            EngineDiedError: an engine has ended.
        """
        self._inputs[number] = value
        self._work = work
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise EngineDiedError(REPLICA_ENDED) from None
        result = self._results[number]
        self._results[number] = None  # nothing here keeps weights in memory
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        """Let no engine wait any more, as one has ended."""
        self._barrier.abort()

    def _run(self) -> None:
        inputs = self._inputs
        work = self._work
        self._inputs = [None] * len(inputs)  # nothing here keeps weights in memory
        self._work = list
        try:
            self._results = work(inputs)
        except Exception as error:  # raised in every engine's thread
            self._results = [error] * len(inputs)

    def load(
        self,
        load: WeightLoader,
        params: Params | JointParams,
        old: list[EngineParams | None],
    ) -> list[EngineParams]:
        """Load parameters into all engines.

        They take the memory of the old weights if all engines have some on devices.
        """
        loaded = load(params, self.join(old))
        return [self.part_of(loaded, replica) for replica in self.replicas]

    def join(self, parts: list[EngineParams | None]) -> EngineParams | None:
        """Return arrays on all devices of the engines' weights; None if one has none there."""
        if any(part is None or isinstance(part.embed, np.ndarray) for part in parts):
            return None
        return jax.tree.map(self._join, *parts)

    def part_of(self, params: EngineParams, replica: Replica) -> EngineParams:
        """Return an engine's shards of arrays on all devices."""

        def select(x: jax.Array) -> jax.Array:
            assert isinstance(x.sharding, NamedSharding)
            sharding = NamedSharding(replica.mesh, x.sharding.spec)
            shards = [s.data for s in x.addressable_shards if s.device in sharding.device_set]
            return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

        return jax.tree.map(select, params)

    def _join(self, *parts: jax.Array) -> jax.Array:
        """Return one array of the engines' shards."""
        sharding = parts[0].sharding
        assert isinstance(sharding, NamedSharding)
        shards = []
        for part in parts:
            for shard in part.addressable_shards:
                shards.append(shard.data)
        group_sharding = NamedSharding(self.mesh, sharding.spec)
        return jax.make_array_from_single_device_arrays(parts[0].shape, group_sharding, shards)


@dataclass(frozen=True, eq=False)
class Replica:
    """The place of one engine in its group."""

    group: ReplicaGroup
    number: int
    mesh: Mesh

    def load(
        self,
        load: WeightLoader,
        params: Params | JointParams,
        old: EngineParams | None = None,
    ) -> EngineParams:
        """Load parameters together with the other engines, see :class:`WeightLoader`."""
        # Engine 0's loader, whoever runs it: the programs are compiled once.
        loader = load if self.number == 0 else None

        def work(inputs: list[Any]) -> list[EngineParams]:
            first_loader = next(loader for loader, _ in inputs if loader is not None)
            return self.group.load(first_loader, params, [old for _, old in inputs])

        return self.group.meet(self.number, (loader, old), work)

    def part_of(self, params: EngineParams) -> EngineParams:
        """Return this engine's shards of arrays on all devices."""
        return self.group.part_of(params, self)

    def offload(self, params: EngineParams) -> EngineParams:
        """Return a copy of the weights on the host, which all engines share."""

        def work(inputs: list[EngineParams]) -> list[EngineParams]:
            return [to_host(inputs[0])] * len(inputs)

        return self.group.meet(self.number, params, work)
