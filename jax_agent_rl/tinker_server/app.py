"""The HTTP side: routes of the Tinker API, futures, and the queue of training requests."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from jax_agent_rl.config.servers import TinkerServerSettings
from jax_agent_rl.tinker_server.database import Database, Request
from jax_agent_rl.tinker_server.rest import RestRoutes, expiry
from jax_agent_rl.tinker_server.sampling import Checkpoint, Sampler
from jax_agent_rl.tinker_server.training import Models
from jax_agent_rl.tinker_server.wire import (
    MOST_IDS,
    STABLE_REINFORCE,
    BadRequest,
    ContextScores,
    ScoringRequest,
    parse_batch,
    read_prompt,
    read_targets,
    sampling_params,
    write_samples,
)
from jax_agent_rl.utils.http_server import HttpServer, Refused, read_json

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
"""How long a request for a result waits before the client asks again."""
PROTOBUF = "application/x-protobuf"
_BINARY = ("forward", "forward_backward", "sample")
_TRAINING = ("create_model", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights", "unload_model")


class TinkerServer:
    """The service, from :meth:`start` to :meth:`close`.

    Args:
        settings: of the server.
        models: computes training requests.
        sampler: samples.
        database: of both.
        training: one thread, in which ``models`` runs.
        token: API key that clients must send, or None.
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
        self._settings, self._models, self._sampler, self._database = settings, models, sampler, database
        self._training = training
        self._name = settings.model_name or settings.model.path
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._restored: dict[str, deque[Request]] = {}  # by their model, until its client is heard of
        self._waiting: dict[str, asyncio.Event] = {}
        self._samples: dict[str, asyncio.Task[None]] = {}
        self._worker: asyncio.Task[None] | None = None
        self._unscored: dict[Checkpoint | None, list[tuple[ScoringRequest, asyncio.Future[ContextScores]]]] = {}
        self._scoring: set[asyncio.Task[None]] = set()
        self._rest = RestRoutes(settings, models, database, training)
        routes = [
            ("GET", "healthz", self._healthy),
            ("GET", "get_server_capabilities", self._capabilities),
            ("POST", "client/config", self._client_config),
            ("POST", "client/dynamic_config", self._dynamic_config),
            ("POST", "telemetry", self._telemetry),
            ("POST", "create_sampling_session", self._create_sampler),
            ("POST", "forward_backward", self._forward_backward),
            ("POST", "asample", self._sample),
            ("POST", "retrieve_future", self._retrieve),
            ("POST", "cancel_future", self._cancel),
            *(("POST", kind, self._accept(kind)) for kind in _TRAINING),
            *self._rest.routes(),
        ]
        self.http = HttpServer(
            [web.route(method, f"/api/v1/{path}", handler) for method, path, handler in routes],
            refuse=lambda request, status, message: web.json_response({"detail": message}, status=status),
            host=settings.host,
            port=settings.port,
            token=token,
            token_key="token_env",
            max_body_bytes=settings.max_body_mb << 20,
            body_key="max_body_mb",
            body_types=(PROTOBUF, "application/json"),
        )

    async def start(self) -> None:
        """Serve, also what was not done when the server last ended, which waits for clients that are still there."""
        for request in self._database.queued():
            if request.kind == "sample":
                self._schedule(request)
            else:
                self._waiting[request.id] = asyncio.Event()
                self._restored.setdefault(request.owner, deque()).append(request)
        self._worker = asyncio.create_task(self._work())
        await self.http.start()

    async def close(self) -> None:
        """Stop; what is not done is done after the next start."""
        await self.http.close()
        tasks = [*self._samples.values(), *self._scoring, *([self._worker] if self._worker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- futures ------------------------------------------------------------------------------------------------

    def _submit(self, request_id: str, owner: str, kind: str, body: bytes, **more: Any) -> web.Response:
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
        task = self._samples[request.id] = asyncio.create_task(self._finish(request, self._run_sample))
        task.add_done_callback(lambda _: self._samples.pop(request.id, None))

    def _resume(self, owner: str) -> None:
        """Queue what a model's client, which has been heard of, asked for before the server ended."""
        for request in self._restored.pop(owner, ()):
            self._queue.put_nowait(request)

    async def _next(self) -> Request:
        """Return the next request in order of arrival, or, if there is none, one whose client may be gone."""
        if self._queue.empty() and self._restored:
            owner, requests = next(iter(self._restored.items()))
            request = requests.popleft()
            if not requests:
                del self._restored[owner]
            return request
        return await self._queue.get()

    async def _work(self) -> None:
        """Run training requests one after another."""
        loop = asyncio.get_running_loop()
        while True:
            request = await self._next()
            await self._finish(request, lambda one: loop.run_in_executor(self._training, self._models.run, one))

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
            self._database.finish(request, _failure(f"{type(error).__name__}: {error}", "server"), failed=True)
        self._waiting.pop(request.id).set()

    async def _retrieve(self, http: web.Request) -> web.Response:
        request_id = (await read_json(http))["request_id"]
        if (event := self._waiting.get(request_id)) is not None:
            if self._restored and (known := self._database.request(request_id)) is not None:
                self._resume(known.owner)
            try:
                await asyncio.wait_for(event.wait(), POLL_SECONDS)
            except TimeoutError:
                return web.json_response({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        request = self._database.request(request_id)
        if request is None:
            raise Refused(404, f"there is no request {request_id!r}")
        if request.result is None:
            raise Refused(410, f"the result of {request_id!r} is not kept any more")
        is_binary = request.state == "done" and request.kind in _BINARY
        return web.Response(body=request.result, content_type=PROTOBUF if is_binary else "application/json")

    async def _cancel(self, http: web.Request) -> web.Response:
        request_id = (await read_json(http))["request_id"]
        if (task := self._samples.get(request_id)) is not None:
            task.cancel()
            if (request := self._database.request(request_id)) is not None:
                self._database.finish(request, _failure("the request was cancelled", "user"), failed=True)
            self._waiting.pop(request_id).set()
        return web.json_response({})

    # --- training -----------------------------------------------------------------------------------------------

    def _accept(self, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def accept(http: web.Request) -> web.Response:
            body = await read_json(http)
            if kind == "create_model":
                return self._create_model(body)
            if kind == "load_weights" and body.get("session_id"):
                return self._create_by_load(body)
            model = self._rest.known(body.get("model_id"))
            expiry(body.get("ttl_seconds"))
            number = body.get("seq_id")
            request_id = f"{model}:{uuid.uuid4().hex if number is None else number}"
            return self._submit(request_id, model, kind, json.dumps(body).encode())

        return accept

    def _create_model(self, body: dict[str, Any]) -> web.Response:
        lora, wanted = self._settings.lora, body.get("lora_config")
        self._require_base(body.get("base_model"))
        if body.get("optimizer_config", {}).get("type", "adamw") != "adamw":
            raise Refused(400, "only AdamW is computed")
        if (lora is None) != (wanted is None):
            asked, own = ("adapters", "whole models") if wanted else ("a whole model", "adapters")
            raise Refused(400, f"this server trains {own}, not {asked}; start one with another `lora`")
        if lora is None or wanted is None:
            return self._add_model(body)
        if wanted["rank"] != lora.rank:
            raise Refused(400, f"this server trains adapters of rank {lora.rank}, not {wanted['rank']}")
        if not (wanted.get("train_mlp", True) and wanted.get("train_attn", True)):
            raise Refused(400, f"this server's adapters cover {', '.join(lora.targets)}")
        return self._add_model(body, seed=wanted.get("seed") or 0)

    def _add_model(self, body: dict[str, Any], *, seed: int = 0, kind: str = "create_model") -> web.Response:
        if not self._database.has_session(body["session_id"]):
            raise Refused(404, f"there is no session {body['session_id']!r}")
        model = f"{body['session_id']}:train:{body['model_seq_id']}"
        settings = {"base_model": self._name, "seed": seed, "user_metadata": body.get("user_metadata")}
        self._database.add_model(model, body["session_id"], settings)
        return self._submit(f"{model}:0", model, kind, json.dumps(body).encode())

    def _create_by_load(self, body: dict[str, Any]) -> web.Response:
        self._rest.checkpoint(body["path"])
        return self._add_model(body, kind="load_weights")

    async def _forward_backward(self, http: web.Request) -> web.Response:
        body = await http.read()
        try:
            model, number, message = parse_batch(body)
        except BadRequest as error:
            raise Refused(400, str(error)) from error
        kind = "forward" if message.forward_only else "forward_backward"
        return self._submit(f"{self._rest.known(model)}:{number}", model, kind, body)

    def _require_base(self, name: str | None) -> None:
        if name not in (None, self._name):
            raise Refused(404, f"this server has the model {self._name!r}, not {name!r}")

    # --- sampling -----------------------------------------------------------------------------------------------

    async def _create_sampler(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        path = body.get("model_path")
        if path is None:
            self._require_base(body.get("base_model"))
        else:
            self._rest.checkpoint(path)
        sampler = f"{body['session_id']}:sample:{body['sampling_session_seq_id']}"
        self._database.add_sampler(sampler, path)
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def _sample(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        if body.get("prompt_alt_tokens_k"):
            raise Refused(400, "prompt_alt_tokens_k is not computed by this server")
        if body.get("record_stability_info"):  # recorded for that loss only: refuse it before anything is sampled
            raise Refused(400, STABLE_REINFORCE)
        for key in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= body.get(key, 0) <= MOST_IDS:
                raise Refused(400, f"{key}={body[key]}; this server computes at most {MOST_IDS}")
        sampler, number = body.get("sampling_session_id"), body.get("seq_id")
        if sampler is not None and self._database.sampler(sampler) is None:
            raise Refused(404, f"there is no sampling session {sampler!r}")
        owner = sampler or "sample"
        request_id = f"{owner}:{uuid.uuid4().hex if number is None else number}"
        count = int(body.get("num_samples", 1))
        names = [f"{request_id}/{sample}" for sample in range(count)]
        return self._submit(request_id, owner, "sample", json.dumps(body).encode(), sample_sequence_ids=names)

    async def _run_sample(self, request: Request) -> bytes:
        body = json.loads(request.body or b"{}")
        session = self._database.sampler(request.owner)
        path = session[0] if session else body.get("model_path")
        checkpoint = None
        if path is not None:
            if (found := self._database.checkpoint(path)) is None:
                raise BadRequest(f"there is no checkpoint {path!r} any more")
            checkpoint = (path, found["created"])
        ids = read_prompt(body["prompt"], vocab_size=self._models.vocab_size)
        room = self._sampler.longest - len(ids)
        if not ids or room < 1:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; this server takes 1 to {self._sampler.longest - 1}; start it with "
                "a larger max_model_len for more"
            )
        targets = read_targets(body.get("target_prompt_logprobs"), len(ids), vocab_size=self._models.vocab_size)
        count = range(int(body.get("num_samples", 1)))
        params = [sampling_params(body["sampling_params"], number, longest=room) for number in count]
        outputs = await self._sampler.sample(checkpoint, request.id, ids, params)
        prompt_top, sample_top = body.get("topk_prompt_logprobs", 0), body.get("topk_sample_logprobs", 0)
        prompt, samples = None, []
        if (body.get("prompt_logprobs") or prompt_top or targets is not None) and len(ids) > 1:
            prompt = await self._score(checkpoint, ScoringRequest(ids=ids, top=prompt_top, targets=targets))
        if sample_top:
            whole = (ScoringRequest(ids=[*ids, *output.token_ids], top=sample_top) for output in outputs)
            samples = await asyncio.gather(*(self._score(checkpoint, one) for one in whole))
        return write_samples(body, len(ids), outputs, prompt, samples)

    async def _score(self, checkpoint: Checkpoint | None, context: ScoringRequest) -> ContextScores:
        """Score a context, together with all of the same checkpoint that wait for the training thread."""
        length = len(context.ids)
        if length > self._settings.pack_length:
            longest = self._settings.pack_length
            raise BadRequest(
                f"log-probs of {length} tokens are more than the {longest} that this server computes; start it with "
                f"pack_length={length} or more"
            )
        answer: asyncio.Future[ContextScores] = asyncio.get_running_loop().create_future()
        waiting = self._unscored.setdefault(checkpoint, [])
        waiting.append((context, answer))
        if len(waiting) == 1:
            task = asyncio.create_task(self._score_waiting(checkpoint))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        return await answer

    async def _score_waiting(self, checkpoint: Checkpoint | None) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._training, int)  # returns when the thread comes to it
        batch = self._unscored.pop(checkpoint)
        answers = [answer for _, answer in batch]
        try:
            work = [context for context, _ in batch]
            scored = await loop.run_in_executor(self._training, self._models.score, checkpoint, work)
        except Exception as error:
            for answer in answers:
                if not answer.done():  # cancelled
                    answer.set_exception(error)
            return
        for answer, scores in zip(answers, scored, strict=True):
            if not answer.done():
                answer.set_result(scores)

    # --- everything else ----------------------------------------------------------------------------------------

    async def _healthy(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _capabilities(self, http: web.Request) -> web.Response:
        model = {"model_name": self._name, "max_context_length": self._settings.max_model_len}
        return web.json_response({"supported_models": [model | {"trainable": True, "sampleable": True}]})

    async def _client_config(self, http: web.Request) -> web.Response:
        # Chunks of a batch come one after another; results are fetched one by one.
        return web.json_response({"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False})

    async def _dynamic_config(self, http: web.Request) -> web.Response:
        return web.json_response({"sample_cancel_enabled": True})

    async def _telemetry(self, http: web.Request) -> web.Response:
        return web.json_response({"status": "accepted"})


def _failure(message: str, category: str) -> bytes:
    return json.dumps({"error": message, "category": category}).encode()
