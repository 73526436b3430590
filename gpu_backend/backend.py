"""vLLM's ``AsyncLLM`` as a :class:`~jax_agent_rl.rollout.protocol.RolloutBackend`.

::

    this process, asyncio                                       child process(es)
    generate()/stream() ── add_request ──►  AsyncLLM  ──zmq──►  engine core: scheduler
        ▲                                      │                    └──► worker(s): model
        │                                      │
        └── LiveRequest.take ◄── collector ◄───┘   one per request; outputs carry the version
                 │                                 of their weights
               delivery: suspended while new weights are loaded and verified by a probe, and, in a
               pause, until resume. Tokens sampled during the probe wait for it; if it fails, their
               requests fail as well.

Nothing here depends on the device: :class:`Capabilities` declares what a platform cannot do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from gpu_backend.launch import (
    StartedEngine,
    root_cause,
    served_precision,
    start_engine,
    weight_dtype,
)
from gpu_backend.requests import (
    LiveRequest,
    RequestAdmission,
    Span,
    Usage,
    check_conditioned,
    vllm_sampling,
)
from gpu_backend.settings import VllmSettings, check_installation
from gpu_backend.tpu_weights import ask_workers
from gpu_backend.weight_mapping import Checkpoint
from gpu_backend.weight_updates import WeightUpdater
from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError, WeightUpdateError
from jax_agent_rl.models.tensors import LayerOutput, TensorSample
from jax_agent_rl.rollout.protocol import (
    BROADCAST,
    FILES,
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode, TokenOutput, TokenScores
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.utils.services import ENGINE_START_SECONDS, start_service

logger = logging.getLogger(__name__)


class VllmBackend:
    """One vLLM engine.

    Args:
        version: policy version of the weights in ``settings.model``.
        decode_text: ids to text; without it requests with stop strings are refused.
        tokenizer_eos_ids: ids that end a generation if the model's files name none.
        start: starts the engine; tests pass a fake.

    Attributes:
        engine: vLLM's ``AsyncLLM``; None before the start and after the end.
        updater: replaces its weights; :meth:`start` makes it.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        version: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        tokenizer_eos_ids: frozenset[int] = frozenset(),
        start: Callable[[VllmSettings], StartedEngine] = start_engine,
    ) -> None:
        self._settings = settings
        self._version = version
        self._decode_text = decode_text
        self._tokenizer_eos_ids = tokenizer_eos_ids
        self._start = start
        self._started: StartedEngine | None = None
        self.engine: Any = None
        self._live: dict[str, LiveRequest] = {}  # running requests by id
        self._usage = Usage()
        self._change = asyncio.Lock()  # one pause, update or sleep at a time
        self._delivery = asyncio.Event()
        self._delivery.set()
        self._paused = False
        self._closed = False
        self._ended = threading.Event()  # the engine's processes
        self._failure: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        platform = "other"
        payloads = frozenset({FILES})
        if self._started is not None:
            platform = self._started.platform
            # A broadcast needs a sender: `runtime.placement` adds the kind where there is one.
            payloads = self.updater.kinds - {BROADCAST}
        return Capabilities(
            max_model_len=self._settings.max_model_len,
            max_concurrent=self._settings.max_num_seqs,
            seeds=platform != "tpu",
            stop_strings=self._decode_text is not None,
            grammars=platform != "tpu" and self._settings.has_tokenizer,
            pause_modes=frozenset(PauseMode),
            in_flight_update=True,
            prefix_reuse=True,
            partial_update=platform != "tpu",
            priorities=True,
            multi_modal=frozenset(self._settings.multi_modal),
            lora=bool(self._settings.adapters),
            routed_experts=bool(self._settings.engine_args.get("enable_return_routed_experts")),
            sleep=self._settings.sleep and platform == "cuda",
            precision=served_precision(self._settings, self._started),
            weight_dtype=weight_dtype(self._settings, self._started),
            weight_payloads=payloads,
        )

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def delivers_outputs(self) -> bool:
        """Whether outputs reach their callers: not while new weights are loaded and verified."""
        return self._delivery.is_set()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM.

        Raises:
            ConfigError: vLLM is missing, or the settings do not fit it, the model, or the memory.
            BackendError: it could not start for another reason.
        """
        if self._started is not None:
            raise BackendError("the backend was already started")

        check_installation()
        checkpoint = Checkpoint.read(model_folder(self._settings.model, weights=True))
        checkpoint.check_media(self._settings.multi_modal)
        started = await start_service(
            functools.partial(self._start, self._settings),
            name="vLLM's engine process",
            fix=(
                "see its log above; the model's files may be on a disk that hangs, or another"
                " process hold the GPU"
            ),
            seconds=ENGINE_START_SECONDS,
            undo=lambda late: late.engine.shutdown(),
            ended=self._ended,
            error=BackendError,
        )

        self.engine = started.engine
        is_tpu = started.platform == "tpu"
        why_fixed = None
        if is_tpu:
            why_fixed = await ask_workers(started.engine)
        self.updater = WeightUpdater(
            started.engine, checkpoint, self._settings, started.platform, why_fixed=why_fixed
        )
        self._admission = RequestAdmission(
            self._settings,
            vocabulary=started.engine.model_config.get_vocab_size(),
            eos_ids=checkpoint.eos_token_ids or self._tokenizer_eos_ids,
            decode_text=self._decode_text,
            placeholders=checkpoint.placeholders,
            grammars=not is_tpu and self._settings.has_tokenizer,
        )
        await self.engine.update_weight_version(str(self._version))
        self._started = started

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._delivery.set()
        if self._started is None:
            return

        # vLLM would leave the callers of running requests waiting.
        await asyncio.gather(*(live.submitted.wait() for live in self._live.values()))
        for live in self._live.values():
            if live.collector is not None:
                live.collector.put(BackendClosedError("the backend was closed"))
        await asyncio.to_thread(self.engine.shutdown)
        self._ended.set()

        # vLLM's destructor must not run as late as interpreter exit, and the engine is part of
        # reference cycles.
        self.engine = None
        self.updater.engine = None
        self._started.engine = None
        gc.collect()

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check_serving()
        live = LiveRequest(self._admission.admit(request, self._live))

        self._live[request.request_id] = live
        self._usage.begin(live.run)
        try:
            await self._submit(live)
            while not live.finished:
                try:
                    output = await live.collector.get()
                except Exception as error:
                    raise self._translate(error, request) from error

                await self._delivery.wait()
                self._check_serving()
                check_conditioned(request, output.prompt_token_ids, self._admission.placeholders)
                chunk = live.take(output, self._spans(live, output))
                if chunk is not None:
                    yield chunk
        finally:
            await self._release(live)

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        raise NotImplementedError(
            "vLLM scores given ids in a server of its own (vllm serve): see distill.teachers"
        )

    async def abort(self, request_id: str) -> bool:
        live = self._live.get(request_id)
        if live is None or live.finished:
            return False
        await live.submitted.wait()
        if live.collector is None or self._closed:
            return False
        await self.engine.abort(live.collector.request_id, internal=True)
        return True

    async def _submit(self, live: LiveRequest) -> None:
        """Hand a request to vLLM."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
            RequestOutputKind,
            StructuredOutputsParams,
        )

        request = live.run.request
        assert self._started is not None
        sampling = vllm_sampling(live.run, tpu=self._started.platform == "tpu")
        grammar = request.sampling.grammar
        if grammar is not None:
            sampling["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
        params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
        try:
            await self._admission.check_grammar(request)
            # On a thread: images take time to convert.
            prompt = await asyncio.to_thread(self._admission.prompt, request)
            live.collector = await self.engine.add_request(
                request.request_id,
                prompt,
                params,
                lora_request=self._admission.adapter(request),
                priority=request.priority,
            )
            live.state = self.engine.output_processor.request_states.get(live.collector.request_id)
        except Exception as error:
            raise self._translate(error, request) from error
        finally:
            live.submitted.set()

    def _spans(self, live: LiveRequest, output: Any) -> list[Span]:
        """Return which version sampled which token.

        vLLM reports it with the last output, and keeps it until then. The version at the time an
        output is *read* would be wrong: unread outputs queue up.
        """
        reported = output.outputs[0].weight_versions
        if reported is not None:
            return [(int(span.version), span.start) for span in reported]
        return [(int(version), start) for version, start in live.state.weight_version_starts]

    async def _release(self, live: LiveRequest) -> None:
        """Free what the request holds, whatever ended it."""
        self._live.pop(live.run.request.request_id, None)
        self._usage.end(live.run)
        if live.collector is None:
            return
        live.collector.close()
        if self._closed:
            return
        if not live.left_engine and not self.engine.errored:
            # The caller left, or a stop string ended it, which vLLM does not know.
            await self.engine.abort(live.collector.request_id, internal=True)

    def _translate(self, error: Exception, request: GenerateRequest) -> BackendError:
        """Return the error that a request ends with where vLLM raised this one."""
        from vllm.v1.engine.exceptions import (  # pyright: ignore[reportMissingImports]
            EngineDeadError,
        )

        if isinstance(error, BackendError):
            return error
        if self._closed:
            return BackendClosedError("the backend was closed")
        if isinstance(error, EngineDeadError) or self.engine.errored:
            return EngineDiedError(f"request {request.request_id!r}: {self._death()}")
        return BackendError(f"request {request.request_id!r}: vLLM refused or lost it: {error}")

    def _death(self) -> str:
        """Describe why the engine died."""
        assert self._started is not None
        log = self._started.log
        cause = root_cause(log)
        if cause is None:
            cause = "its process ended without a message (killed? out of memory?)"
        return f"the vLLM engine died: {cause}; start a new one (its log: {log.file})"

    def _check_running(self) -> None:
        """Raise unless the engine runs; it may hold wrong weights, and take new ones."""
        if self._closed:
            raise BackendClosedError("the backend is closed")
        if self._started is None:
            raise BackendClosedError("the backend was not started")
        if self.engine.errored:
            raise EngineDiedError(self._death())

    def _check_serving(self) -> None:
        self._check_running()
        if self._failure is not None:
            raise EngineDiedError(self._failure)

    # --- pausing and weights ----------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        async with self._change:
            self._check_running()
            await self._stop(str(mode))
            self._paused = True

    async def resume(self) -> None:
        async with self._change:
            self._check_running()
            # Wait for requests being submitted: else the first to arrive would run first, whatever
            # its priority.
            await asyncio.gather(*(live.submitted.wait() for live in self._live.values()))
            self._paused = False
            await self._resume_unless_paused()

    async def _stop(self, mode: str) -> None:
        """Pause vLLM.

        If that fails or is cancelled, vLLM may have paused nevertheless: resume it.
        """
        try:
            await self.engine.pause_generation(mode=mode, clear_cache=False)
        except BaseException:
            if not self.engine.errored:
                await self._resume_unless_paused()
            raise

    async def _resume_unless_paused(self) -> None:
        # Wrong weights stay paused until a whole update succeeds.
        if self._paused or self._failure is not None:
            return
        # Before the call: if it is cancelled, vLLM has resumed nevertheless.
        self._delivery.set()
        await self.engine.resume_generation()

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take new weights, as the protocol says, with one addition.

        Raises:
            WeightUpdateError: refused. Before loading, the old weights are still served; after it,
                nothing is served (:meth:`health` says so, requests fail with ``EngineDiedError``)
                until a whole update succeeds.
        """
        async with self._change:
            self._check_running()
            if self._failure is not None and update.partial:
                raise WeightUpdateError(
                    f"a partial update cannot repair this engine: {self._failure}"
                )
            await asyncio.to_thread(self.updater.check, update, served=self._version)

            start_time = time.perf_counter()
            if not self._paused:
                await self._stop("keep")
            self._delivery.clear()
            try:
                await self._load_and_verify(update)
            except BaseException as error:
                await self._refuse_to_serve(update, error)
                if isinstance(error, WeightUpdateError) or not isinstance(error, Exception):
                    raise
                raise WeightUpdateError(
                    f"weights of version {update.version} could not be loaded: {error}"
                ) from error

            self._version = update.version
            self._failure = None
            await self._resume_unless_paused()
            self._usage.weight_update_seconds += time.perf_counter() - start_time

    async def _load_and_verify(self, update: WeightUpdate) -> None:
        """Load weights into the paused engine, and compare its log-probs with the learner's."""
        await self.updater.load(update)
        if update.probe is None:
            return
        # The probe is a request: the engine must run for it, while delivery is suspended.
        await self.engine.resume_generation()
        try:
            await self.updater.verify(update.probe, f"probe-{update.version}")
        finally:
            await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def _refuse_to_serve(self, update: WeightUpdate, error: BaseException) -> None:
        """End all requests, and serve nothing until a whole update succeeds."""
        self._failure = (
            f"weights of version {update.version} were loaded wrongly: {error!r}; send a whole"
            " update"
        )
        logger.error("the vLLM engine stops serving: %s", self._failure)
        self._delivery.set()
        if self.engine.errored:
            return
        collectors = [live.collector for live in self._live.values() if live.collector is not None]
        for collector in collectors:
            await self.engine.abort(collector.request_id, internal=True)

    async def reset_prefix_cache(self) -> None:
        self._check_running()
        await self.engine.reset_prefix_cache(reset_running_requests=False)

    async def sleep(self) -> None:
        async with self._change:
            self._check_can_sleep()
            await self.engine.sleep(level=1, mode="abort")

    async def wake(self) -> None:
        async with self._change:
            self._check_can_sleep()
            await self.engine.wake_up()

    def _check_can_sleep(self) -> None:
        self._check_running()
        if not self.capabilities.sleep:
            raise NotImplementedError("sleep needs CUDA and rollout.sleep_during_update=true")

    # --- state ------------------------------------------------------------------------------------

    async def health(self) -> Health:
        try:
            self._check_serving()
        except BackendError as error:
            return Health(ok=False, detail=str(error), policy_version=self._version)
        num_sampling = sum(1 for live in self._live.values() if live.run.token_ids)
        return Health(
            ok=True,
            policy_version=self._version,
            running=num_sampling,
            waiting=len(self._live) - num_sampling,
        )

    async def metrics(self) -> BackendMetrics:
        return self._usage.metrics()

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Return a sample of every served tensor; empty where complete tensors cannot be read."""
        return await self.updater.tensor_samples()

    async def replica_samples(self) -> Sequence[Mapping[str, TensorSample]]:
        """Return nothing: vLLM's own replicas cannot be read back one by one."""
        return ()

    async def layer_outputs(self, token_ids: Sequence[int]) -> Sequence[LayerOutput]:
        """Return nothing: the layers of a compiled graph cannot be observed."""
        return ()
