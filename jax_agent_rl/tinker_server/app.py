"""The HTTP side: the Tinker API's routes, futures, the queue of training requests, and assembly."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from jax_agent_rl.chat.codec import ChatCodec
from jax_agent_rl.config.commands import TinkerServerSettings
from jax_agent_rl.models.hf import load_hf
from jax_agent_rl.models.identity import model_fingerprints
from jax_agent_rl.runtime.identity import RunIdentity
from jax_agent_rl.runtime.policy import resolve_model
from jax_agent_rl.runtime.resume import check_resumed
from jax_agent_rl.tinker_server.database import Database, Request
from jax_agent_rl.tinker_server.requests import (
    MAX_BODY_BYTES,
    CreateModelRequest,
    CreateSamplerRequest,
    FutureRequest,
    LoadRequest,
    ModelRequest,
    OptimStepRequest,
    SampleRequest,
    SaveRequest,
    SessionRequest,
)
from jax_agent_rl.tinker_server.rest import RestRoutes, expiry
from jax_agent_rl.tinker_server.retention import Retention
from jax_agent_rl.tinker_server.sampling import Sampler
from jax_agent_rl.tinker_server.training import Models
from jax_agent_rl.tinker_server.wire import STABLE_REINFORCE, BadRequest, parse_batch
from jax_agent_rl.utils.http_server import HttpServer, Refused, read_body, read_bytes
from jax_agent_rl.utils.network import token_from

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
"""How long a request for a result waits before the client asks again."""
PROTOBUF = "application/x-protobuf"
_PROTOBUF_KINDS = ("forward", "forward_backward", "sample")
"""Kinds of requests whose results are in protobuf; other results are in JSON."""
_TRAINING_SCHEMAS = {
    "create_model": CreateModelRequest,
    "optim_step": OptimStepRequest,
    "save_weights": SaveRequest,
    "save_weights_for_sampler": SaveRequest,
    "load_weights": LoadRequest,
    "unload_model": ModelRequest,
}


class TinkerServer:
    """The service, from :meth:`start` to :meth:`close`.

    Args:
        training: one thread, in which ``models`` runs.
        token: API key that clients must send, or None.

    Attributes:
        restored: requests of the last start, by their model, until its client is heard of.
    """

    def __init__(
        self,
        settings: TinkerServerSettings,
        models: Models,
        sampler: Sampler,
        database: Database,
        *,
        training: ThreadPoolExecutor,
        token: str | None,
    ) -> None:
        self._settings = settings
        self._models = models
        self._sampler = sampler
        self._database = database
        self._training = training
        self._name = settings.model_name or settings.model.path
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self.restored: dict[str, deque[Request]] = {}
        # Set when a request has a result, by the request's id.
        self._waiting: dict[str, asyncio.Event] = {}
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._worker: asyncio.Task[None] | None = None
        self._rest = RestRoutes(settings, models, database, training)
        self.http = HttpServer(
            self._routes(),
            refuse=_refuse,
            host=settings.host,
            port=settings.port,
            token=token,
            token_key="token_env",
            max_body_bytes=settings.max_body_mb << 20,
            body_key="max_body_mb",
            body_types=(PROTOBUF, "application/json"),
        )

    def _routes(self) -> list[web.RouteDef]:
        model = {
            "model_name": self._name,
            "max_context_length": self._settings.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        # Chunks of a batch come one after another; results are fetched one by one.
        client_config = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}
        routes = [
            ("GET", "healthz", _always({"status": "ok"})),
            ("GET", "get_server_capabilities", _always({"supported_models": [model]})),
            ("POST", "client/config", _always(client_config)),
            ("POST", "client/dynamic_config", _always({"sample_cancel_enabled": True})),
            ("POST", "telemetry", _always({"status": "accepted"})),
            ("POST", "session_heartbeat", self._heartbeat),
            ("POST", "create_sampling_session", self._create_sampler),
            ("POST", "forward_backward", self._forward_backward),
            ("POST", "asample", self._sample),
            ("POST", "retrieve_future", self._retrieve),
            ("POST", "cancel_future", self._cancel),
            *(("POST", kind, self._accept(kind)) for kind in _TRAINING_SCHEMAS),
            *self._rest.routes(),
        ]
        return [web.route(method, f"/api/v1/{path}", handler) for method, path, handler in routes]

    async def start(self) -> None:
        """Serve, and compute the requests that were queued when the server last ended.

        Training requests among them wait until their client is heard of, or nothing else is to do.
        """
        for request in self._database.queued():
            if request.kind == "sample":
                self._schedule(request)
            else:
                self._waiting[request.id] = asyncio.Event()
                self.restored.setdefault(request.owner, deque()).append(request)
        self._worker = asyncio.create_task(self._work())
        await self.http.start()

    async def close(self) -> None:
        """Stop; requests without a result are computed after the next start."""
        await self.http.close()
        tasks = list(self._samples.values())
        if self._worker is not None:
            tasks.append(self._worker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- futures ----------------------------------------------------------------------------------

    def _submit(
        self, request_id: str, owner: str, kind: str, body: bytes, **more: Any
    ) -> web.Response:
        """Record a request and schedule it, unless it is known; return its future."""
        request = self._database.add_request(request_id, owner, kind, body)
        if request is not None:
            self._schedule(request)
        return web.json_response({"request_id": request_id, "model_id": owner, **more})

    def _schedule(self, request: Request) -> None:
        self._waiting[request.id] = asyncio.Event()
        if request.kind != "sample":
            self._resume(request.owner)
            self._queue.put_nowait(request)
            return
        task = asyncio.create_task(self._finish(request, self._sampler.run))
        self._samples[request.id] = task
        task.add_done_callback(lambda _: self._samples.pop(request.id, None))

    def _resume(self, owner: str) -> None:
        """Queue a model's requests from before the last start, as its client has been heard of."""
        for request in self.restored.pop(owner, ()):
            self._queue.put_nowait(request)

    async def _next(self) -> Request:
        """Return the next request in order of arrival.

        If there is none, return one from before the last start, whose client may be gone.
        """
        if self._queue.empty() and self.restored:
            owner, requests = next(iter(self.restored.items()))
            request = requests.popleft()
            if not requests:
                del self.restored[owner]
            return request
        return await self._queue.get()

    async def _work(self) -> None:
        """Run training requests one after another."""
        loop = asyncio.get_running_loop()

        def run(request: Request) -> Awaitable[bytes]:
            return loop.run_in_executor(self._training, self._models.run, request)

        while True:
            request = await self._next()
            await self._finish(request, run)

    async def _heartbeat(self, http: web.Request) -> web.Response:
        body = await read_body(http, SessionRequest, max_bytes=MAX_BODY_BYTES)
        self._database.hear(body.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: Request, run: Callable[[Request], Awaitable[bytes]]) -> None:
        """Run a request and record its result, or why there is none."""
        try:
            self._database.finish(request, await run(request))
        except asyncio.CancelledError:
            raise
        except BadRequest as error:
            self._database.finish(request, _failure(str(error), "user"), failed=True)
        except Exception as error:
            logger.exception("%s failed", request.id)
            failure = _failure(f"{type(error).__name__}: {error}", "server")
            self._database.finish(request, failure, failed=True)
        self._waiting.pop(request.id).set()

    async def _retrieve(self, http: web.Request) -> web.Response:
        body = await read_body(http, FutureRequest, max_bytes=MAX_BODY_BYTES)
        request_id = body.request_id
        event = self._waiting.get(request_id)
        if event is not None:
            if self.restored:
                request = self._database.request(request_id)
                if request is not None:
                    self._resume(request.owner)
            try:
                await asyncio.wait_for(event.wait(), POLL_SECONDS)
            except TimeoutError:
                return web.json_response(
                    {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                )

        request = self._database.request(request_id)
        if request is None:
            raise Refused(404, f"there is no request {request_id!r}")
        if request.result is None:
            raise Refused(410, f"the result of {request_id!r} is not kept any more")
        content_type = "application/json"
        if request.state == "done" and request.kind in _PROTOBUF_KINDS:
            content_type = PROTOBUF
        return web.Response(body=request.result, content_type=content_type)

    async def _cancel(self, http: web.Request) -> web.Response:
        body = await read_body(http, FutureRequest, max_bytes=MAX_BODY_BYTES)
        task = self._samples.get(body.request_id)
        if task is not None:
            task.cancel()
            request = self._database.request(body.request_id)
            if request is not None:
                failure = _failure("the request was cancelled", "user")
                self._database.finish(request, failure, failed=True)
            self._waiting.pop(body.request_id).set()
        return web.json_response({})

    # --- training ---------------------------------------------------------------------------------

    def _accept(self, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return the handler of a training request in JSON."""
        schema = _TRAINING_SCHEMAS[kind]

        async def accept(http: web.Request) -> web.Response:
            body = await read_body(http, schema, max_bytes=MAX_BODY_BYTES)
            if isinstance(body, CreateModelRequest):
                return self._create_model(body)

            if isinstance(body, LoadRequest) and body.session_id is not None:
                if body.model_seq_id is None:
                    raise Refused(422, "model_seq_id: a new model of a session needs one")
                self._rest.checkpoint(body.path)
                return self._add_model(body, body.session_id, body.model_seq_id, kind=kind)

            if body.model_id is None:
                raise Refused(
                    422, "model_id: send the model's, or session_id and model_seq_id for a new one"
                )

            model = self._rest.known(body.model_id)
            if isinstance(body, SaveRequest):
                expiry(body.ttl_seconds)
            # Clients that number their requests may send one again: it is done once.
            number = uuid.uuid4().hex if body.seq_id is None else body.seq_id
            return self._submit(f"{model}:{number}", model, kind, body.to_json())

        return accept

    def _create_model(self, body: CreateModelRequest) -> web.Response:
        self._require_base(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise Refused(400, "only AdamW is computed")

        lora = self._settings.lora
        requested = body.lora_config
        advice = "start one with another `lora`"
        if lora is None:
            if requested is not None:
                raise Refused(400, f"this server trains whole models, not adapters; {advice}")
            return self._add_model(body, body.session_id, body.model_seq_id)
        if requested is None:
            raise Refused(400, f"this server trains adapters, not a whole model; {advice}")

        if requested.rank != lora.rank:
            raise Refused(
                400, f"this server trains adapters of rank {lora.rank}, not {requested.rank}"
            )
        if not (requested.train_mlp and requested.train_attn):
            raise Refused(400, f"this server's adapters cover {lora.targets_text()}")
        return self._add_model(body, body.session_id, body.model_seq_id, seed=requested.seed or 0)

    def _add_model(
        self,
        body: CreateModelRequest | LoadRequest,
        session: str,
        number: int,
        *,
        seed: int = 0,
        kind: str = "create_model",
    ) -> web.Response:
        if not self._database.has_session(session):
            raise Refused(404, f"there is no session {session!r}")
        model = f"{session}:train:{number}"
        settings = {"base_model": self._name, "seed": seed, "user_metadata": body.user_metadata}
        self._database.add_model(model, session, settings)
        return self._submit(f"{model}:0", model, kind, body.to_json())

    async def _forward_backward(self, http: web.Request) -> web.Response:
        body = await read_bytes(http)
        try:
            message = parse_batch(body)
        except BadRequest as error:
            raise Refused(400, str(error)) from error
        kind = "forward" if message.forward_only else "forward_backward"
        model = self._rest.known(message.model_id)
        return self._submit(f"{model}:{message.seq_id}", model, kind, body)

    def _require_base(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise Refused(404, f"this server has the model {self._name!r}, not {name!r}")

    # --- sampling ---------------------------------------------------------------------------------

    async def _create_sampler(self, http: web.Request) -> web.Response:
        body = await read_body(http, CreateSamplerRequest, max_bytes=MAX_BODY_BYTES)
        if body.model_path is None:
            self._require_base(body.base_model)
        else:
            self._rest.checkpoint(body.model_path)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self._database.add_sampler(sampler, body.model_path)
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler}
        )

    async def _sample(self, http: web.Request) -> web.Response:
        body = await read_body(http, SampleRequest)
        if body.prompt_alt_tokens_k:
            raise Refused(400, "prompt_alt_tokens_k is not computed by this server")
        # Recorded for that loss only: refuse it before anything is sampled.
        if body.record_stability_info:
            raise Refused(400, STABLE_REINFORCE)
        sampler = body.sampling_session_id
        if sampler is not None and self._database.sampler(sampler) is None:
            raise Refused(404, f"there is no sampling session {sampler!r}")
        owner = sampler or "sample"
        number = uuid.uuid4().hex if body.seq_id is None else body.seq_id
        request_id = f"{owner}:{number}"
        names = [f"{request_id}/{sample}" for sample in range(body.num_samples)]
        return self._submit(request_id, owner, "sample", body.to_json(), sample_sequence_ids=names)


def _always(body: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(http: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


def _refuse(request: web.BaseRequest, status: int, message: str) -> web.Response:
    return web.json_response({"detail": message}, status=status)


def _failure(message: str, category: str) -> bytes:
    return json.dumps({"error": message, "category": category}).encode()


@asynccontextmanager
async def open_server(
    settings: TinkerServerSettings, *, print_line: Callable[[str], None]
) -> AsyncIterator[TinkerServer]:
    """Load the model, compile, serve, and close everything in the end.

    Raises:
        ConfigError: the address cannot be used, or the token is missing.
        ModelError: the model cannot be read.
        CheckpointError: ``state_dir`` holds states of another model, or of other adapters.
    """
    token = token_from(settings.token_env, key="token_env")

    folder = resolve_model(settings.model.path)
    print_line(f"loading {folder}")
    codec = ChatCodec.from_pretrained(folder)
    database = Database(Path(settings.state_dir))
    try:
        check_states(settings, folder, database)
        model, params = load_hf(folder)
    except BaseException:
        database.close()
        raise

    training = ThreadPoolExecutor(1, thread_name_prefix="training")
    models = Models(settings, model, params, database)
    sampler = Sampler(
        settings,
        model,
        params,
        codec,
        models=models,
        database=database,
        training=training,
        print_line=print_line,
    )
    server = TinkerServer(settings, models, sampler, database, training=training, token=token)
    server.http.listen()  # a bad address is refused before anything is compiled

    retention = Retention(settings, models, database, training)
    sweeper: asyncio.Task[None] | None = None
    try:
        await sampler.start()
        await retention.start()
        sweeper = asyncio.create_task(retention.run())
        await server.start()
        yield server
    finally:
        if sweeper is not None:
            sweeper.cancel()
        await server.close()
        await sampler.close()
        training.shutdown(cancel_futures=True)
        database.close()


def check_states(settings: TinkerServerSettings, folder: str, database: Database) -> None:
    """Check that the states in ``state_dir`` are of this model and these adapters, and record it.

    Raises:
        CheckpointError: they are of another model, or of other adapters.
    """
    identity = RunIdentity(
        config=settings.model_dump(mode="json"), content={"model.path": model_fingerprints(folder)}
    )
    recorded = database.identity()
    if recorded is not None:
        check_resumed(
            TinkerServerSettings,
            RunIdentity.from_json(recorded),
            identity,
            checkpoint=f"state_dir={settings.state_dir}",
            advice="set them back, or choose another state_dir for them",
        )
    database.set_identity(identity.to_json())


async def serve(settings: TinkerServerSettings, *, print_line: Callable[[str], None]) -> None:
    """Serve until cancelled, for ``jax-agent-rl tinker-server``; see :func:`open_server`."""
    async with open_server(settings, print_line=print_line) as server:
        name = settings.model_name or settings.model.path
        print_line(f"serving {name} on {server.http.url}: set TINKER_BASE_URL={server.http.url}")
        await asyncio.Event().wait()
