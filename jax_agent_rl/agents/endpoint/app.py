"""The routes. ``/v1`` alone is stateless; ``/sessions/<id>/v1`` records, and any client can set it as ``base_url``.

::

    GET    [/sessions/<id>]/v1/models
    POST   [/sessions/<id>]/v1/chat/completions
    POST   [/sessions/<id>]/v1/completions
    GET    /sessions             those of the request's key
    GET    /sessions/<id>        what was recorded, ids and all
    DELETE /sessions/<id>        ends it
    GET    /health
    GET    /metrics              as Prometheus reads it

A session belongs to the key of the request that opened it, which is the first of its generations.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from jax_agent_rl.agents.endpoint import wire
from jax_agent_rl.agents.endpoint.failures import ApiError, from_failure, from_validation, refuse
from jax_agent_rl.agents.endpoint.sessions import Piece, Session, SessionStore, pieces, turns
from jax_agent_rl.agents.endpoint.wire import check_prompt, check_sampling
from jax_agent_rl.agents.session_tree import paths_to_train
from jax_agent_rl.config import EndpointConfig
from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.rollout.protocol import Capabilities
from jax_agent_rl.utils.http_server import Handler, HttpServer, counted, read_json
from jax_agent_rl.utils.prometheus import CONTENT_TYPE, RequestCounts, gauges, text_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)
T = TypeVar("T")
PING_SECONDS = 15.0
"""Silence in a stream after which a comment is sent, so that nothing between takes it for dead."""


class Endpoint:
    """The endpoint on one event loop, that of the engine's client.

    Args:
        store: the sessions.
        model: the name under ``/v1/models``. Sessions take any name in ``model``, as agents have theirs written down.
        adapters: LoRA adapters of the engines, served as models of their names.
        limits: sizes, seconds and counts.
        host, port: where it listens, see :class:`HttpServer`.
        api_key: what every request must send, but for ``/health``; None asks for nothing.
        stateless: makes the session of one request outside sessions; None refuses them.
        able: reads what the engines can do; a request for more is refused.
        engines: reads what the engines did, for ``/metrics``; None: requests alone are counted there.

    Attributes:
        server: listens and serves.

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
        stateless: Callable[[], Session] | None = None,
        able: Callable[[], Iterable[Capabilities]] = tuple,
        engines: Callable[[], Awaitable[list[Metric]]] | None = None,
    ) -> None:
        self._store = store
        self._model, self._adapters = model, tuple(adapters)
        self._limits = limits
        self._stateless = stateless
        self._able = able
        self._engines = engines
        self._running = 0
        self._requests = RequestCounts()
        routes = [web.get("/health", self._health), web.get("/metrics", self._metrics)]
        for prefix in ("", "/sessions/{session_id}"):
            routes += [
                web.get(f"{prefix}/v1/models", self._models),
                web.post(f"{prefix}/v1/chat/completions", self._chat),
                web.post(f"{prefix}/v1/completions", self._completions),
            ]
        routes += [
            web.get("/sessions", self._list),
            web.get("/sessions/{session_id}", self._recorded),
            web.delete("/sessions/{session_id}", self._end),
        ]
        self.server = HttpServer(
            routes,
            refuse=refuse,
            host=host,
            port=port,
            token=api_key,
            token_key="--token-env",
            open_paths=("/health",),
            max_body_bytes=limits.max_body_bytes,
            body_key=f"agent.endpoint.max_body_bytes={limits.max_body_bytes}",
            around=[counted(self._requests), _failures],
        )

    # --- routes -----------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _metrics(self, request: web.Request) -> web.Response:
        engines = await self._engines() if self._engines else []
        standing = gauges({"server_sessions": len(self._store), "server_generations_running": self._running})
        text = text_of([*engines, *self._requests.families(), *standing])
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.Response:
        self._known(request)
        same = {"object": "model", "created": 0, "owned_by": "jax_agent_rl"}
        models = [{"id": self._model, **same}, *({"id": a, "parent": self._model, **same} for a in self._adapters)]
        return web.json_response({"object": "list", "data": models})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, asked = await self._read(request, wire.ChatRequest)
        head = wire.head("chat.completion", f"chatcmpl-{uuid.uuid4().hex}", self._adapter(asked) or self._model)
        if asked.stream:
            return await self._stream(request, session, asked, head | {"object": "chat.completion.chunk"})
        codec = session.recorder.context.codec
        whole = await self._whole(session, asked)
        choices = [wire.chat_choice(codec, p.index, p.turn, asked) for p in whole if p.turn]
        return web.json_response(head | {"choices": choices, "usage": _usage(whole, asked)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, asked = await self._read(request, wire.CompletionRequest)
        head = wire.head("text_completion", f"cmpl-{uuid.uuid4().hex}", self._adapter(asked) or self._model)
        if asked.stream:
            return await self._stream(request, session, asked, head)
        codec = session.recorder.context.codec
        whole = await self._whole(session, asked)
        choices = [wire.text_choice(codec, p.index, p.text, p.turn, asked) for p in whole]
        return web.json_response(head | {"choices": choices, "usage": _usage(whole, asked)})

    async def _list(self, request: web.Request) -> web.Response:
        listed = [
            {"session_id": session.session_id, "turns": len(session.recorder.turns), "running": session.requests}
            for session in self._store.visible_to(_key_of(request))
        ]
        return web.json_response({"sessions": listed})

    async def _recorded(self, request: web.Request) -> web.Response:
        recorder = self._found(request).recorder
        paths = paths_to_train(recorder.turns) if recorder.turns else []
        sequences = [
            [
                {
                    "inserted_ids": t.inserted_ids,
                    "token_ids": t.output.token_ids,
                    "log_probs": t.output.log_probs,
                    "policy_versions": t.output.policy_versions,
                }
                for t in path
            ]
            for path in paths
        ]
        return web.json_response({"session_id": recorder.session_id, "sequences": sequences})

    async def _end(self, request: web.Request) -> web.Response:
        return web.json_response({"ended": self._store.end(self._found(request).session_id)})

    # --- what routes share ------------------------------------------------------------------------------------

    def _known(self, request: web.Request) -> Session | None:
        """Return the session a request names, after checking its key; None if it names none or one it may open."""
        session_id = request.match_info.get("session_id")
        if session_id is not None:
            return self._store.known(session_id, _key_of(request))
        if self._stateless is None:
            raise ApiError(404, "requests need a session: use the base_url that was handed out", code="no_session")
        return None

    def _found(self, request: web.Request) -> Session:
        """Return the session a request names, without opening one."""
        if (session := self._known(request)) is None:
            name = request.match_info["session_id"]
            raise ApiError(404, f"there is no session {name!r}; it may be over", code="session_not_found")
        return session

    async def _read(self, request: web.Request, kind: type[T]) -> tuple[Session, T]:
        """Return the request's session and body; open a session only for a valid request.

        Raises:
            ApiError, ValidationError, Refused: too large, no JSON, or wrong.
        """
        session = self._known(request)
        asked = kind.model_validate(await read_json(request))  # pyright: ignore[reportAttributeAccessIssue]
        self._check_counts(request, asked)
        opened = session or self._open(request)
        try:
            check_prompt(asked, opened.recorder.context)
            check_sampling(opened.sampling_for(asked), self._able())
            if self._store.full(opened, self._limits.max_session_tokens):
                limit = f"agent.endpoint.max_session_tokens={self._limits.max_session_tokens}"
                raise ApiError(400, f"the session is full ({limit} ids); open another", code="session_full")
        except ApiError:
            self._store.used(opened)
            raise
        return opened, asked

    def _open(self, request: web.Request) -> Session:
        session_id = request.match_info.get("session_id")
        if session_id is not None:
            return self._store.open(session_id, _key_of(request))
        assert self._stateless is not None  # by _known
        return self._stateless()

    def _check_counts(self, request: web.Request, asked: wire.ChatRequest | wire.CompletionRequest) -> None:
        choices = (asked.n or 1) * (len(asked.prompts) if isinstance(asked, wire.CompletionRequest) else 1)
        if choices > self._limits.max_choices:
            limit = self._limits.max_choices
            raise ApiError(400, f"{choices} choices: at most agent.endpoint.max_choices={limit}", param="n")
        served = (self._model, *self._adapters)
        if "session_id" not in request.match_info and asked.model not in served:
            message = f"the model {asked.model!r} does not exist; this server has {', '.join(map(repr, served))}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def _adapter(self, asked: wire.ChatRequest | wire.CompletionRequest) -> str | None:
        """Return the LoRA adapter that a request names as its model."""
        return asked.model if asked.model in self._adapters else None

    @contextmanager
    def _slot(self, session: Session) -> Iterator[None]:
        """Hold a place among the running requests."""
        limit = self._limits.max_concurrent_requests
        session.requests += 1
        self._running += 1
        try:
            if self._running > limit:
                raise ApiError(429, f"{limit} requests are running, the maximum; try again", code="busy", retry=True)
            yield
        finally:
            self._running -= 1
            session.requests -= 1
            self._store.used(session)

    async def _whole(self, session: Session, asked: wire.ChatRequest | wire.CompletionRequest) -> list[Piece]:
        """Return all choices; end after ``request_timeout``, or when the client disconnects."""
        with self._slot(session):
            try:
                async with asyncio.timeout(self._limits.request_timeout):
                    return await turns(session, asked, adapter=self._adapter(asked))
            except TimeoutError:
                raise self._too_slow() from None

    async def _stream(
        self,
        request: web.Request,
        session: Session,
        asked: wire.ChatRequest | wire.CompletionRequest,
        head: dict[str, Any],
    ) -> web.StreamResponse:
        """Answer with server-sent events. A failure before the first one is an answer with its own status."""
        async with aclosing(self._events(session, asked, head)) as events:
            first = await anext(events)
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            )
            await response.prepare(request)
            await response.write(first.encode())
            async for event in events:
                await response.write(event.encode())
        await response.write_eof()
        return response

    async def _events(
        self, session: Session, asked: wire.ChatRequest | wire.CompletionRequest, head: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        deadline = asyncio.get_running_loop().time() + self._limits.request_timeout
        started: set[int] = set()
        whole: list[Piece] = []
        codec = session.recorder.context.codec
        silent = True  # until something is sent, a failure can still be an answer with its own status
        with self._slot(session):
            try:
                async with aclosing(pieces(session, asked, adapter=self._adapter(asked))) as stream:
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
            except Exception as error:
                problem = self._too_slow() if isinstance(error, TimeoutError) else as_api_error(error)
                if silent:
                    raise problem from None
                yield _event(problem.body)

    def _too_slow(self) -> ApiError:
        seconds = self._limits.request_timeout
        message = f"the request took longer than agent.endpoint.request_timeout={seconds:g} seconds"
        return ApiError(504, message, code="timeout")


@web.middleware
async def _failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return failures as answers in OpenAI's shape."""
    try:
        return await handler(request)
    except Exception as error:
        return as_api_error(error).response()


def as_api_error(error: Exception) -> ApiError:
    """Convert a failure for the client; log unexpected ones."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return from_validation(error)
        case JaxAgentRLError():
            return from_failure(error)
        case RecursionError():
            return ApiError(400, "the request is nested too deep (arguments of a tool call?); send a flatter one")
        case UnicodeEncodeError():
            return ApiError(400, f"the request holds a lone surrogate, which is not text: {error.reason}")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _key_of(request: web.Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


async def _with_pings(stream: AsyncGenerator[Piece, None], deadline: float) -> AsyncGenerator[Piece | None, None]:
    """Yield the stream's pieces, and None in every pause; raise TimeoutError after the deadline."""
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
    """Return the chunks' choices for one piece; a chat choice opens with its role."""
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
