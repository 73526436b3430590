"""The JetStream-style engine as a :class:`~jax_agent_rl.rollout.protocol.RolloutBackend`.

::

    asyncio side                                  the engine's thread (jetstream.engine_core)
    generate()/stream() ──submit──►  commands ──► EngineCore.step() ──► Scheduler.step()
        ▲                                           │
        └────────── chunks, one loop call a step ◄──┘
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_agent_rl.chat.grammar import GrammarCompiler, GrammarError, GrammarState
from jax_agent_rl.chat.grammar_limits import in_grammar_thread
from jax_agent_rl.checks import check_ids, check_int
from jax_agent_rl.config.engines import EngineMeshConfig
from jax_agent_rl.errors import BackendClosedError, BackendError
from jax_agent_rl.jetstream import inspection
from jax_agent_rl.jetstream.engine import JaxEngine, ignore_line
from jax_agent_rl.jetstream.engine_core import ChunkSink, EngineCore, EngineThread
from jax_agent_rl.jetstream.forward import EngineParams
from jax_agent_rl.jetstream.images import ImageReader
from jax_agent_rl.jetstream.programs import ProgramTable
from jax_agent_rl.jetstream.replica import Replica
from jax_agent_rl.jetstream.scheduler import Scheduler
from jax_agent_rl.jetstream.shapes import EngineShapes
from jax_agent_rl.jetstream.sharding import make_engine_mesh
from jax_agent_rl.jetstream.weights import WEIGHT_PAYLOADS, ServedWeights, weight_dtype
from jax_agent_rl.models.config import DecoderConfig, Params
from jax_agent_rl.models.layers import EightBits
from jax_agent_rl.models.lora import PeftAdapter
from jax_agent_rl.models.tensors import LayerOutput, TensorSample
from jax_agent_rl.models.vision_context import VisionProcessor
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode, TokenOutput, TokenScores


class JetStreamBackend:
    """One engine of this process, on one device or a mesh of several.

    Args:
        params: the learner's parameter tree; copied on the device at ``start``.
        shapes: static shapes to compile for.
        dtype: of the engine's weights, activations and cache; None: as ``params``.
        kv_dtype: see :class:`~jax_agent_rl.jetstream.engine.JaxEngine`.
        quantize: see :class:`~jax_agent_rl.jetstream.engine.JaxEngine`.
        mesh: the engine's devices, see ``jetstream.sharding``; None is this process's first one.
        replica: see :class:`~jax_agent_rl.jetstream.engine.JaxEngine`; then ``mesh`` is the
            replica's.
        deterministic: program table of an engine that computes with one program, shared with the
            scorer; None is the fast engine.
        adapters: LoRA adapters that requests may name; not with a deterministic engine.
        vision_processor: processes images; ignored by deterministic engines.
        compile_ahead: see :class:`~jax_agent_rl.jetstream.engine.JaxEngine`.
        version: policy version of ``params``.
        seed: for requests without a seed of their own.
        decode_text: ids to text; without it requests with stop strings are refused.
        grammars: compiles the grammars of requests; without it such requests are refused. Ignored
            by deterministic engines.
        print_line: called with a line of progress while programs compile.
    """

    scheduler_type: ClassVar[type[Scheduler]] = Scheduler

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
        replica: Replica | None = None,
        deterministic: ProgramTable | None = None,
        adapters: Mapping[str, PeftAdapter] | None = None,
        vision_processor: VisionProcessor | None = None,
        compile_ahead: bool | None = None,
        version: int = 0,
        seed: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        grammars: GrammarCompiler | None = None,
        print_line: Callable[[str], None] = ignore_line,
    ) -> None:
        self._config = config
        self._shapes = shapes
        self._deterministic = deterministic
        self._adapters = adapters or {}
        self._compile_ahead = compile_ahead
        self._dtype = jnp.dtype(dtype or params["embed"].dtype)
        self._kv_dtype: EightBits | None = kv_dtype
        self._quantize: EightBits | None = quantize
        self._initial_params: dict | None = params
        self._initial_version = version
        self._seed = seed
        self._decode_text = decode_text
        self._print_line = print_line
        self._replica = replica
        if replica is not None:
            self._mesh = replica.mesh
        else:
            self._mesh = mesh or make_engine_mesh(EngineMeshConfig())
        self._weights = ServedWeights(config, params, self._mesh)

        if deterministic is not None:
            # The one program takes no images, and no masks of ids.
            vision_processor = None
            grammars = None
        self._grammars = grammars
        self._image_reader = ImageReader(
            vision_processor, max_patches=max(shapes.patch_buckets, default=0)
        )

        self._streams: dict[str, ChunkSink] = {}
        self._preparing: dict[str, asyncio.Event] = {}  # requests that are not queued yet
        self._thread = EngineThread(self._fail_streams)
        self.core = EngineCore(self._thread, self.make_scheduler, self._weights, version=version)

    @property
    def capabilities(self) -> Capabilities:
        dtype = self._dtype.name
        return Capabilities(
            max_model_len=self._shapes.max_model_len,
            max_concurrent=self._shapes.max_concurrent_decodes,
            any_sampling=True,
            sampling_replay=True,
            seeds=True,
            stop_strings=self._decode_text is not None,
            grammars=self._grammars is not None,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            prefix_reuse=True,
            priorities=True,
            sleep=True,
            lora=bool(self._adapters),
            scoring=not self._image_reader.kinds,
            routed_experts=self._config.experts is not None,
            precision=self._quantize or self._kv_dtype or dtype,
            weight_dtype=weight_dtype(dtype, self._quantize),
            weight_payloads=WEIGHT_PAYLOADS,
            multi_modal=self._image_reader.kinds,
        )

    @property
    def policy_version(self) -> int:
        return self.core.version

    # --- start and close --------------------------------------------------------------------------

    async def start(self) -> None:
        await self._thread.start(self.core)

    async def close(self) -> None:
        await self._thread.close()

    def make_scheduler(self) -> Scheduler:
        """Create the engine and its scheduler, in the engine's thread."""
        engine = self._make_engine()
        params = engine.load_params(self._take_initial_params())
        scheduler = self.scheduler_type(
            engine,
            params,
            version=self._initial_version,
            seed=self._seed,
            decode_text=self._decode_text,
        )
        scheduler.cache = engine.warm_up(scheduler.params, scheduler.cache, self._compiling)
        return scheduler

    def _take_initial_params(self) -> Params:
        """Return the weights to begin with, and release them here."""
        params = self._initial_params
        assert params is not None  # an engine is set up once
        self._initial_params = None
        return params

    def _make_engine(self) -> JaxEngine:
        program_table = None
        if self._deterministic is not None:
            program_table = self._deterministic.of(self._mesh)
        return JaxEngine(
            self._config,
            self._shapes,
            dtype=self._dtype,
            kv_dtype=self._kv_dtype,
            quantize=self._quantize,
            mesh=self._mesh,
            program_table=program_table,
            adapters=self._adapters,
            takes_images=bool(self._image_reader.kinds),
            deterministic=self._deterministic is not None,
            compile_ahead=self._compile_ahead,
            replica=self._replica,
        )

    def _compiling(self, line: str) -> None:
        if self._thread.closing:
            raise BackendClosedError("the backend was closed while its programs were compiled")
        self._print_line(line)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.request_id in self._streams:
            raise BackendError(
                f"request {request.request_id!r} is already running; ids of running requests must"
                " be unique"
            )

        sink = ChunkSink()
        self._streams[request.request_id] = sink
        finished = False

        try:
            await self._submit(request, sink)
            while not finished:
                event = await sink.get()
                if isinstance(event, Exception):
                    finished = True
                    raise event
                finished = event.final is not None
                yield event
        finally:
            self._streams.pop(request.request_id, None)
            # Nobody waits for the others of its ids.
            if not finished:
                self._post_quietly(lambda: self.core.abort(request.request_id))

    async def _submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        """Read a request's images and compile its grammar in other threads, then queue it."""
        submitted = asyncio.Event()
        self._preparing[request.request_id] = submitted
        try:
            multimodal = await self._image_reader.read(request)
            grammar = await self._start_grammar(request)
            self._thread.post(lambda: self.core.submit(request, multimodal, grammar, sink))
        finally:
            del self._preparing[request.request_id]
            submitted.set()

    async def _start_grammar(self, request: GenerateRequest) -> GrammarState | None:
        """Compile a request's grammar, if it has one.

        Raises:
            BackendError: there is no compiler, or the grammar is wrong.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self._grammars is None:
            raise BackendError(
                f"request {request.request_id!r} has a grammar, which this engine cannot follow"
            )
        try:
            # Of a resumed request, the prompt ends with ids that the grammar has allowed.
            sampled_ids = request.prompt_ids[len(request.prompt_ids) - request.resumed :]
            return await in_grammar_thread(
                functools.partial(self._grammars.start, grammar, sampled_ids)
            )
        except GrammarError as error:
            raise BackendError(f"request {request.request_id!r}: {error}") from None

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        if not self.capabilities.scoring:
            raise NotImplementedError(
                "an external engine, and one that reads images, scores no given ids"
            )
        check_ids("the context to score", tuple(token_ids))
        check_int("start", start, least=1, below=len(token_ids))
        check_int("top_k", top_k, least=0, below=self._config.vocab_size + 1)
        largest = max(token_ids)
        if largest >= self._config.vocab_size:
            raise BackendError(f"id {largest} is not one of the model's {self._config.vocab_size}")

        run = functools.partial(inspection.score, token_ids=token_ids, start=start, top_k=top_k)
        return await self._thread.call(lambda: self.core.score(run))

    async def abort(self, request_id: str) -> bool:
        submitted = self._preparing.get(request_id)
        if submitted is not None:
            await submitted.wait()
        return await self._thread.call(lambda: self.core.abort(request_id))

    def _post_quietly(self, command: Callable[[], object]) -> None:
        """Post a command unless the thread has ended: the caller went away."""
        with contextlib.suppress(BackendError):
            self._thread.post(command)

    def _fail_streams(self, error: BackendError) -> None:
        if self._replica is not None:
            self._replica.group.end()  # the others would wait for this one
        for sink in self._streams.values():
            sink.put_nowait(error)

    # --- pausing and weights ----------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        if mode is not PauseMode.WAIT:
            await self._thread.call(lambda: self.core.pause(mode))
            return
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._thread.post(lambda: self.core.drain(drained), drained)
        try:
            await drained
        except asyncio.CancelledError:
            self._post_quietly(lambda: self.core.cancel_drain(drained))
            raise

    async def resume(self) -> None:
        await self._thread.call(self.core.resume)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Serve new weights.

        Raises:
            WeightUpdateError: the update was refused. If it failed after the old weights were
                freed, requests fail with ``EngineDiedError`` and :meth:`health` is not ok until an
                update succeeds.
        """
        update = await self._weights.receive(update)
        await self._thread.call(lambda: self.core.update_weights(update))

    def give_up_weights(self, version: int) -> EngineParams | None:
        """Stop serving, and return the weights, in whose memory those of ``version`` are made.

        For a caller in another thread, which has paused the engine and brings the new weights by
        :meth:`update_weights`. A resume without them fails all requests. Without a pause, requests
        are aborted.

        Returns:
            None if there are no weights on devices.
        """
        return self._thread.call_and_wait(lambda: self.core.give_up_weights(version))

    async def reset_prefix_cache(self) -> None:
        await self._thread.call(lambda: self.core.scheduler.block_manager.reset())

    async def sleep(self) -> None:
        """Move weights to the host and drop the KV cache.

        Running requests are aborted, new ones wait.
        """
        await self._thread.call(self.core.sleep)

    async def wake(self) -> None:
        await self._thread.call(self.core.wake)

    # --- state ------------------------------------------------------------------------------------

    async def health(self) -> Health:
        try:
            return await self._thread.call(self.core.health)
        except BackendError as error:
            return Health(ok=False, detail=str(error), policy_version=self.policy_version)

    async def metrics(self) -> BackendMetrics:
        return await self._thread.call(lambda: self.core.scheduler.metrics())

    # --- diagnosis --------------------------------------------------------------------------------

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        return await self._thread.call(
            lambda: inspection.tensor_samples(self._config, self.core.scheduler)
        )

    async def replica_samples(self) -> Sequence[Mapping[str, TensorSample]]:
        return ()

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        return await self._thread.call(
            lambda: inspection.layer_outputs(self.core.scheduler, token_ids)
        )
