"""The HTTP server that every service of this package listens with: who may ask, what a body may be, an end in time.

::

    connection ──► a place left? ──► head in time? ──► guard ───────────────────────► handler ──► read_json
                    closed            closed            403 another Host or Origin                 400, 413, 408
                                                        401 no token, 415 content type

A page in a browser of this machine is a stranger like any other: it may reach a server under a name that resolves here
(DNS rebinding, told by ``Host``), or post to it unasked (CSRF, told by ``Origin``, ``Sec-Fetch-Site`` and the content
type). The guard stands before every route, also before those that do not exist.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import resource
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.network import is_loopback, names_this_machine

if TYPE_CHECKING:
    from jax_agent_rl.utils.prometheus import RequestCounts

MOST_CONNECTIONS = 4096
SPARE_DESCRIPTORS = 256
"""Left for everything but connections, where descriptors are few."""
HEAD_SECONDS = 10.0
"""In which a new connection has to bring the head of its first request."""
BODY_SECONDS = 60.0
"""In which a JSON body has to be there."""
MOST_NESTED = 100
"""Levels of arrays and objects in a body; what walks a body by recursion can do several times as many."""
CLOSING_SECONDS = 1.0
"""That running requests get at the end."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.Response]
"""From a status and a message to the service's own form of an error."""
CONTENT_TYPES = {"POST": "application/json", "PUT": "application/octet-stream"}
"""Neither can be sent by a page of another origin without asking first."""
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Refused(Exception):
    """A request that is not carried out: a status and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpServer:
    """Serves routes in the running event loop, from :meth:`start` to :meth:`close`.

    Args:
        routes: what is served.
        refuse: the service's form of an error.
        host: an address to listen on. Anything but loopback needs a token.
        port: 0 takes a free one.
        token: that requests must bring; None asks for none.
        token_key: the setting that names the token's variable, for messages.
        open_paths: that ask for no token.
        max_body_bytes: of a JSON body.
        body_key: the setting of it, for messages.
        keep_alive: seconds an idle connection stays open.
        around: middlewares that see every request, refused ones too.
        most_connections: open at once; further ones are closed. Fewer where the process may not open so many.
        head_seconds: see :data:`HEAD_SECONDS`.

    Raises:
        ConfigError: an address that others can reach, without a token.
    """

    def __init__(
        self,
        routes: Iterable[web.RouteDef],
        *,
        refuse: Refuse,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        token_key: str,
        open_paths: Sequence[str] = (),
        max_body_bytes: int,
        body_key: str,
        keep_alive: float = 75.0,
        around: Sequence[Any] = (),
        most_connections: int = MOST_CONNECTIONS,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                f"host={host!r} can be reached from other machines and needs a token: put a secret into an environment "
                f"variable and name it in {token_key} (or listen on 127.0.0.1)"
            )
        self._host = host
        self.port = port
        self._token = token
        self._open_paths = open_paths
        self._refuse = refuse
        self._body_key = body_key
        self._keep_alive = keep_alive
        self._most_connections = most_connections
        self._head_seconds = head_seconds
        self._socket: socket.socket | None = None
        self._runner: web.AppRunner | None = None
        self.app = web.Application(client_max_size=max_body_bytes, middlewares=[*around, self._guard])
        self.app.add_routes(routes)

    @property
    def url(self) -> str:
        """Where it listens; for a wildcard address, as this machine sees it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def listen(self) -> None:
        """Takes the address; whoever connects waits until :meth:`start`.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        if self._socket is not None:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self.port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {self._host}:{self.port}: {error.strerror or error}") from error
        self._socket, self.port = listener, listener.getsockname()[1]

    async def start(self) -> None:
        """Serves.

        Raises:
            ConfigError: see :meth:`listen`.
        """
        self.listen()
        assert self._socket is not None
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            keepalive_timeout=self._keep_alive,
            shutdown_timeout=CLOSING_SECONDS,
            access_log=None,
        )
        await self._runner.setup()
        await _Site(self._runner, self._socket, self._most_connections, self._head_seconds).start()

    async def close(self) -> None:
        """Stops listening and ends running requests. Idempotent."""
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
            response = self._refuse(refused.status, str(refused))
            if refused.status in (401, 403):
                response.force_close()  # a stranger keeps no connection
            return response
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, f"{request.method} {request.path}: the request is larger than {self._body_key}")
        except web.HTTPException as error:  # no such path, no such method, …
            return self._refuse(error.status, f"{request.method} {request.path}: {error.reason}")
        except ConnectionResetError:
            if request.transport is not None and not request.transport.is_closing():
                raise
            return web.Response(status=499)  # for the counts: the client is gone, and nobody reads an answer

    def _check(self, request: web.Request) -> None:
        """Raises Refused unless the client may ask."""
        hosts = request.headers.getall("Host", [])
        named = hosts[0] if len(hosts) == 1 else ""
        if self._token is None and not names_this_machine(named, listening_on=self._host):
            raise Refused(403, f"without a token only requests to localhost are answered, not to {', '.join(hosts)!r}")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != named:
            raise Refused(403, f"requests of pages from {origin!r} are not answered")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise Refused(403, "requests of pages from another site are not answered")
        if self._token is not None and request.path not in self._open_paths:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, b"Bearer " + self._token.encode()):
                raise Refused(401, "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'")
        wanted = CONTENT_TYPES.get(request.method)
        if wanted is not None and request.content_type != wanted:
            raise Refused(415, f"send Content-Type: {wanted}, not {request.content_type}")


def counted(requests: RequestCounts) -> Any:
    """A middleware that counts every request by route and status."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        with requests.request(resource.canonical if resource else "unknown") as status:
            response = await handler(request)
            status.append(response.status)
            return response

    return count


async def read_json(request: web.Request, *, lone_surrogates: bool = False, seconds: float = BODY_SECONDS) -> Any:
    """Reads and decodes a request's body.

    Args:
        lone_surrogates: accept text that holds half a character, which no tokenizer and no file takes.
        seconds: in which the body has to be there.

    Raises:
        Refused: 400: not JSON in UTF-8, nested too deep, or half a character; 408: too slow; web.HTTPException: 413.
    """
    if (length := request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=length)
    try:
        async with asyncio.timeout(seconds):
            body = await request.read()
    except TimeoutError:
        raise Refused(408, f"the body was not there within {seconds:g} seconds") from None
    try:
        value = json.loads(body.decode("utf-8"))
    except RecursionError:
        raise Refused(400, _TOO_DEEP) from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON in UTF-8: {str(error)[:200]}") from None
    if _deeper_than(MOST_NESTED, value):
        raise Refused(400, _TOO_DEEP)
    if not lone_surrogates and _ESCAPED_SURROGATE.search(body) and not _is_text(value):
        raise Refused(400, r"the body is not text: a \ud800 to \udfff is half a character; send its pair, too")
    return value


_TOO_DEEP = f"the body is nested more than {MOST_NESTED} levels deep; send a flatter one"


def _deeper_than(most: int, value: Any) -> bool:
    """Whether containers are nested deeper; looked at level by level, as recursion could not."""
    level = [value]
    for _ in range(most):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not inner:
            return False
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
    return bool(level)


def _is_text(value: Any) -> bool:
    """Whether every string in it can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Site(web.BaseSite):
    """A listening socket whose connections are bounded in number, and in time until they ask for something."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, most: int, head_seconds: float) -> None:
        super().__init__(runner)
        self._listener = listener
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = max(1, min(most, soft - SPARE_DESCRIPTORS))
        self._most = most
        self._head_seconds = head_seconds
        self._open: set[_Connection] = set()

    @property
    def name(self) -> str:
        return "http"

    async def start(self) -> None:
        await super().start()
        make, loop = self._runner.server, asyncio.get_running_loop()
        assert make is not None

        def connection() -> _Connection:
            return _Connection(make(), self._open, self._most, self._head_seconds)

        self._server = await loop.create_server(connection, sock=self._listener, backlog=1024)


class _Connection(asyncio.Protocol):
    """Passes a connection on to aiohttp, which waits for the head of a first request for ever."""

    def __init__(self, inner: Any, places: set[_Connection], most: int, head_seconds: float) -> None:
        self._inner = inner
        self._places = places
        self._most = most
        self._head_seconds = head_seconds
        self._waiting: asyncio.TimerHandle | None = None
        self._end = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._places) >= self._most:
            transport.abort()
            return
        self._places.add(self)
        self._waiting = asyncio.get_running_loop().call_later(self._head_seconds, transport.abort)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self not in self._places:
            return
        if self._waiting is not None:
            seen = self._end + data
            self._end = seen[-3:]
            if b"\r\n\r\n" in seen:
                self._waiting.cancel()
                self._waiting = None
        self._inner.data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self not in self._places:
            return
        self._places.discard(self)
        if self._waiting is not None:
            self._waiting.cancel()
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self in self._places else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
