"""SGLang behind its own server, as a :class:`~jax_agent_rl.rollout.protocol.RolloutBackend`.

::

    this process, asyncio                                             SGLang's server
    generate()/stream() ──► gate ──► _read(), a task per request ──POST /generate──►  scheduler
        ▲                   closed in a pause      │  server-sent events                 │
        │                                          ▼                                     ▼
        └── delivery ◄── queue of outputs ◄── SentRequest.take                         model
              suspended while new weights are loaded and verified by a probe

The server reports with the last chunk of a request which weights sampled which id. While a request
has met only one version of them, its chunks are delivered as they come; once weights have changed
under it, the rest comes in one chunk at its end, when it is known.

Weights change in a pause that puts running requests back into the server's queue: their KV is
computed again under the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import numpy as np

from gpu_backend.requests import Usage, check_request, expand_versions
from gpu_backend.sglang import wire
from gpu_backend.sglang.gate import PriorityGate
from gpu_backend.sglang.process import ServerProcess
from gpu_backend.sglang.settings import CONTEXT_MARGIN, OLDEST, SglangSettings
from gpu_backend.weight_mapping import Checkpoint
from gpu_backend.weight_updates import check_update, require_agreement
from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    ConfigError,
    EngineDiedError,
    WeightUpdateError,
)
from jax_agent_rl.jetstream.request import RunningRequest
from jax_agent_rl.rollout.http.connection import ServerConnection
from jax_agent_rl.rollout.protocol import (
    FILES,
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode, StopReason, TokenOutput, TokenScores
from jax_agent_rl.types.supports import mask_words
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.hub import model_folder
from jax_agent_rl.utils.network import is_loopback, read_beginning
from jax_agent_rl.utils.weight_transfer import LogprobProbe

logger = logging.getLogger(__name__)
_FIRST_IN_QUEUE = -(1 << 30)
_DEATH_SECONDS = 2.0
"""Time for a server's process to end after its connections broke."""
SILENCE_SECONDS = 600.0
"""A server that sends nothing for so long is lost: it sends no heartbeats while requests wait, and
nothing while it loads weights."""


class SentRequest:
    """A request and its state.

    Attributes:
        run: ids so far, and the stop conditions.
        rid: its name on the server. The server aborts all requests whose names begin with the one
            that it is given, so all names have one length.
        is_open: it has passed the gate, and the server knows it or soon will.
        has_ended: nothing more comes from the server.
        is_aborted: its abort was asked for.
        is_mixed: weights changed under it.
        news: chunks, or the error it ends with.
    """

    def __init__(self, run: RunningRequest) -> None:
        self.run = run
        self.rid = uuid4().hex
        self.is_open = False
        self.has_ended = asyncio.Event()
        self.is_aborted = asyncio.Event()
        self.is_mixed = False
        self.news: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self._num_received = 0  # ids that came from the server
        self._held: list[_Held] = []

    @property
    def num_sampled(self) -> int:
        """Number of ids that the server has sent."""
        return self._num_received

    def take(self, sampled: wire.ChunkInfo, version: int, vocabulary: int) -> TokenChunk | None:
        """Return the chunk that an answer adds; None if there is none yet.

        Args:
            version: of the weights that are served, and were since the request began.
            vocabulary: size of the model's vocabulary.

        Raises:
            BackendError: the server reports an error, omits something, or sends too much.
        """
        held = self._read(sampled, vocabulary)
        self._held.append(held)
        finish = sampled.finish_reason
        if self.is_mixed and finish is None:
            return None

        if finish is None:
            versions = [version] * held.count
        else:
            versions = self._reported_versions(sampled)
        return self._release(versions, finish)

    def end_here(self) -> TokenChunk:
        """Return the only chunk of a request that ends before the server has heard of it."""
        self.run.stop_reason = StopReason.ABORTED
        final = self.run.output(self.run.request.prompt_ids)
        return TokenChunk(token_ids=(), log_probs=(), policy_versions=(), final=final)

    def _read(self, sampled: wire.ChunkInfo, vocabulary: int) -> _Held:
        """Return what is new in an answer.

        Answers may repeat earlier ids; the last ones are new.
        """
        name = f"request {self.run.request.request_id!r}"
        count = sampled.completion_tokens - self._num_received
        if count < 0 or sampled.completion_tokens > self.run.max_tokens:
            raise BackendError(
                f"{name}: SGLang counts {sampled.completion_tokens} ids after"
                f" {self._num_received}, of at most {self.run.max_tokens}"
            )
        entries = sampled.output_token_logprobs[-count:] if count else []
        if len(entries) != count:
            raise BackendError(f"{name}: SGLang returned {count} ids, but {len(entries)} log-probs")

        ids = [token_id for _, token_id, _ in entries]
        if any(token_id >= vocabulary for token_id in ids):
            raise BackendError(f"{name}: SGLang returned ids outside [0, {vocabulary})")
        log_probs = [log_prob for log_prob, _, _ in entries]
        masks = None
        if self.run.request.sampling.restricted and count:
            supports = (sampled.output_token_sampling_mask or [])[-count:]
            log_probs = (sampled.output_token_sampling_logprobs or [])[-count:]
            if len(supports) != count or len(log_probs) != count:
                raise BackendError(
                    f"{name}: SGLang returned {count} ids, but {len(supports)} of the supports"
                    f" they were drawn from and {len(log_probs)} log-probs over them"
                )
            masks = _masks(supports, ids, vocabulary, name)
        self._num_received += count
        return _Held(ids, log_probs, masks)

    def _reported_versions(self, sampled: wire.ChunkInfo) -> list[int]:
        """Return the versions of the ids that are held, which the last answer reports."""
        start = len(self.run.token_ids)
        count = self._num_received - start
        if not count:
            return []
        spans = []
        for span in sampled.weight_versions or []:
            spans.append((int(span.version), span.start))
        return expand_versions(spans, start, count)

    def _release(self, versions: list[int], finish: wire.RequestEnd | None) -> TokenChunk | None:
        """Accept what is held; return the chunk, None if it would be empty."""
        run = self.run
        first = len(run.token_ids)
        first_support = len(run.supports)
        position = 0
        for held in self._held:
            for index in range(held.count):
                mask = None if held.masks is None else held.masks[index : index + 1]
                run.accept(
                    np.array(held.ids[index : index + 1]),
                    np.array(held.log_probs[index : index + 1]),
                    versions[position],
                    mask,
                )
                position += 1
        self._held = []

        if finish is not None and run.stop_reason is None:
            run.stop_reason = self._stop_reason(finish)
        if len(run.token_ids) == first and run.stop_reason is None:
            return None
        final = None
        if run.stop_reason is not None:
            final = run.output([*run.request.prompt_ids, *run.token_ids])
        return TokenChunk(
            token_ids=tuple(run.token_ids[first:]),
            log_probs=tuple(run.log_probs[first:]),
            policy_versions=tuple(run.versions[first:]),
            supports=tuple(run.supports[first_support:]),
            final=final,
        )

    def _stop_reason(self, finish: wire.RequestEnd) -> StopReason:
        if finish.type == "abort" and self.is_aborted.is_set():
            return StopReason.ABORTED
        if finish.type == "length":
            return StopReason.LENGTH
        raise BackendError(
            f"request {self.run.request.request_id!r}: SGLang ended it with {finish.type}:"
            f" {finish.message}"
        )


class _Held:
    """Ids that came from the server together.

    Args:
        ids: [n].
        log_probs: [n].
        masks: uint32 [n, ceil(V / 32)]; None where all ids could be drawn.
    """

    def __init__(self, ids: list[int], log_probs: list[float], masks: np.ndarray | None) -> None:
        self.ids = ids
        self.log_probs = log_probs
        self.masks = masks

    @property
    def count(self) -> int:
        return len(self.ids)


def _masks(
    supports: Sequence[Sequence[int]], ids: Sequence[int], vocabulary: int, name: str
) -> np.ndarray:
    """Return supports as masks, uint32 [n, ceil(V / 32)].

    Raises:
        BackendError: one is not of this vocabulary, or lacks the id that was drawn from it.
    """
    num_words = mask_words(vocabulary)
    bits = np.zeros((len(supports), num_words * 32), np.uint8)
    for row, support in enumerate(supports):
        if not support or max(support) >= vocabulary or ids[row] not in support:
            raise BackendError(f"{name}: SGLang drew id {ids[row]} from a support without it")
        bits[row, list(support)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


class SglangBackend:
    """One server of SGLang: one that is started here, or one at ``settings.url``.

    Args:
        version: policy version of the weights in ``settings.model``.
        decode_text: ids to text; without it requests with stop strings are refused.
        tokenizer_eos_ids: ids that end a generation if the model's files name none.
        silence_seconds: a server that owes an answer and sends nothing for so long is lost.
    """

    def __init__(
        self,
        settings: SglangSettings,
        *,
        version: int = 0,
        decode_text: Callable[[Sequence[int]], str] | None = None,
        tokenizer_eos_ids: frozenset[int] = frozenset(),
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self._silence_seconds = silence_seconds
        self._version = version
        self._decode_text = decode_text
        self._tokenizer_eos_ids = tokenizer_eos_ids
        self._process: ServerProcess | None = None
        self._connection: ServerConnection | None = None
        self._info: wire.ServerInfo | None = None
        self._shares_files = False  # the server opens files that this process names
        self._checkpoint: Checkpoint | None = None
        self._live: dict[str, SentRequest] = {}  # running requests by id
        self._usage = Usage()
        self._change = asyncio.Lock()  # one pause, update or sleep at a time
        self._gate = PriorityGate()  # requests pass it on their way to the server
        self._delivery = asyncio.Event()
        self._delivery.set()
        self._resumed = asyncio.Event()  # since the last pause
        self._is_frozen = False  # the server is paused
        self._paused = False
        self._asleep = False
        self._closed = False
        self._failure: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        info = self._info
        if info is None:
            raise BackendError("what an SGLang server can do is known after start()")
        reports_support = info.sampling_mask_max_tokens >= self._settings.vocab_size
        payloads = frozenset()
        if self._shares_files:
            payloads = frozenset({FILES})
        weight_dtype = "float32"
        if info.quantization is None:
            weight_dtype = _dtype(info)
        return Capabilities(
            max_model_len=self._settings.max_model_len,
            max_concurrent=info.max_running_requests or self._settings.max_running_requests,
            any_sampling=reports_support,
            sampling_replay=reports_support,
            seeds=info.enable_deterministic_inference,
            stop_strings=self._decode_text is not None,
            pause_modes=frozenset(PauseMode),
            in_flight_update=self._shares_files,
            prefix_reuse=not info.disable_radix_cache,
            partial_update=self._shares_files,
            priorities=_orders_queue(info),
            scoring=True,
            sleep=info.enable_memory_saver,
            precision=_precision(info),
            weight_dtype=weight_dtype,
            weight_payloads=payloads,
        )

    @property
    def policy_version(self) -> int:
        return self._version

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a server, or connect to one.

        Raises:
            ConfigError: SGLang is missing or too old, its server was started for something else, or
                the model is not supported.
            BackendError: it could not start for another reason.
            EngineDiedError: there is no server at this address.
        """
        if self._connection is not None:
            raise BackendError("the backend was already started")
        settings = self._settings
        self._checkpoint = Checkpoint.read(model_folder(settings.model, weights=True))
        url = settings.url
        token = settings.token
        if url is None:
            self._process = await asyncio.to_thread(
                ServerProcess.start, settings, version=self._version
            )
            url = self._process.url
            token = self._process.token

        headers = {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._connection = ServerConnection(
            url,
            kind="SGLang server",
            headers=headers,
            silence_seconds=self._silence_seconds,
            check=self._check_answer,
        )
        self._connection.open()
        try:
            if self._process is not None:
                await self._process.wait_until(self._is_ready)
            self._info = await self._read_info()
            self._shares_files = settings.weight_dir is not None or is_loopback(
                self._connection.host
            )
        except BaseException:
            await self._stop_server()
            raise

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._gate.open()
        self._delivery.set()
        self._resumed.set()
        for live in self._live.values():
            live.news.put_nowait(BackendClosedError("the backend was closed"))
            live.is_aborted.set()
        await self._stop_server()

    async def _stop_server(self) -> None:
        if self._connection is not None:
            await self._connection.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _is_ready(self) -> bool:
        """Return whether the server answers yet."""
        try:
            await self._state("/model_info", wire.ModelInfo)
        except BackendError:
            return False
        return True

    async def _read_info(self) -> wire.ServerInfo:
        """Return what the server was started with.

        Raises:
            ConfigError: not for this.
        """
        settings = self._settings
        info = await self._state("/server_info", wire.ServerInfo)
        model = await self._state("/model_info", wire.ModelInfo)
        release = tuple(int(part) for part in info.version.split(".")[:3] if part.isdecimal())
        if release < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise ConfigError(
                f"SGLang {info.version} serves at {self._address}; this backend needs {oldest} or"
                " newer"
            )
        if not info.skip_tokenizer_init:
            raise ConfigError(
                f"the SGLang server at {self._address} has a tokenizer: start it with"
                " --skip-tokenizer-init, ids go in and out"
            )
        if info.max_req_input_len < settings.max_model_len:
            raise ConfigError(
                f"the SGLang server at {self._address} takes {info.max_req_input_len} ids, but"
                f" rollout.max_model_len={settings.max_model_len}; lower it, or start the server"
                f" with --context-length {settings.max_model_len + CONTEXT_MARGIN} and as many"
                " --max-total-tokens"
            )
        await self._take_version(model.weight_version)
        return info

    async def _take_version(self, weight_version: str) -> None:
        """Take the version of a server that has served a run, and give one to a fresh server."""
        try:
            self._version = int(weight_version)
        except ValueError:
            # Spans of outputs name it until the first update.
            await self._command(
                "/update_weight_version", {"new_version": str(self._version)}, "name its weights"
            )

    @property
    def _address(self) -> str:
        assert self._connection is not None
        return self._connection.url

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check_serving()
        live = SentRequest(self._admit(request))
        self._live[request.request_id] = live
        self._usage.begin(live.run)
        reading = asyncio.create_task(self._read(live))
        try:
            while True:
                news = await live.news.get()
                await self._delivery.wait()
                self._check_serving()
                if isinstance(news, Exception):
                    raise news
                yield news
                if news.final is not None:
                    return
        finally:
            await self._release(live, reading)

    def _admit(self, request: GenerateRequest) -> RunningRequest:
        """Check a request, and return its initial state.

        Raises:
            PromptTooLongError: no room for one sampled id.
            BackendError: a duplicate id, or something this engine cannot do.
        """
        max_model_len = self._settings.max_model_len
        check_request(
            request,
            self._live,
            max_model_len=max_model_len,
            vocabulary=self._settings.vocab_size,
            stop_strings=self._decode_text is not None,
        )
        name = f"request {request.request_id!r}"
        sampling = request.sampling
        if sampling.grammar is not None:
            raise BackendError(f"{name} has a grammar, which this engine cannot follow")
        if request.multi_modal:
            raise BackendError(f"{name}: this engine takes no {sorted(request.multi_modal)} input")
        if request.lora is not None:
            raise BackendError(f"{name}: this engine serves no LoRA adapter")
        if sampling.restricted and not self.capabilities.any_sampling:
            raise BackendError(
                f"{name} restricts draws by top_p, top_k or min_p, of which the server at"
                f" {self._address} does not report log-probs; start it with"
                f" --sampling-mask-max-tokens {self._settings.vocab_size}"
            )

        assert self._checkpoint is not None
        return RunningRequest(
            request,
            max_tokens=min(sampling.max_tokens, max_model_len - len(request.prompt_ids)),
            eos_ids=self._checkpoint.eos_token_ids or self._tokenizer_eos_ids,
            seed=0,  # SGLang draws
            decode_text=self._decode_text,
        )

    async def _read(self, live: SentRequest) -> None:
        """Send a request and hand on what comes back, whether its caller waits or not."""
        try:
            await self._pass_gate(live)
            if live.is_aborted.is_set():
                live.news.put_nowait(live.end_here())
                return
            await self._sample(live)
        except Exception as error:
            live.news.put_nowait(await self._translate(error, live.run.request))
        finally:
            live.has_ended.set()

    async def _pass_gate(self, live: SentRequest) -> None:
        """Wait until requests may go to the server, or this one is aborted."""
        while not self._gate.is_open and not live.is_aborted.is_set():
            waits = [
                asyncio.ensure_future(self._gate.wait(live.run.request.priority)),
                asyncio.ensure_future(live.is_aborted.wait()),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        live.is_open = not live.is_aborted.is_set()

    async def _sample(self, live: SentRequest) -> None:
        assert self._info is not None
        vocabulary = self._settings.vocab_size
        body = wire.generate_body(
            live.run,
            live.rid,
            vocabulary=vocabulary,
            priorities=_orders_queue(self._info),
            seeds=self._info.enable_deterministic_inference,
        )
        async with contextlib.aclosing(self._events(body)) as events:
            async for event in events:
                with self._malformed_is_an_error():
                    sampled = wire.Chunk.model_validate(event).meta_info
                    live.run.cached_tokens = max(live.run.cached_tokens, sampled.cached_tokens)
                    chunk = live.take(sampled, self._version, vocabulary)
                if chunk is not None:
                    live.news.put_nowait(chunk)
                if live.run.stop_reason is not None:
                    return
                if live.is_aborted.is_set():
                    # The server may have got the first call before it knew the request.
                    await self._abort(live)
        raise BackendError(
            f"request {live.run.request.request_id!r}: SGLang's answer ended without a result"
        )

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        self._check_serving()
        if len(token_ids) > self._settings.max_model_len:
            raise BackendError(
                f"a context of {len(token_ids)} ids is longer than"
                f" rollout.max_model_len={self._settings.max_model_len}"
            )
        vocabulary = self._settings.vocab_size
        if not all(0 <= token_id < vocabulary for token_id in token_ids):
            raise BackendError(f"ids to score must be in [0, {vocabulary})")
        await self._gate.wait(_FIRST_IN_QUEUE)
        return await self._score(token_ids, start=start, top_k=top_k)

    async def _score(self, token_ids: Sequence[int], *, start: int, top_k: int) -> TokenScores:
        assert self._info is not None
        priority = _FIRST_IN_QUEUE if _orders_queue(self._info) else None
        body = wire.score_body(token_ids, uuid4().hex, top_k=top_k, priority=priority)
        scored = None
        async with contextlib.aclosing(self._events(body)) as events:
            async for event in events:
                with self._malformed_is_an_error():
                    scored = wire.ScoresAnswer.model_validate(event).meta_info
        with self._malformed_is_an_error():
            if scored is None:
                raise ValueError("no scores")
            return _read_scores(
                scored,
                token_ids,
                vocab_size=self._settings.vocab_size,
                start=start,
                top_k=top_k,
            )

    async def abort(self, request_id: str) -> bool:
        live = self._live.get(request_id)
        if live is None or live.has_ended.is_set() or self._closed:
            return False
        live.is_aborted.set()
        if live.is_open:
            await self._abort(live)
        return True

    async def _abort(self, live: SentRequest) -> None:
        await self._post("/abort_request", {"rid": live.rid}, None)

    async def _release(self, live: SentRequest, reading: asyncio.Task[None]) -> None:
        """Free what the request holds, whatever ended it."""
        self._live.pop(live.run.request.request_id, None)
        self._usage.end(live.run)
        left_engine = live.has_ended.is_set()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if live.is_open and not self._closed and (not left_engine or self._ended_here(live)):
            # The caller left, or a stop string ended it, which SGLang does not know.
            with contextlib.suppress(BackendError):
                await self._abort(live)

    def _ended_here(self, live: SentRequest) -> bool:
        return live.run.stop_reason is StopReason.STOP

    async def _translate(self, error: Exception, request: GenerateRequest) -> BackendError:
        """Return the error that a request ends with where this one was raised."""
        if self._closed:
            return BackendClosedError("the backend was closed")
        if isinstance(error, EngineDiedError):
            return await self._death(error)
        if isinstance(error, BackendError):
            return type(error)(f"request {request.request_id!r}: {error}")
        logger.error("a request to SGLang failed", exc_info=error)
        return BackendError(f"request {request.request_id!r}: {type(error).__name__}: {error}")

    async def _death(self, error: EngineDiedError) -> EngineDiedError:
        """Return the error with the cause from the log of a server that was started here."""
        if self._process is None:
            return error
        # The connection breaks before the process has ended.
        deadline = time.monotonic() + _DEATH_SECONDS
        while not self._process.has_ended and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._process.has_ended:
            return self._process.death()
        return error

    def _check_running(self) -> None:
        """Raise unless the engine runs; it may hold wrong weights, and take new ones."""
        if self._closed:
            raise BackendClosedError("the backend is closed")
        if self._info is None:
            raise BackendClosedError("the backend was not started")
        if self._process is not None and self._process.has_ended:
            raise self._process.death()

    def _check_serving(self) -> None:
        self._check_running()
        if self._failure is not None:
            raise EngineDiedError(self._failure)

    # --- pausing and weights ----------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._gate.close()
        self._resumed.clear()
        async with self._change:
            self._check_running()
            self._paused = True
            if mode is PauseMode.KEEP:
                await self._freeze()
                return
            await self._unfreeze()
        if mode is PauseMode.ABORT:
            for request_id in list(self._live):
                if self._live[request_id].is_open:
                    await self.abort(request_id)
        await self._until_idle()

    async def _until_idle(self) -> None:
        """Wait until nothing runs on the server, or the pause is over."""
        for live in list(self._live.values()):
            if not live.is_open:
                continue
            waits = [
                asyncio.ensure_future(live.has_ended.wait()),
                asyncio.ensure_future(self._resumed.wait()),
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def resume(self) -> None:
        self._resumed.set()
        async with self._change:
            self._check_running()
            self._paused = False
            await self._resume_unless_paused()

    async def _resume_unless_paused(self) -> None:
        # Wrong weights stay paused until a whole update succeeds.
        if self._paused or self._failure is not None or self._asleep:
            return
        await self._unfreeze()
        self._delivery.set()
        self._gate.open()

    async def _freeze(self) -> None:
        """Put running requests back into the server's queue, and start none."""
        # Before the call: if it is cancelled, the server has paused nevertheless.
        self._is_frozen = True
        await self._command("/pause_generation", {"mode": "retract"}, "pause")
        # That was answered before the scheduler had heard of it; this answer comes from there.
        await self._state("/server_info", wire.ServerInfo)

    async def _unfreeze(self) -> None:
        if self._is_frozen:
            await self._command("/continue_generation", {}, "continue")
            self._is_frozen = False

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
            await asyncio.to_thread(self._check_update, update)

            start_time = time.perf_counter()
            self._gate.close()
            self._delivery.clear()
            try:
                if not self._is_frozen:
                    await self._freeze()
                await self._load_and_verify(update)
            except BaseException as error:
                self._refuse_to_serve(update, error)
                if isinstance(error, WeightUpdateError) or not isinstance(error, Exception):
                    raise
                raise WeightUpdateError(
                    f"weights of version {update.version} could not be loaded: {error}"
                ) from error

            self._failure = None
            if self._paused:
                self._delivery.set()
            await self._resume_unless_paused()
            self._usage.weight_update_seconds += time.perf_counter() - start_time

    def _check_update(self, update: WeightUpdate) -> None:
        """Refuse wrong updates before the model is touched: SGLang may die of one."""
        assert self._checkpoint is not None
        check_update(
            update,
            self._checkpoint,
            served=self._version,
            kinds=self.capabilities.weight_payloads,
            max_model_len=self._settings.max_model_len,
            require_probe=self._settings.require_probe,
            probe_key="rollout.sglang.require_probe",
        )

    async def _load_and_verify(self, update: WeightUpdate) -> None:
        """Load weights into the frozen engine, and compare its log-probs with the learner's."""
        for live in self._live.values():
            if live.is_open:
                live.is_mixed = True
        with _linked(update.payload, self._settings.weight_dir) as folder:
            body = {
                "model_path": str(folder),
                "load_format": "safetensors",
                "weight_version": str(update.version),
                "flush_cache": True,
            }
            await self._command("/update_weights_from_disk", body, "load the weights")
        self._version = update.version
        if update.probe is None:
            return
        # The probe is a request: the engine must run for it, while delivery is suspended.
        await self._unfreeze()
        await self._verify(update.probe)
        if self._paused:
            await self._freeze()

    async def _verify(self, probe: LogprobProbe) -> None:
        log_probs = []
        for ids in probe.ids:
            scores = await self._score(ids, start=1, top_k=0)
            log_probs.append(scores.log_probs)
        require_agreement(
            probe.differences(log_probs),
            self._settings.tolerances(self.capabilities.precision),
            section="rollout.sglang",
        )

    def _refuse_to_serve(self, update: WeightUpdate, error: BaseException) -> None:
        """End all requests, and serve nothing until a whole update succeeds."""
        self._failure = (
            f"weights of version {update.version} were loaded wrongly: {error!r}; send a whole"
            " update"
        )
        logger.error("the SGLang engine stops serving: %s", self._failure)
        for live in self._live.values():
            live.news.put_nowait(EngineDiedError(self._failure))
        self._delivery.set()

    async def reset_prefix_cache(self) -> None:
        """Reset it; where requests run, SGLang refuses, and it is reset in a pause."""
        async with self._change:
            self._check_running()
            was_frozen = self._is_frozen
            if not was_frozen:
                self._gate.close()
                await self._freeze()
            try:
                await self._post("/flush_cache", {}, None)
            finally:
                if not was_frozen:
                    await self._resume_unless_paused()

    async def sleep(self) -> None:
        async with self._change:
            self._check_can_sleep()
            self._gate.close()
            self._resumed.clear()
            for request_id in list(self._live):
                if self._live[request_id].is_open:
                    await self.abort(request_id)
            await self._until_idle()
            await self._post("/release_memory_occupation", {}, None)
            self._asleep = True

    async def wake(self) -> None:
        async with self._change:
            self._check_can_sleep()
            await self._post("/resume_memory_occupation", {}, None)
            self._asleep = False
            await self._resume_unless_paused()

    def _check_can_sleep(self) -> None:
        self._check_running()
        if not self.capabilities.sleep:
            raise NotImplementedError(
                "sleep needs CUDA and rollout.sleep_during_update=true, or a server that was"
                " started with --enable-memory-saver"
            )

    # --- state ------------------------------------------------------------------------------------

    async def health(self) -> Health:
        try:
            self._check_serving()
        except BackendError as error:
            return Health(ok=False, detail=str(error), policy_version=self._version)
        num_sampling = sum(
            1 for live in self._live.values() if live.num_sampled and not live.has_ended.is_set()
        )
        num_waiting = sum(1 for live in self._live.values() if not live.num_sampled)
        return Health(
            ok=True, policy_version=self._version, running=num_sampling, waiting=num_waiting
        )

    async def metrics(self) -> BackendMetrics:
        return self._usage.metrics()

    # --- HTTP -------------------------------------------------------------------------------------

    async def _events(self, body: bytes) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of the answer to ``/generate``."""
        assert self._connection is not None
        lines = self._connection.lines("/generate", body)
        async with contextlib.aclosing(lines):
            async for line in lines:
                with self._malformed_is_an_error():
                    if not line.strip():
                        continue
                    event = wire.event(line)
                if event is None:
                    return
                yield event

    async def _state(self, path: str, schema: type[wire.StateT]) -> wire.StateT:
        """Return the server's answer about its state."""
        assert self._connection is not None
        answer = await self._connection.get(path)
        with self._malformed_is_an_error():
            return schema.model_validate(answer)

    async def _command(self, path: str, body: Mapping[str, Any], what: str) -> None:
        """Have the server do something; raise BackendError unless it did."""
        done = await self._post(path, body, wire.Done)
        assert done is not None
        if not done.success:
            raise BackendError(f"SGLang did not {what}: {done.message}")

    async def _post(
        self, path: str, body: Mapping[str, Any], schema: type[wire.StateT] | None
    ) -> wire.StateT | None:
        """Return the answer to a command; None where it says nothing but that it was done."""
        assert self._connection is not None
        content = await self._connection.post(path, wire.encode(body))
        if schema is None:
            return None
        with self._malformed_is_an_error():
            return schema.model_validate(decode_json(content))

    def _malformed_is_an_error(self) -> contextlib.AbstractContextManager[None]:
        assert self._connection is not None
        return self._connection.malformed_is_an_error()

    async def _check_answer(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of a refusal."""
        if response.status == 200:
            return
        content = await read_beginning(response.headers, response.content.iter_any())
        try:
            words = wire.refusal(decode_json(content))
        except ValueError:
            words = content[:300].decode("utf-8", "replace")
        if response.status == 401:
            raise BackendError(
                f"{self._address} does not accept the token; check the variable named by"
                " rollout.token_env"
            )
        raise BackendError(f"SGLang answered HTTP {response.status}: {words}")


@contextlib.contextmanager
def _linked(files: Sequence[str], parent: str | None) -> Iterator[Path]:
    """Yield a folder with links to these files: the server loads all files of a folder.

    Args:
        parent: where to make it; None: shared memory of this machine.
    """
    folder = make_temp_folder(
        "jax_agent_rl-sglang-weights-", Path(parent) if parent else None, in_memory=True
    )
    try:
        for file in files:
            path = Path(file).absolute()
            (folder / path.name).symlink_to(path)
        yield folder
    finally:
        remove_temp_folder(folder)


def _orders_queue(info: wire.ServerInfo) -> bool:
    return info.enable_priority_scheduling and info.schedule_low_priority_values_first


def _dtype(info: wire.ServerInfo) -> str:
    return info.dtype.removeprefix("torch.")


def _precision(info: wire.ServerInfo) -> str:
    """Return the coarsest rounding: ``Capabilities.precision``."""
    for name in (info.quantization or "", info.kv_cache_dtype):
        if "fp8" in name:
            return "fp8"
        if "int8" in name or "int4" in name or "awq" in name or "gptq" in name:
            return "int8"
    return _dtype(info)


def _read_scores(
    scored: wire.ScoresInfo,
    token_ids: Sequence[int],
    *,
    vocab_size: int,
    start: int,
    top_k: int,
) -> TokenScores:
    """Return the scores of a context's ids from ``start`` on.

    Raises:
        ValueError: they are of other ids, or some are missing.
    """
    entries = scored.input_token_logprobs
    scored_ids = [token_id for _, token_id, _ in entries]
    # SGLang names the vocabulary's last id 0, as it does with what stands for images. Its log-prob
    # is that of the id itself.
    last_as_zero = [0 if token_id == vocab_size - 1 else token_id for token_id in token_ids]
    if scored_ids not in (list(token_ids), last_as_zero):
        raise ValueError(f"scores of {len(entries)} ids for {len(token_ids)} others")
    log_probs = []
    for log_prob, _, _ in entries[start:]:
        if log_prob is None:
            raise ValueError("an id has no log-prob")
        log_probs.append(log_prob)

    top_ids = []
    top_log_probs = []
    if top_k:
        for candidates in (scored.input_top_logprobs or [])[start:]:
            likeliest = (candidates or [])[:top_k]
            if len(likeliest) != top_k:
                raise ValueError(f"{len(likeliest)} of {top_k} likeliest ids")
            top_ids.append(tuple(token_id for _, token_id, _ in likeliest))
            top_log_probs.append(tuple(log_prob for log_prob, _, _ in likeliest))
        if len(top_ids) != len(log_probs):
            raise ValueError(f"the likeliest ids of {len(top_ids)} positions")
    return TokenScores(
        log_probs=tuple(log_probs), top_ids=tuple(top_ids), top_log_probs=tuple(top_log_probs)
    )
