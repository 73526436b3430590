"""Several engines of one process, each on devices of its own, as one backend.

::

    request ──► Balancer ──┬──► JetStreamBackend 0: thread, scheduler, KV cache     devices 0 … t-1
    session, prefix, load  ├──► JetStreamBackend 1                                  devices t … 2t-1
                           └──► …
    weights ──one program on all devices──► each engine takes its shards, without a copy

Engines sample independently. Only to load or release weights do they meet: a program with
collectives has to be launched once, by one thread, while no engine computes. Every engine's thread
brings its old weights to a barrier, the last one to arrive does the work for all, and each goes on
with its result.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jax_agent_rl.errors import BackendError, EngineDiedError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.sharding import engine_shardings, split_mesh
from jax_agent_rl.jetstream.weights import ServedWeights, WeightLoader, to_host
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.tensors import LayerOutput, TensorSample
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    RolloutBackend,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.rollout.routing import Balancer, PrefixIndex
from jax_agent_rl.types import PauseMode, TokenOutput, TokenScores

_SEED_STRIDE = 1 << 20
"""Between the seeds of engines; those of hosts lie between them."""
_ENDED = "another data-parallel engine of this process has ended"


class ReplicaGroup:
    """The meeting point of the module docstring.

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
            value: what it brings.
            work: maps the values of all engines to a result for each; the same for all.

        Raises:
            EngineDiedError: an engine has ended.
        """
        self._inputs[number] = value
        self._work = work
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise EngineDiedError(_ENDED) from None
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
        self, load: WeightLoader, params: Params, old: list[EngineParams | None]
    ) -> list[EngineParams]:
        """Load parameters into all engines.

        They take the memory of the old weights if all engines have some on devices.
        """
        old_params = None
        if all(x is not None and isinstance(x.embed, jax.Array) for x in old):
            old_params = jax.tree.map(self._join, *old)
        return self._split(load(params, old_params))

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

    def _split(self, params: EngineParams) -> list[EngineParams]:
        """Return each engine's shards of arrays on all devices."""

        def select(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            shards = [s.data for s in x.addressable_shards if s.device in sharding.device_set]
            return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

        replica_params = []
        for replica in self.replicas:
            shardings = engine_shardings(params, replica.mesh)
            replica_params.append(jax.tree.map(select, params, shardings))
        return replica_params


@dataclass(frozen=True, eq=False)
class Replica:
    """The place of one engine in its group."""

    group: ReplicaGroup
    number: int
    mesh: Mesh

    def load(
        self, load: WeightLoader, params: Params, old: EngineParams | None = None
    ) -> EngineParams:
        """Load parameters together with the other engines, see :class:`WeightLoader`."""
        # Engine 0's loader, whoever runs it: the programs are compiled once.
        loader = load if self.number == 0 else None

        def work(inputs: list[Any]) -> list[EngineParams]:
            first_loader = next(loader for loader, _ in inputs if loader is not None)
            return self.group.load(first_loader, params, [old for _, old in inputs])

        return self.group.meet(self.number, (loader, old), work)

    def offload(self, params: EngineParams) -> EngineParams:
        """Return a copy of the weights on the host, which all engines share."""

        def work(inputs: list[EngineParams]) -> list[EngineParams]:
            return [to_host(inputs[0])] * len(inputs)

        return self.group.meet(self.number, params, work)


class DataParallelBackend:
    """The backend of the module docstring.

    Args:
        shapes: static shapes of each engine.
        mesh: devices of all engines, see :func:`~jax_agent_rl.jetstream.sharding.make_engine_mesh`.
        seed: see :class:`JetStreamBackend`; each engine gets its own.
        print_line: called with the first engine's progress.
        **options: further arguments of each :class:`JetStreamBackend`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Params,
        shapes: EngineShapes,
        *,
        mesh: Mesh,
        seed: int = 0,
        print_line: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self._weights = ServedWeights(config, params, mesh)
        self._group = ReplicaGroup(mesh)
        self._engines: dict[str, JetStreamBackend] = {}
        for replica in self._group.replicas:
            engine_options = dict(options)
            if print_line is not None and replica.number == 0:
                engine_options["print_line"] = print_line
            self._engines[str(replica.number)] = JetStreamBackend(
                config,
                params,
                shapes,
                replica=replica,
                seed=seed + replica.number * _SEED_STRIDE,
                **engine_options,
            )
        self._balancer = Balancer(max_in_flight=shapes.max_concurrent_decodes)
        for name in self._engines:
            self._balancer.add(name)
        self._homes: dict[str, str] = {}  # of running requests

    @property
    def engines(self) -> tuple[JetStreamBackend, ...]:
        """The engines, in the order of their devices."""
        return tuple(self._engines.values())

    @property
    def capabilities(self) -> Capabilities:
        capabilities = [engine.capabilities for engine in self.engines]
        max_concurrent = sum(engine.max_concurrent for engine in capabilities)
        return replace(capabilities[0], max_concurrent=max_concurrent)

    @property
    def policy_version(self) -> int:
        return min(engine.policy_version for engine in self.engines)

    async def start(self) -> None:
        results = await asyncio.gather(
            *(engine.start() for engine in self.engines), return_exceptions=True
        )
        if any(results):
            await self.close()
            _raise_first(results)

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        with self._assigned(request) as engine:
            return await engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        with self._assigned(request) as engine:
            async with contextlib.aclosing(engine.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        engine = min(self._balancer.servers, key=self._balancer.in_flight)
        return await self._engines[engine].score(token_ids, start=start, top_k=top_k)

    async def abort(self, request_id: str) -> bool:
        home = self._homes.get(request_id)
        return home is not None and await self._engines[home].abort(request_id)

    @contextlib.contextmanager
    def _assigned(self, request: GenerateRequest) -> Iterator[JetStreamBackend]:
        """Yield the engine for a request.

        It is its session's, one with its prefix, or the least busy one.
        """
        if request.request_id in self._homes:
            raise BackendError(
                f"request {request.request_id!r} is already running; ids of running requests must"
                " be unique"
            )
        session = request.session_id
        balancer = self._balancer
        block_hashes: list[int] = []  # placeholder ids do not tell images apart
        if balancer.home(session) is None and not request.multi_modal:
            block_hashes = PrefixIndex.block_hashes(request.prompt_ids, request.lora)

        name = balancer.acquire(session, block_hashes)
        if name is None:  # all slots are taken: it waits in an engine, in order of priority
            name = balancer.home(session) or min(balancer.servers, key=balancer.in_flight)
            balancer.assign(name, session, block_hashes)
        self._homes[request.request_id] = name
        try:
            yield self._engines[name]
        finally:
            del self._homes[request.request_id]
            balancer.release(name)
            if request.session_ends and session is not None:
                balancer.end_session(session)

    # --- all engines ------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve new weights on all engines, or on none.

        See :meth:`JetStreamBackend.update_weights`.
        """
        update = await self._weights.receive(update)  # once, for all devices
        await self._on_all(lambda engine: engine.update_weights(update))
        self._balancer.forget_prefixes()

    async def pause(self, mode: PauseMode) -> None:
        await self._on_all(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._on_all(lambda engine: engine.resume())

    async def reset_prefix_cache(self) -> None:
        await self._on_all(lambda engine: engine.reset_prefix_cache())
        self._balancer.forget_prefixes()

    async def sleep(self) -> None:
        await self._on_all(lambda engine: engine.sleep())

    async def wake(self) -> None:
        await self._on_all(lambda engine: engine.wake())

    async def _on_all(self, call: Callable[[JetStreamBackend], Any]) -> None:
        """Call all engines at once, wait for all, then raise the first error."""
        results = await asyncio.gather(*map(call, self.engines), return_exceptions=True)
        _raise_first(results)

    # --- state ------------------------------------------------------------------------------------

    async def health(self) -> Health:
        healths = await asyncio.gather(*(engine.health() for engine in self.engines))
        first = next((health for health in healths if not health.ok), healths[0])
        shares = [health.kv_used_share for health in healths if health.kv_used_share is not None]
        return replace(
            first,
            running=sum(health.running for health in healths),
            waiting=sum(health.waiting for health in healths),
            kv_used_share=fmean(shares) if shares else None,
        )

    async def metrics(self) -> BackendMetrics:
        """Return the sums over all engines, but the longest time of weight updates.

        The engines load weights together.
        """
        metrics = await asyncio.gather(*(engine.metrics() for engine in self.engines))
        engines = [asdict(engine_metrics) for engine_metrics in metrics]
        totals = {}
        for name in engines[0]:
            totals[name] = sum(engine[name] for engine in engines)
        totals["weight_update_seconds"] = max(engine["weight_update_seconds"] for engine in engines)
        return BackendMetrics(**totals)

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Return samples of the first engine's weights."""
        return await self.engines[0].tensor_samples()

    async def replica_samples(self) -> Sequence[Mapping[str, TensorSample]]:
        """Return samples of the other engines' weights, which should be the same."""
        return await asyncio.gather(*(engine.tensor_samples() for engine in self.engines[1:]))

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """Return the first engine's outputs."""
        return await self.engines[0].layer_outputs(token_ids)


def _raise_first(results: Sequence[BaseException | None]) -> None:
    """Raise the first error.

    One that says that another engine has ended comes last, as the other's error is the cause.
    """
    errors = [result for result in results if result is not None]
    if not errors:
        return
    for error in errors:
        if _ENDED not in str(error):
            raise error
    raise errors[0]


def make_backend(
    config: DecoderConfig, params: Params, shapes: EngineShapes, *, mesh: Mesh, **options: Any
) -> RolloutBackend:
    """Return the backend of a mesh, with as many engines as it has along ``data``.

    Args:
        shapes: static shapes of each engine.
        mesh: devices of all engines.
        **options: further arguments of each :class:`JetStreamBackend`.
    """
    kind = DataParallelBackend if mesh.shape["data"] > 1 else JetStreamBackend
    return kind(config, params, shapes, mesh=mesh, **options)
