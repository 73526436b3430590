"""The endpoint's routes.

``/v1`` alone is stateless. ``/sessions/<id>/v1`` records; any client can set it as ``base_url``.

::

    GET    [/sessions/<id>]/v1/models
    POST   [/sessions/<id>]/v1/chat/completions
    POST   [/sessions/<id>]/v1/completions
    POST   [/sessions/<id>]/v1/responses              OpenAI's Responses API
    POST   [/sessions/<id>]/v1/messages               Anthropic's Messages API
    POST   [/sessions/<id>]/v1/messages/count_tokens
    POST   [/sessions/<id>]/v1beta/models/<model>:generateContent          Google's Gemini API
    POST   [/sessions/<id>]/v1beta/models/<model>:streamGenerateContent
    POST   [/sessions/<id>]/v1beta/models/<model>:countTokens
                                                      … and all three under /v1/models
    GET    /sessions             the sessions of the request's key
    GET    /sessions/<id>        what was recorded, ids and all
    DELETE /sessions/<id>        ends it
    GET    /health
    GET    /metrics              as Prometheus reads it

A session is named by the path, by the header ``X-Session-Id``, or, where it was handed out with a
key of its own, by that key. It belongs to the key of the request that opened it, which is the first
of its generations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jax_agent_rl.agents.endpoint.answers import ApiAnswer, ApiCall, ApiCount, as_api_error
from jax_agent_rl.agents.endpoint.dialects import DIALECTS, GOOGLE, dialect_of
from jax_agent_rl.agents.endpoint.requests import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    check_prompt,
    check_sampling,
    check_structure,
)
from jax_agent_rl.agents.endpoint.sessions import (
    Piece,
    Session,
    SessionStore,
    StoredResponses,
    choice_count,
    pieces,
    turns,
)
from jax_agent_rl.agents.session_tree import RecordedTurn, paths_to_train
from jax_agent_rl.chat.grammar_limits import in_grammar_thread
from jax_agent_rl.config import EndpointConfig
from jax_agent_rl.errors import EngineDiedError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.failures import FailureLog
from jax_agent_rl.utils.http_server import Handler, HttpServer, counted, read_json, sent_key
from jax_agent_rl.utils.prometheus import CONTENT_TYPE, RequestCounts, exposition_text, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PING_SECONDS = 15.0
"""Silence in a stream after which a comment is sent, so that no proxy takes the connection for
dead."""


class Endpoint:
    """The endpoint; it runs on the event loop of the engine's client.

    Args:
        model: the name under ``/v1/models``. Sessions take any name in ``model``, as agents have
            theirs written down.
        adapters: LoRA adapters of the engines, served as models of their names.
        host, port: where it listens, see :class:`HttpServer`.
        api_key: what every request must send, except for ``/health``; None asks for nothing.
        session_keys: every request must send the key of an open session instead.
        stateless: makes the session of one request outside sessions; None refuses such requests.
        able: reads what the engines can do; a request for more is refused.
        require_engine: raises ``EngineDiedError`` when no engine is left, for ``/health``.
        engines: reads what the engines did, for ``/metrics``; None: requests alone are counted
            there.
        failures: told of requests that are refused, as many a program keeps that to itself; None: a
            log of its own.

    Raises:
        ConfigError: an address that others can reach, without a key.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        model: str,
        adapters: Sequence[str] = (),
        limits: EndpointConfig,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        session_keys: bool = False,
        stateless: Callable[[], Session] | None = None,
        able: Callable[[], Iterable[Capabilities]] = tuple,
        require_engine: Callable[[], None] = lambda: None,
        engines: Callable[[], Awaitable[list[Metric]]] | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self._store = store
        self._model = model
        self._adapters = tuple(adapters)
        self._limits = limits
        self._stateless = stateless
        self._able = able
        self._require_engine = require_engine
        self._engines = engines
        self._failures = failures or FailureLog()
        self._running = 0
        self._requests = RequestCounts()
        routes = [web.get("/health", self._health), web.get("/metrics", self._metrics)]
        for prefix in ("", "/sessions/{session_id}"):
            routes += [
                web.get(f"{prefix}/v1/models", self._models),
            ]
            for dialect in DIALECTS:
                for path, read_generation in dialect.generations.items():
                    routes.append(web.post(prefix + path, self._generates(read_generation)))
                for path, read_count in dialect.counts.items():
                    routes.append(web.post(prefix + path, self._counts(read_count)))
        routes += [
            web.get("/sessions", self._list),
            web.get("/sessions/{session_id}", self._recorded),
            web.delete("/sessions/{session_id}", self._end),
        ]
        self.server = HttpServer(
            routes,
            refuse=self._refuse,
            host=host,
            port=port,
            token=api_key,
            admits=self._has_session if session_keys else None,
            key_of=_sent_key,
            token_key="--token-env",
            open_paths=("/health",),
            max_body_bytes=limits.max_body_bytes,
            body_key=f"agent.endpoint.max_body_bytes={limits.max_body_bytes}",
            middlewares=[counted(self._requests), self._answer_failures],
        )

    def _has_session(self, key: str) -> bool:
        return self._store.with_key(key) is not None

    @web.middleware
    async def _answer_failures(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return failures as answers in the shape of the request's API."""
        try:
            return await handler(request)
        except Exception as error:
            return self._error_response(request, as_api_error(error))

    def _refuse(self, request: web.Request, status: int, message: str) -> web.Response:
        """Return a refusal of the server itself."""
        code = {401: "invalid_api_key", 404: "unknown_url"}.get(status)
        return self._error_response(request, ApiError(status, message, code=code))

    def _error_response(self, request: web.Request, problem: ApiError) -> web.Response:
        """Return a failure as an answer, and report it."""
        kind = f"the endpoint refused a request ({problem.code or problem.status})"
        self._failures.report(
            kind, f"{kind}: {request.method} {request.path!r:.200}: {problem.status} {problem}"
        )
        body = dialect_of(request.path).failure(problem)
        retry = {"x-should-retry": "true" if problem.retry else "false"}
        return web.json_response(body, status=problem.status, headers=retry)

    async def _health(self, request: web.Request) -> web.Response:
        try:
            self._require_engine()
        except EngineDiedError as error:
            return web.json_response({"ok": False, "detail": str(error)}, status=503)
        return web.json_response({"ok": True})

    async def _metrics(self, request: web.Request) -> web.Response:
        metrics = [] if self._engines is None else await self._engines()
        server = gauges(
            {"server_sessions": len(self._store), "server_generations_running": self._running}
        )
        text = exposition_text([*metrics, *self._requests.families(), *server])
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.Response:
        self._known(request)
        common = {"object": "model", "created": 0, "owned_by": "jax_agent_rl"}
        models = [{"id": self._model, **common}]
        for adapter in self._adapters:
            models.append({"id": adapter, "parent": self._model, **common})
        return web.json_response({"object": "list", "data": models})

    def _generates(self, read: Callable[[ApiCall], ApiAnswer]) -> Handler:
        """Return the handler of an API's generations."""

        async def generate(request: web.Request) -> web.StreamResponse:
            session, answer, sampling = await self._read(request, read)
            if answer.model_request.stream:
                return await self._stream(request, session, answer, sampling)
            choices = await self._whole(session, answer, sampling)
            return web.json_response(answer.whole(session.recorder.context.codec, choices))

        return generate

    def _counts(self, read: Callable[[ApiCall], ApiCount]) -> Handler:
        """Return the handler that counts the ids of an API's prompts, without sampling."""

        async def count_tokens(request: web.Request) -> web.Response:
            session = self._known(request)
            counted_request = read(await _read_call(request))
            model_request = counted_request.model_request
            self._check_counts(model_request, recorded=_is_recorded(request, session))

            if session is None:
                session = self._unrecorded()
            recorder = session.recorder
            check_prompt(model_request, recorder.context)
            count = recorder.count_prompt(
                model_request.messages,
                tools=model_request.prompt_tools,
                template_kwargs=model_request.chat_template_kwargs,
                continue_last=model_request.continue_final_message,
            )
            return web.json_response(counted_request.answer(count))

        return count_tokens

    async def _list(self, request: web.Request) -> web.Response:
        sessions = []
        for session in self._store.visible_to(_sent_key(request)):
            turn_count = len(session.recorder.turns)
            sessions.append(
                {"session_id": session.session_id, "turns": turn_count, "running": session.requests}
            )
        return web.json_response({"sessions": sessions})

    async def _recorded(self, request: web.Request) -> web.Response:
        recorder = self._require_known(request).recorder
        sequences = []
        if recorder.turns:
            for path in paths_to_train(recorder.turns):
                sequences.append([_recorded_turn(turn) for turn in path])
        return web.json_response({"session_id": recorder.session_id, "sequences": sequences})

    async def _end(self, request: web.Request) -> web.Response:
        session = self._require_known(request)
        return web.json_response({"ended": self._store.end(session.session_id)})

    # --- what routes share ------------------------------------------------------------------------

    def _known(self, request: web.Request) -> Session | None:
        """Return the session a request names, after checking its key.

        None if it names no session, or one that it may open.
        """
        session_id = _session_id(request)
        key = _sent_key(request)
        if session_id is not None:
            return self._store.known(session_id, key)
        session = self._store.with_key(key)
        if session is None and self._stateless is None:
            raise _no_session()
        return session

    def _require_known(self, request: web.Request) -> Session:
        """Return the session a request names, without opening one."""
        session = self._known(request)
        if session is None:
            name = _session_id(request)
            raise ApiError(
                404, f"there is no session {name!r}; it may be over", code="session_not_found"
            )
        return session

    async def _read(
        self, request: web.Request, read: Callable[[ApiCall], ApiAnswer]
    ) -> tuple[Session, ApiAnswer, SamplingParams]:
        """Return the request's session, what it asks for and how to sample it.

        A session is opened only if the request is valid.

        Raises:
            ApiError, ValidationError, Refused: too large, no JSON, or wrong.
        """
        call = await _read_call(request)
        session = self._known(request)
        recorded = _is_recorded(request, session)

        # A response can be continued only in the session that recorded it.
        responses: StoredResponses | None = None
        if session is not None:
            responses = session.responses
        elif recorded:
            responses = {}
        answer = read(replace(call, stored=responses))
        model_request = answer.model_request
        self._check_counts(model_request, recorded=recorded)

        opened = session or self._open(request)
        if responses is not None:
            opened.responses = responses
        try:
            check_prompt(model_request, opened.recorder.context)
            if check_structure(model_request, self._able()):
                sampling = await in_grammar_thread(lambda: opened.sampling_for(model_request))
            else:
                sampling = opened.sampling_for(model_request)
            check_sampling(sampling, self._able())
            if self._store.full(opened, self._limits.max_session_tokens):
                limit = f"agent.endpoint.max_session_tokens={self._limits.max_session_tokens}"
                raise ApiError(
                    400, f"the session is full ({limit} ids); open another", code="session_full"
                )
        except ApiError:
            self._store.used(opened)
            raise
        return opened, answer, sampling

    def _open(self, request: web.Request) -> Session:
        session_id = _session_id(request)
        if session_id is not None:
            return self._store.open(session_id, _sent_key(request))
        return self._unrecorded()

    def _unrecorded(self) -> Session:
        """Return a session of one request, which the store does not hold."""
        if self._stateless is None:
            raise _no_session()
        return self._stateless()

    def _check_counts(
        self, model_request: ChatRequest | CompletionRequest, *, recorded: bool
    ) -> None:
        """Refuse too many choices, and outside sessions, a model that is not served."""
        choices = choice_count(model_request)
        limit = self._limits.max_choices
        if choices > limit:
            raise ApiError(
                400, f"{choices} choices: at most agent.endpoint.max_choices={limit}", param="n"
            )

        models = (self._model, *self._adapters)
        if not recorded and model_request.model not in models:
            listed = ", ".join(map(repr, models))
            message = f"the model {model_request.model!r} does not exist; this server has {listed}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _adapter(self, model_request: ChatRequest | CompletionRequest) -> str | None:
        """Return the LoRA adapter that a request names as its model."""
        return model_request.model if model_request.model in self._adapters else None

    @contextmanager
    def _slot(self, session: Session) -> Iterator[None]:
        """Hold a place among the running requests."""
        limit = self._limits.max_concurrent_requests
        session.requests += 1
        self._running += 1
        try:
            if self._running > limit:
                raise ApiError(
                    429,
                    f"{limit} requests are running, the maximum; try again",
                    code="busy",
                    retry=True,
                )
            yield
        finally:
            self._running -= 1
            session.requests -= 1
            self._store.used(session)

    async def _whole(
        self, session: Session, answer: ApiAnswer, sampling: SamplingParams
    ) -> list[Piece]:
        """Return all choices; end after ``request_timeout``, or when the client disconnects."""
        with self._slot(session):
            try:
                async with asyncio.timeout(self._limits.request_timeout):
                    return await turns(
                        session,
                        answer.model_request,
                        sampling,
                        adapter=self._adapter(answer.model_request),
                    )
            except TimeoutError:
                raise self._too_slow() from None

    async def _stream(
        self, request: web.Request, session: Session, answer: ApiAnswer, sampling: SamplingParams
    ) -> web.StreamResponse:
        """Answer with server-sent events.

        A failure before the first event is an answer with its own status.
        """
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        async with aclosing(self._events(session, answer, sampling)) as events:
            first_event = await anext(events)
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(first_event.encode())
            async for event in events:
                await response.write(event.encode())
        await response.write_eof()
        return response

    async def _events(
        self, session: Session, answer: ApiAnswer, sampling: SamplingParams
    ) -> AsyncGenerator[str, None]:
        """Yield the events of an answer, with pings in its pauses."""
        model_request = answer.model_request
        codec = session.recorder.context.codec
        deadline = asyncio.get_running_loop().time() + self._limits.request_timeout
        choices: list[Piece] = []
        # Until something is sent, a failure can still be an answer with its own status.
        silent = True
        with self._slot(session):
            try:
                async with aclosing(
                    pieces(session, model_request, sampling, adapter=self._adapter(model_request))
                ) as stream:
                    async for piece in _with_pings(stream, deadline):
                        if piece is None:
                            if answer.ping:
                                silent = False
                                yield answer.ping
                            continue
                        if piece.turn is not None:
                            choices.append(piece)
                        for event in answer.chunks(codec, piece):
                            silent = False
                            yield answer.encode(event)
                for event in answer.closing(codec, choices):
                    silent = False
                    yield answer.encode(event)
                if answer.end_of_stream:
                    yield answer.end_of_stream
            except Exception as error:
                problem = (
                    self._too_slow() if isinstance(error, TimeoutError) else as_api_error(error)
                )
                if silent:
                    raise problem from None
                yield answer.encode(answer.failure(problem))

    def _too_slow(self) -> ApiError:
        seconds = self._limits.request_timeout
        message = f"the request took longer than agent.endpoint.request_timeout={seconds:g} seconds"
        return ApiError(504, message, code="timeout")


def _recorded_turn(turn: RecordedTurn) -> dict[str, Any]:
    output = turn.output
    return {
        "inserted_ids": turn.inserted_ids,
        "token_ids": output.token_ids,
        "log_probs": output.log_probs,
        "policy_versions": output.policy_versions,
        "loss_mask": output.loss_mask,
        "note": turn.note,
    }


def _session_id(request: web.Request) -> str | None:
    return request.match_info.get("session_id") or request.headers.get("X-Session-Id")


def _sent_key(request: web.Request) -> str:
    """Return a request's key, which Google's API also takes in the address."""
    key = sent_key(request)
    if not key and dialect_of(request.path) is GOOGLE:
        return request.query.get("key", "")
    return key


def _is_recorded(request: web.Request, session: Session | None) -> bool:
    """Return whether a request belongs to a session, or opens one."""
    return session is not None or _session_id(request) is not None


def _no_session() -> ApiError:
    return ApiError(
        404, "requests need a session: use the base_url that was handed out", code="no_session"
    )


async def _read_call(request: web.Request) -> ApiCall:
    """Read a request's body."""
    body = await read_json(request)
    return ApiCall(body=body, model=request.match_info.get("model", ""), query=request.query)


async def _with_pings(
    stream: AsyncGenerator[Piece, None], deadline: float
) -> AsyncGenerator[Piece | None, None]:
    """Yield the stream's pieces, and None in every pause; raise TimeoutError after the deadline."""
    loop = asyncio.get_running_loop()
    step: asyncio.Future | None = None
    try:
        while True:
            if step is None:
                step = asyncio.ensure_future(anext(stream))  # pyright: ignore[reportArgumentType]
            seconds_left = max(0.0, deadline - loop.time())
            await asyncio.wait({step}, timeout=min(PING_SECONDS, seconds_left))
            if step.done():
                yield step.result()
                step = None
            elif loop.time() >= deadline:
                raise TimeoutError
            else:
                yield None
    except StopAsyncIteration:
        return
    finally:
        if step is not None:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
