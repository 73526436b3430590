"""The routes. ``/v1`` alone is stateless; ``/sessions/<id>/v1`` records, and any client can set it as ``base_url``.

::

    GET    [/sessions/<id>]/v1/models
    POST   [/sessions/<id>]/v1/chat/completions
    POST   [/sessions/<id>]/v1/completions
    GET    /sessions/<id>        what was recorded, ids and all
    DELETE /sessions/<id>        ends it
    GET    /health
    GET    /metrics              as Prometheus reads it
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jax_agent_rl.agents.branches import paths_to_train
from jax_agent_rl.agents.endpoint import wire
from jax_agent_rl.agents.endpoint.failures import ApiError, from_failure, from_validation
from jax_agent_rl.agents.endpoint.sessions import Session, SessionStore
from jax_agent_rl.agents.endpoint.work import Piece, pieces, turns
from jax_agent_rl.config import EndpointConfig
from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.observe.prometheus import CONTENT_TYPE, RequestCounts, gauges, text_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)
T = TypeVar("T")
PING_SECONDS = 15.0
"""Silence in a stream after which a comment is sent, so that nothing between takes it for dead."""


class Endpoint:
    """The application's state. One event loop, that of the engine's client.

    Args:
        store: the sessions.
        model: the name under ``/v1/models``. Sessions take any name in ``model``, as agents have theirs written down.
        limits: sizes, seconds and counts.
        api_key: what requests outside sessions must send; None asks for nothing.
        stateless: makes the session of one request outside sessions; None refuses them.
        engines: reads what the engines did, for ``/metrics``; None: requests alone are counted there.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        model: str,
        limits: EndpointConfig,
        api_key: str | None = None,
        stateless: Callable[[], Session] | None = None,
        engines: Callable[[], Awaitable[list[Metric]]] | None = None,
    ) -> None:
        self._store = store
        self._model = model
        self._limits = limits
        self._api_key = api_key
        self._stateless = stateless
        self._engines = engines
        self._running = 0
        self._requests = RequestCounts()

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [self._route("/health", self._health), self._route("/metrics", self._metrics)]
        for prefix in ("", "/sessions/{session_id}"):
            routes += [
                self._route(f"{prefix}/v1/models", self._models),
                self._route(f"{prefix}/v1/chat/completions", self._chat, "POST"),
                self._route(f"{prefix}/v1/completions", self._completions, "POST"),
            ]
        routes += [
            self._route("/sessions/{session_id}", self._recorded),
            self._route("/sessions/{session_id}", self._end, "DELETE"),
        ]
        errors = {404: self._unknown, 405: self._unknown}
        return Starlette(routes=routes, exception_handlers=errors)

    # --- routes -----------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"ok": True, "sessions": len(self._store), "running": self._running})

    async def _metrics(self, request: Request) -> Response:
        if self._api_key is not None:
            _check_key(self._api_key, _key_of(request))
        engines = await self._engines() if self._engines else []
        standing = gauges({"server_sessions": len(self._store), "server_generations_running": self._running})
        return Response(text_of([*engines, *self._requests.families(), *standing]), media_type=CONTENT_TYPE)

    async def _models(self, request: Request) -> Response:
        self._session(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "jax_agent_rl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        session = self._session(request)
        asked = await self._read(request, wire.ChatRequest)
        head = wire.head("chat.completion", f"chatcmpl-{uuid.uuid4().hex}", self._model)
        if asked.stream:
            return await self._stream(request, session, asked, head | {"object": "chat.completion.chunk"})
        codec = session.recorder.context.codec
        whole = await self._whole(request, session, asked)
        choices = [wire.chat_choice(codec, p.index, p.turn, asked) for p in whole if p.turn]
        return JSONResponse(head | {"choices": choices, "usage": _usage(whole, asked)})

    async def _completions(self, request: Request) -> Response:
        session = self._session(request)
        asked = await self._read(request, wire.CompletionRequest)
        head = wire.head("text_completion", f"cmpl-{uuid.uuid4().hex}", self._model)
        if asked.stream:
            return await self._stream(request, session, asked, head)
        codec = session.recorder.context.codec
        whole = await self._whole(request, session, asked)
        choices = [wire.text_choice(codec, p.index, p.text, p.turn, asked) for p in whole]
        return JSONResponse(head | {"choices": choices, "usage": _usage(whole, asked)})

    async def _recorded(self, request: Request) -> Response:
        recorder = self._session(request).recorder
        paths = paths_to_train(recorder.turns) if recorder.turns else []
        sequences = [
            [
                {"inserted_ids": t.inserted_ids, "token_ids": t.output.token_ids, "log_probs": t.output.log_probs}
                for t in path
            ]
            for path in paths
        ]
        return JSONResponse({"session_id": recorder.session_id, "sequences": sequences})

    async def _end(self, request: Request) -> Response:
        return JSONResponse({"ended": self._store.end(self._session(request).session_id)})

    async def _unknown(self, request: Request, _: Exception) -> Response:
        self._requests.count("unknown", 404)
        return ApiError(404, f"there is no {request.method} {request.url.path}", code="unknown_url").response()

    # --- what routes share ------------------------------------------------------------------------------------

    def _route(self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str = "GET") -> Route:
        """A route whose requests are counted."""
        answer = self._answer(handler)

        async def counted(request: Request) -> Response:
            with self._requests.request(path) as status:
                response = await answer(request)
                status.append(response.status_code)
                return response

        return Route(path, counted, methods=[method])

    def _answer(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The handler with its failures as answers."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return error.response()
            except ValidationError as error:
                return from_validation(error).response()
            except JaxAgentRLError as error:
                return from_failure(error).response()
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error").response()

        return answer

    def _session(self, request: Request) -> Session:
        """The session of a request, its key checked."""
        given = _key_of(request)
        session_id = request.path_params.get("session_id")
        if session_id is not None:
            if self._api_key is not None and self._stateless is not None:
                _check_key(self._api_key, given)  # before a session is opened for a stranger
            session = self._store.find(session_id)
        elif self._stateless is not None:
            session = self._stateless()
        else:
            raise ApiError(404, "requests need a session: use the base_url that was handed out", code="no_session")
        session.check_key(given)
        return session

    async def _read(self, request: Request, kind: type[T]) -> T:
        """The request's body, within its limit.

        Raises:
            ApiError, ValidationError: too large, no JSON, or wrong.
        """
        limit = self._limits.max_body_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"the body has more than agent.endpoint.max_body_bytes={limit} bytes")
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from None
        asked = kind.model_validate(content)  # pyright: ignore[reportAttributeAccessIssue]
        self._check(request, asked)
        return asked

    def _check(self, request: Request, asked: wire.ChatRequest | wire.CompletionRequest) -> None:
        choices = (asked.n or 1) * (len(asked.prompts) if isinstance(asked, wire.CompletionRequest) else 1)
        if choices > self._limits.max_choices:
            most = self._limits.max_choices
            raise ApiError(400, f"{choices} choices: at most agent.endpoint.max_choices={most}", param="n")
        if "session_id" not in request.path_params and asked.model != self._model:
            message = f"the model {asked.model!r} does not exist; this server has {self._model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    @contextmanager
    def _slot(self):
        """A place among the requests that run."""
        most = self._limits.max_concurrent_requests
        if self._running >= most:
            raise ApiError(429, f"{most} requests are running, the most; try again", code="busy", retry=True)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _whole(
        self, request: Request, session: Session, asked: wire.ChatRequest | wire.CompletionRequest
    ) -> list[Piece]:
        """All choices; ends with the client's connection or after ``request_timeout``."""
        with self._slot():
            try:
                async with asyncio.timeout(self._limits.request_timeout):
                    return await _while_connected(request, turns(session, asked))
            except TimeoutError:
                raise self._too_slow() from None

    async def _stream(
        self, request: Request, session: Session, asked: wire.ChatRequest | wire.CompletionRequest, head: dict[str, Any]
    ) -> Response:
        """Server-sent events. What fails before the first one is an answer with its own status."""
        events = self._events(session, asked, head)
        try:
            first = await _while_connected(request, anext(events))
        except BaseException:
            await events.aclose()
            raise

        async def body() -> AsyncGenerator[str, None]:
            async with aclosing(events):
                yield first
                async for event in events:
                    yield event

        return StreamingResponse(body(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def _events(
        self, session: Session, asked: wire.ChatRequest | wire.CompletionRequest, head: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        deadline = asyncio.get_running_loop().time() + self._limits.request_timeout
        started: set[int] = set()
        whole: list[Piece] = []
        codec = session.recorder.context.codec
        silent = True  # until something is sent, a failure can still be an answer with its own status
        with self._slot():
            try:
                async with aclosing(pieces(session, asked)) as stream:
                    async for piece in _with_pings(stream, deadline):
                        silent = False
                        if piece is None:
                            yield ": ping\n\n"
                            continue
                        if piece.turn is not None:
                            whole.append(piece)
                        for choice in _chunk(codec, piece, asked, started):
                            yield _event(head | {"choices": [choice]})
                if asked.wants_usage:
                    yield _event(head | {"choices": [], "usage": _usage(whole, asked)})
                yield "data: [DONE]\n\n"
            except (ApiError, JaxAgentRLError, TimeoutError) as error:
                if silent:
                    raise self._too_slow() if isinstance(error, TimeoutError) else error from None
                problem = error if isinstance(error, ApiError) else None
                problem = problem or (from_failure(error) if isinstance(error, JaxAgentRLError) else self._too_slow())
                yield _event(problem.body)

    def _too_slow(self) -> ApiError:
        seconds = self._limits.request_timeout
        message = f"the request took longer than agent.endpoint.request_timeout={seconds:g} seconds"
        return ApiError(504, message, code="timeout")


def _key_of(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


def _check_key(wanted: str, given: str) -> None:
    if not hmac.compare_digest(wanted.encode(), given.encode()):
        raise ApiError(401, "the API key is wrong", code="invalid_api_key")


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Awaits work, which is cancelled when the client hangs up.

    Raises:
        ClientDisconnect: it did.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client hangs up; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _with_pings(stream: AsyncGenerator[Piece, None], deadline: float) -> AsyncGenerator[Piece | None, None]:
    """The stream's pieces, and None for every while of silence; TimeoutError after the deadline."""
    loop = asyncio.get_running_loop()
    step: asyncio.Future | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(anext(stream))  # pyright: ignore[reportArgumentType]
            await asyncio.wait({step}, timeout=min(PING_SECONDS, max(0.0, deadline - loop.time())))
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


def _chunk(codec: Any, piece: Piece, asked: wire.ChatRequest | wire.CompletionRequest, started: set[int]) -> list[dict]:
    """The chunks' choices for one piece; a chat choice opens with its role."""
    opened = piece.index in started
    started.add(piece.index)
    if isinstance(asked, wire.CompletionRequest):
        return [wire.text_choice(codec, piece.index, piece.text, piece.turn, asked)]
    opening = [] if opened else [wire.chat_delta(piece.index, {"role": "assistant", "content": ""})]
    if piece.turn is not None:
        return [*opening, wire.last_chat_delta(codec, piece.index, piece.turn, piece.text, asked)]
    return [*opening, wire.chat_delta(piece.index, {"content": piece.text})]


def _usage(whole: list[Piece], asked: wire.ChatRequest | wire.CompletionRequest) -> dict[str, Any]:
    prompts = len(asked.prompts) if isinstance(asked, wire.CompletionRequest) else 1
    ordered = sorted(whole, key=lambda piece: piece.index)
    return wire.usage([piece.turn for piece in ordered if piece.turn], prompts)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
