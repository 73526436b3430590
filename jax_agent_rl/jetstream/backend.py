"""The JetStream-style engine as a :class:`~jax_agent_rl.rollout.protocol.RolloutBackend`.

::

    asyncio side                                engine thread (one)
    generate()/stream() ──submit──►  commands ──► Scheduler.step(): admit, decode
        ▲                                           │
        └────────── events, one loop call a step ◄──┘

    commands: a queue of functions; the thread runs them between dispatches, so pausing, aborting and taking weights
    never meet a half-done step. The thread sleeps on a condition while it has neither commands nor work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jax_agent_rl.config_mesh import EngineMeshConfig
from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError, TrajectoryError
from jax_agent_rl.jetstream.brought import MakeEngine, SlotEngine
from jax_agent_rl.jetstream.deterministic import DeterministicEngine
from jax_agent_rl.jetstream.engine import EngineShapes, JaxEngine, unheard
from jax_agent_rl.jetstream.layout import make_engine_mesh
from jax_agent_rl.jetstream.pictures import PictureReader
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.jetstream.seeing import SeeingEngine
from jax_agent_rl.jetstream.slots import SlotScheduler
from jax_agent_rl.jetstream.weights import FILES, WEIGHT_PAYLOADS, ServedWeights
from jax_agent_rl.models.config import DecoderConfig
from jax_agent_rl.models.quantized import EightBits
from jax_agent_rl.models.shown import Shown, Sight
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode, TokenOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")
BURST_GAP_SECONDS = 0.001  # an idle engine takes up work when no request has come for this long,
BURST_SECONDS = 0.02  # or this long after the first


class JetStreamBackend:
    """One engine of this process, on one device or a mesh of several.

    Args:
        config: the model.
        params: the learner's parameter tree; copied on the device at ``start``.
        shapes: static shapes to compile for.
        dtype: of the engine's weights, activations and cache; None is that of ``params``.
        kv_dtype, quantize: see :class:`~jax_agent_rl.jetstream.engine.JaxEngine`.
        mesh: the engine's devices, see ``jetstream.layout``; None is this process's first one.
        deterministic: where the one program of a :class:`DeterministicEngine` is kept, to score by it; None is the
            fast engine.
        brought: makes an engine of JetStream's later API, which samples in place of the built-in one.
        sight: how the model sees; None takes no pictures, and neither does a deterministic engine or a brought one.
        version: policy version of ``params``.
        seed: draws the seeds of requests that bring none.
        decode_text: ids to text; without it requests with stop strings are refused.
        say: takes a line of progress while programs compile.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: dict,
        shapes: EngineShapes,
        *,
        dtype: str | None = None,
        kv_dtype: EightBits | None = None,
        quantize: EightBits | None = None,
        mesh: jax.sharding.Mesh | None = None,
        deterministic: ProgramTable | None = None,
        brought: MakeEngine | None = None,
        sight: Sight | None = None,
        version: int = 0,
        seed: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        say: Callable[[str], None] = unheard,
    ) -> None:
        self._config = config
        self._shapes = shapes
        self._deterministic = deterministic
        self._brought = brought
        self._dtype = jnp.dtype(dtype or params["embed"].dtype)
        self._eight_bits = {"kv_dtype": kv_dtype, "quantize": quantize}
        self._initial_params: dict | None = params
        self._version = version
        self._seed = seed
        self._decode_text = decode_text
        self._say = say
        self._mesh = mesh or make_engine_mesh(EngineMeshConfig())
        self._weights = ServedWeights(config, params, self._mesh)
        if deterministic is not None or brought is not None:  # one program for all ids looks at no picture
            sight = None
        self._pictures = PictureReader(sight, most_patches=max(shapes.patch_buckets, default=0))
        self._streams: dict[str, asyncio.Queue[TokenChunk | Exception]] = {}
        self._commands: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._paused = self._asleep = False
        self._draining: asyncio.Future[None] | None = None
        self._failure: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_model_len=self._shapes.max_model_len,
            max_concurrent=self._shapes.max_concurrent_decodes,
            any_sampling=self._brought is None,
            seeds=self._brought is None,
            stop_strings=self._decode_text is not None,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            prefix_reuse=self._brought is None,
            priorities=True,
            sleep=True,
            weight_payloads=WEIGHT_PAYLOADS,
            multi_modal=self._pictures.kinds,
        )

    @property
    def policy_version(self) -> int:
        return self._version

    # --- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._thread is not None:
            raise BackendError("the backend was already started")
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="jetstream-engine", daemon=True)
        self._thread.start()
        await ready

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None and self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # --- requests ---------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        events: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        if request.request_id in self._streams:
            raise BackendError(f"request {request.request_id!r} is already running; ids must be unique while they live")
        self._streams[request.request_id] = events
        finished = False
        try:
            shown = await self._pictures.read(request)
            self._post(lambda: self._submit(request, shown))
            while not finished:
                event = await events.get()
                if isinstance(event, Exception):
                    finished = True
                    raise event
                finished = event.final is not None
                yield event
        finally:
            self._streams.pop(request.request_id, None)
            if not finished and not self._closing:
                self._post(lambda: self._abort(request.request_id))

    async def abort(self, request_id: str) -> bool:
        await self._pictures.settled(request_id)
        return await self._call(lambda: self._abort(request_id))

    # --- pausing and weights ----------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        if mode is not PauseMode.WAIT:
            await self._call(lambda: self._pause(mode))
            return
        drained: asyncio.Future[None] = self._loop.create_future()
        self._post(lambda: setattr(self, "_draining", drained))
        await drained

    async def resume(self) -> None:
        await self._call(lambda: setattr(self, "_paused", False))

    async def update_weights(self, update: WeightUpdate) -> None:
        if update.kind in FILES:  # decoding goes on while files are read
            update = await asyncio.to_thread(self._weights.read, update)
        await self._call(lambda: self._take_weights(update))

    async def reset_prefix_cache(self) -> None:
        await self._call(lambda: self._scheduler.table.reset())

    async def sleep(self) -> None:
        """Moves weights to host memory and drops the KV cache; running requests are aborted, new ones wait."""
        await self._call(self._fall_asleep)

    async def wake(self) -> None:
        await self._call(self._wake_up)

    # --- state ------------------------------------------------------------------------------------------------

    async def health(self) -> Health:
        if self._failure or self._thread is None or self._closing:
            detail = self._failure or ("closed" if self._closing else "not started: call start()")
            return Health(ok=False, detail=detail, policy_version=self._version)
        return await self._call(lambda: self._scheduler.health(self._version))

    async def metrics(self) -> BackendMetrics:
        return await self._call(lambda: self._scheduler.metrics())

    # --- crossing to the thread -------------------------------------------------------------------------------

    def _post(self, command: Callable[[], object]) -> None:
        """Queues a command for the thread."""
        if self._failure:
            raise EngineDiedError(self._failure)
        if self._closing or self._thread is None:
            raise BackendClosedError("the backend is closed" if self._closing else "the backend was not started")
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread, between dispatches, and returns its result."""
        future: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:  # handed to the caller, whose mistake or engine it is
                self._tell(_settle, future, error, None)
            else:
                self._tell(_settle, future, None, result)

        self._post(command)
        return await future

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """Calls into the asyncio loop; a loop that is gone has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("the asyncio loop closed before the engine thread")

    def _deliver(self, events: list[tuple[str, TokenChunk | Exception]]) -> None:
        for request_id, event in events:
            if queue := self._streams.get(request_id):
                queue.put_nowait(event)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self, ready: asyncio.Future[None]) -> None:
        try:
            self._set_up()
        except Exception as error:
            self._failure = f"the engine could not start: {error}"
            self._tell(_settle, ready, error, None)
            return
        self._tell(_settle, ready, None, None)
        try:
            while self._serve_once():
                pass
            self._fail_all(BackendClosedError("the backend was closed while this request was running"))
        except Exception as error:  # the engine is lost, its callers must not hang
            logger.exception("the engine thread died")
            self._failure = f"the engine died: {type(error).__name__}: {error}"
            self._fail_all(EngineDiedError(self._failure))

    def _set_up(self) -> None:
        engine = self._make_engine()
        assert self._initial_params is not None  # an engine is set up once
        params, self._initial_params = engine.load_params(self._initial_params), None
        kind = Scheduler if self._brought is None else SlotScheduler
        self._scheduler = kind(engine, params, version=self._version, seed=self._seed, decode_text=self._decode_text)
        self._scheduler.cache = engine.warm_up(self._scheduler.params, self._scheduler.cache, self._compiling)

    def _make_engine(self) -> JaxEngine | SlotEngine:
        if self._brought is not None:
            return SlotEngine(self._brought(self._config, self._shapes), self._config, self._shapes)
        plain = SeeingEngine if self._pictures.kinds else JaxEngine
        kind: type[JaxEngine] = plain if self._deterministic is None else DeterministicEngine
        options = {"dtype": self._dtype, "mesh": self._mesh, "table": self._deterministic, **self._eight_bits}
        return kind(self._config, self._shapes, **options)

    def _compiling(self, line: str) -> None:
        if self._closing:
            raise BackendClosedError("the backend was closed while its programs were compiled")
        self._say(line)

    def _serve_once(self) -> bool:
        """Commands, then one step; False when it is time to end."""
        with self._wake:
            if not (self._closing or self._commands or self._has_work()):
                self._wait_for_commands()
            if self._closing:
                return False
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        if self._has_work():
            self._publish(self._scheduler.step(admit=self._draining is None))
        if self._draining is not None and not self._scheduler.running:
            self._paused = True
            self._tell(_settle, self._draining, None, None)
            self._draining = None
        return True

    def _wait_for_commands(self) -> None:
        """Sleeps until there is something to do, then a moment more: requests come in bursts, and the first of one
        would otherwise decode alone while the others wait for its dispatch to end."""
        while not (self._closing or self._commands):
            self._wake.wait()
        deadline = time.perf_counter() + BURST_SECONDS
        while not self._closing and self._wake.wait(BURST_GAP_SECONDS) and time.perf_counter() < deadline:
            pass

    def _has_work(self) -> bool:
        scheduler = self._scheduler
        if self._paused or self._asleep:
            return False
        return bool(scheduler.running) or (scheduler.waiting > 0 and self._draining is None)

    def _publish(self, progress: list[tuple[RunningRequest, TokenChunk]]) -> None:
        if progress:
            self._tell(self._deliver, [(run.request.request_id, chunk) for run, chunk in progress])

    def _submit(self, request: GenerateRequest, shown: Shown | None) -> None:
        try:
            self._scheduler.submit(request, shown)
        except TrajectoryError as error:  # this request's own fault
            self._tell(self._deliver, [(request.request_id, error)])
        except Exception as error:  # whatever is wrong with one request must not end the others
            logger.exception("request %r could not be queued", request.request_id)
            refusal = BackendError(f"request {request.request_id!r} cannot be taken: {type(error).__name__}: {error}")
            self._tell(self._deliver, [(request.request_id, refusal)])

    def _abort(self, request_id: str) -> bool:
        ended = self._scheduler.abort(request_id)
        if ended is not None:
            self._publish([ended])
        return ended is not None

    def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode is PauseMode.ABORT:
            for request_id in list(self._scheduler.running):
                self._abort(request_id)

    def _fall_asleep(self) -> None:
        for request_id in list(self._scheduler.running):
            self._abort(request_id)
        if not self._asleep:
            self._scheduler.sleep()
        self._asleep = True

    def _wake_up(self) -> None:
        if self._asleep:
            self._scheduler.wake()
        self._asleep = False

    def _take_weights(self, update: WeightUpdate) -> None:
        self._weights.check(update, self._version)
        begin = time.perf_counter()
        scheduler = self._scheduler
        params = jax.block_until_ready(scheduler.engine.load_params(update.payload, scheduler.params))
        scheduler.set_weights(params, update.version)
        self._version = update.version
        self._scheduler.counters.weight_update_seconds += time.perf_counter() - begin

    def _fail_all(self, error: Exception) -> None:
        self._tell(lambda: self._deliver([(request_id, error) for request_id in list(self._streams)]))


def _settle(future: asyncio.Future, error: Exception | None, result: Any) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
