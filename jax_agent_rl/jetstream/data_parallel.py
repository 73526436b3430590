"""Several engines of one process, each on devices of its own, as one backend.

::

    request ──► Balancer ──┬──► JetStreamBackend 0: thread, scheduler, KV cache     devices 0 … t-1
    session, prefix, load  ├──► JetStreamBackend 1                                  devices t … 2t-1
                           └──► …
    weights ──programs on all devices──► each engine takes its shards, without a copy

Engines sample independently. They meet only to load or release weights (``jetstream.replica``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from jax.sharding import Mesh

from jax_agent_rl.errors import BackendError
from jax_agent_rl.jetstream.backend import JetStreamBackend
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.replica import REPLICA_ENDED, ReplicaGroup
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.weights import ServedWeights
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
"""Between the seeds of engines; the seeds of hosts lie between them."""


class DataParallelBackend:
    """The backend of the module docstring.

    Args:
        shapes: static shapes of each engine.
        mesh: devices of all engines, see :func:`~jax_agent_rl.jetstream.sharding.make_engine_mesh`.
        seed: see :class:`JetStreamBackend`; each engine gets its own.
        print_line: called with the first engine's progress.
        make_engine_backend: makes the backend of one engine, a :class:`JetStreamBackend`.
        **options: its further arguments.
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
        make_engine_backend: Callable[..., JetStreamBackend] = JetStreamBackend,
        **options: Any,
    ) -> None:
        self._weights = ServedWeights(config, params, mesh)
        self._group = ReplicaGroup(mesh)
        self._engines: dict[str, JetStreamBackend] = {}
        for replica in self._group.replicas:
            engine_options = dict(options)
            if print_line is not None and replica.number == 0:
                engine_options["print_line"] = print_line
            self._engines[str(replica.number)] = make_engine_backend(
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

    def give_up_weights(self, version: int) -> EngineParams | None:
        """See :meth:`JetStreamBackend.give_up_weights`; arrays on the devices of all engines."""
        return self._group.join([engine.give_up_weights(version) for engine in self.engines])

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
        if REPLICA_ENDED not in str(error):
            raise error
    raise errors[0]


def make_backend(
    config: DecoderConfig,
    params: Params,
    shapes: EngineShapes,
    *,
    mesh: Mesh,
    make_engine_backend: Callable[..., JetStreamBackend] = JetStreamBackend,
    **options: Any,
) -> RolloutBackend:
    """Return the backend of a mesh, with as many engines as it has along ``data``.

    Args:
        shapes: static shapes of each engine.
        mesh: devices of all engines.
        **options: its further arguments.
    """
    if mesh.shape["data"] == 1:
        return make_engine_backend(config, params, shapes, mesh=mesh, **options)
    return DataParallelBackend(
        config, params, shapes, mesh=mesh, make_engine_backend=make_engine_backend, **options
    )
