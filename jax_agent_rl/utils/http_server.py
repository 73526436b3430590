"""HTTP server of all services of this package: access control, limits, and prompt shutdown.

::

    connection ─► too many? ─► head in time? ─► guard ────────────────────────► handler ─► read_json
                  closed       closed           403 another Host or Origin                 400, 413,
                                                401 no token                               408
                                                415 content type or encoding

Pages in a local browser are untrusted: they may reach a server under a name that resolves here (DNS
rebinding, seen by ``Host``) or send it requests (CSRF, seen by ``Origin``, ``Sec-Fetch-Site`` and
the content type). The guard runs before every route, even one that does not exist.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ValidationError

from jax_agent_rl.utils.bounded_json import TooDeepError, decode_json
from jax_agent_rl.utils.network import listen_on, names_this_machine, require_token
from jax_agent_rl.utils.wrong_values import describe_problems

if TYPE_CHECKING:
    from jax_agent_rl.utils.prometheus import RequestCounts

MAX_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 256
"""File descriptors left for everything but connections."""
HEAD_TIMEOUT_SECONDS = 10.0
"""Time limit of a new connection for the head of its first request."""
BODY_TIMEOUT_SECONDS = 60.0
"""Time limit of a JSON body."""
_UNUSED_SECONDS = 75.0
"""How long an unused connection stays open; longer than clients keep theirs."""
SHUTDOWN_TIMEOUT_SECONDS = 1.0
"""Time for running requests at shutdown."""

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[web.Request, int, str], web.Response]
"""Converts a status and a message to the service's error format."""
CONTENT_TYPES = {"POST": "application/json", "PUT": "application/octet-stream"}
"""Content types that a page of another origin cannot send without a preflight."""


class _WithoutClientsMistakes(logging.Filter):
    """Leaves out what is not HTTP: it is answered with 400, and any client could fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_protocol_logger = logging.getLogger(f"{__name__}.protocol")
_protocol_logger.addFilter(_WithoutClientsMistakes())


class Refused(Exception):
    """Refusal of a request: a status and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class HttpServer:
    """Server of routes in the running event loop, from :meth:`start` to :meth:`close`.

    Args:
        refuse: converts a refusal to the service's error format.
        host: address to listen on; anything but loopback needs a token.
        port: 0 takes a free one.
        token: token that requests must send, or None.
        admits: in place of one token: decides whether a request with this key has access.
        key_of: returns the key or token of a request; None is :func:`sent_key`.
        token_key: setting that names the token's variable, for messages.
        open_paths: paths that need no token.
        max_body_bytes: limit of a JSON body.
        body_key: setting of that limit, for messages.
        body_types: content types that bodies of POST may have besides JSON; such as a page of
            another origin cannot send without a preflight.
        middlewares: they see every request, also the refused ones.
        max_connections: maximum open connections; further ones are closed. The process's limit may
            lower it.
        head_seconds: time limit of a new connection for the head of its first request.

    Raises:
        ConfigError: the address is reachable from other machines, without a token.
    """

    routes: Iterable[web.RouteDef]
    _: KW_ONLY
    refuse: Refuse
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    admits: Callable[[str], bool] | None = None
    key_of: Callable[[web.Request], str] | None = None
    token_key: str
    open_paths: Sequence[str] = ()
    max_body_bytes: int
    body_key: str
    body_types: Sequence[str] = ()
    middlewares: Sequence[Any] = ()
    max_connections: int = MAX_CONNECTIONS
    head_seconds: float = HEAD_TIMEOUT_SECONDS
    _socket: socket.socket | None = field(default=None, init=False)
    _runner: web.AppRunner | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.admits is None:
            require_token(self.host, self.token, key=self.token_key)
        self.app = web.Application(
            client_max_size=self.max_body_bytes,
            middlewares=[*self.middlewares, self._guard],
        )
        self.app.add_routes(self.routes)

    @property
    def url(self) -> str:
        """URL of the server; for a wildcard address, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Bind the address; clients that connect wait until :meth:`start`.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        if self._socket is not None:
            return
        self._socket = listen_on(self.host, self.port)
        self.port = self._socket.getsockname()[1]

    async def start(self) -> None:
        """Start serving.

        Raises:
            ConfigError: as :meth:`listen`.
        """
        self.listen()
        assert self._socket is not None
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            keepalive_timeout=_UNUSED_SECONDS,
            shutdown_timeout=SHUTDOWN_TIMEOUT_SECONDS,
            access_log=None,
            logger=_protocol_logger,
            auto_decompress=False,  # compressed bodies are refused: their size is not bounded
        )
        await self._runner.setup()
        site = _Site(self._runner, self._socket, self.max_connections, self.head_seconds)
        await site.start()

    async def close(self) -> None:
        """Stop listening and end running requests; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._socket is not None:
            self._socket.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check(request)
            return await handler(request)
        except Refused as refused:
            response = self.refuse(request, refused.status, str(refused))
            if refused.status in (401, 403):
                response.force_close()  # an unauthorized client keeps no connection
            return response
        except web.HTTPRequestEntityTooLarge:
            message = f"{request.method} {request.path}: the request is larger than {self.body_key}"
            return self.refuse(request, 413, message)
        except web.HTTPException as error:  # no such path, no such method, …
            message = f"{request.method} {request.path}: {error.reason}"
            return self.refuse(request, error.status, message)
        except ConnectionResetError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            return web.Response(status=499)  # for the counts: the client is gone

    def _check(self, request: web.Request) -> None:
        """Raise Refused unless the client has access, and sends what can be read."""
        self._check_origin(request)
        if request.path not in self.open_paths:
            read_key = self.key_of or sent_key
            key = read_key(request)
            if self.token is not None:
                _check_token(key, self.token)
            elif self.admits is not None and not self.admits(key):
                raise Refused(401, "the key is missing, or of no session that is open")
        self._check_content(request)

    def _check_origin(self, request: web.Request) -> None:
        """Refuse requests of pages in a browser that are not this server's."""
        hosts = request.headers.getall("Host", [])
        host = hosts[0] if len(hosts) == 1 else ""
        is_open = self.token is None and self.admits is None
        if is_open and not names_this_machine(host, listening_on=self.host):
            raise Refused(
                403,
                "without a token only requests to localhost are answered, not to"
                f" {', '.join(hosts)!r}",
            )

        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(403, f"requests of pages from {origin!r} are not answered")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refused(403, "requests of pages from another site are not answered")

    def _check_content(self, request: web.Request) -> None:
        content_type = CONTENT_TYPES.get(request.method)
        if content_type is not None:
            if request.content_type not in (content_type, *self.body_types):
                raise Refused(415, f"send Content-Type: {content_type}, not {request.content_type}")

        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise Refused(
                415, f"send the body as it is, not with Content-Encoding {encoding[:50]!r}"
            )


def _check_token(key: str, token: str) -> None:
    if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), token.encode()):
        raise Refused(
            401, "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'"
        )


def sent_key(request: web.Request) -> str:
    """Return the key or token that a request was sent with; empty if there is none.

    OpenAI's clients send it as a bearer token, Anthropic's and Google's in headers of their own,
    which some clients leave empty.
    """
    for header in ("X-Api-Key", "X-Goog-Api-Key"):
        key = request.headers.get(header, "").strip()
        if key:
            return key
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme == "Bearer":
        return key.strip()
    return ""


def counted(requests: RequestCounts) -> Any:
    """Return a middleware that counts every request by route and status."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "unknown"
        with requests.request(route) as status:
            response = await handler(request)
            status.append(response.status)
            return response

    return count


async def read_json(
    request: web.Request, *, is_batch: bool = False, seconds: float = BODY_TIMEOUT_SECONDS
) -> Any:
    """Read and decode a request's body.

    Args:
        request: its body is JSON in UTF-8.
        is_batch: the body holds several clients' requests, and one of them must not lose the
            others: accept what JSON cannot hold, NaN and halves of surrogate pairs. Whoever uses
            the values checks them.
        seconds: time limit of the body.

    Raises:
        Refused: 400: not JSON in UTF-8, nested too deep, or a lone surrogate; 408: too slow;
            web.HTTPException: 413.
    """
    body = await read_bytes(request, seconds=seconds)
    try:
        return decode_json(body, non_finite=is_batch, lone_surrogates=is_batch)
    except TooDeepError as error:
        raise Refused(400, f"the body: {error}; send a flatter one") from None
    except ValueError as error:
        problem = str(error).removeprefix("not valid JSON: ")
        raise Refused(400, f"the body is not JSON in UTF-8: {problem[:200]}") from None


async def read_bytes(request: web.Request, *, seconds: float = BODY_TIMEOUT_SECONDS) -> bytes:
    """Read a request's body.

    Args:
        seconds: time limit of the body.

    Raises:
        Refused: 408: too slow; web.HTTPException: 413.
    """
    length = request.content_length or 0
    if length > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=length)
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise Refused(408, f"the body was not there within {seconds:g} seconds") from None


async def read_body(
    request: web.Request,
    model: type[Body],
    *,
    max_bytes: int | None = None,
    is_batch: bool = False,
) -> Body:
    """Read a request's body and check it against the schema of its route.

    Args:
        request: its body is JSON.
        model: the schema: types, and bounds of numbers and sizes.
        max_bytes: limit of the body, where it is less than the server's.
        is_batch: as in :func:`read_json`.

    Raises:
        Refused: as :func:`read_json`; 413: too large; 422: names the first fields that are wrong.
    """
    if max_bytes is not None:
        length = request.content_length
        if length is None or length > max_bytes:
            raise Refused(
                413,
                f"{request.method} {request.path}: send a body of at most {max_bytes} bytes, and"
                " its length",
            )
    value = await read_json(request, is_batch=is_batch)
    return check_body(value, model)


def check_body(value: Any, model: type[Body]) -> Body:
    """Return a decoded body as its route's schema.

    Raises:
        Refused: 422: names the first fields that are wrong.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Refused(422, describe_problems(error)) from None


class _Site(web.BaseSite):
    """A listening socket that bounds the number of connections, and their time to a request."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        max_connections: int,
        head_seconds: float,
    ) -> None:
        super().__init__(runner)
        self._listener = listener
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if max_descriptors != resource.RLIM_INFINITY:
            max_connections = max(1, min(max_connections, max_descriptors - SPARE_DESCRIPTORS))
        self._max_connections = max_connections
        self._head_seconds = head_seconds
        self._open: set[_Connection] = set()

    @property
    def name(self) -> str:
        return "http"

    async def start(self) -> None:
        await super().start()
        make_protocol = self._runner.server
        assert make_protocol is not None

        def make_connection() -> _Connection:
            return _Connection(
                make_protocol(), self._open, self._max_connections, self._head_seconds
            )

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(make_connection, sock=self._listener, backlog=1024)


class _Connection(asyncio.Protocol):
    """A connection to aiohttp, which by itself would wait for a request's head without limit.

    Args:
        inner: aiohttp's protocol of the connection.
        open_connections: of the server; it adds itself, unless there are too many.
        max_connections: how many may be open.
        head_seconds: time limit for the head of the first request.
    """

    def __init__(
        self,
        inner: Any,
        open_connections: set[_Connection],
        max_connections: int,
        head_seconds: float,
    ) -> None:
        self._inner = inner
        self._open_connections = open_connections
        self._max_connections = max_connections
        self._head_seconds = head_seconds
        self._head_timeout: asyncio.TimerHandle | None = None
        self._tail = b""  # of what was received, where the end of the head may begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._open_connections) >= self._max_connections:
            transport.abort()
            return
        self._open_connections.add(self)
        loop = asyncio.get_running_loop()
        self._head_timeout = loop.call_later(self._head_seconds, transport.abort)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self not in self._open_connections:
            return
        if self._head_timeout is not None:
            received = self._tail + data
            self._tail = received[-3:]
            if b"\r\n\r\n" in received:
                self._head_timeout.cancel()
                self._head_timeout = None
        self._inner.data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self not in self._open_connections:
            return
        self._open_connections.discard(self)
        if self._head_timeout is not None:
            self._head_timeout.cancel()
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        if self not in self._open_connections:
            return None
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
