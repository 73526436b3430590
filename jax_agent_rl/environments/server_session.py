"""A session with a server that runs environments: HTTP requests, its cookies, one WebSocket.

Whatever such a server sends is bounded before it is read, and checked before it is used. It ends
the trajectory, not the run. ``environments.timeout`` limits the time of every call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jax_agent_rl.errors import EnvironmentFailedError
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.network import (
    IDENTITY,
    UNUSED_SECONDS,
    UnreadableAnswerError,
    read_answer,
)

if TYPE_CHECKING:
    import aiohttp

MAX_MESSAGE_BYTES = 16 * 2**20
"""Limit of one answer or message; a policy reads far less."""


@dataclass(frozen=True, kw_only=True)
class ServerAnswer:
    """An answer over HTTP, whatever its status."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The content as text; what is not UTF-8 becomes U+FFFD."""
        return self.content.decode("utf-8", "replace")


class ServerSession:
    """One session. Open it, and close it in the end.

    Args:
        url: ``http://host:port``, maybe with a path.
        environment: name of the environment, for messages.

    Raises:
        EnvironmentFailedError: the address is not an HTTP URL.
    """

    def __init__(self, url: str, *, environment: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EnvironmentFailedError(
                f"{environment}: url {url!r:.200} is not an address like http://127.0.0.1:8000"
            )
        self.url = url.rstrip("/")
        self._environment = environment
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def open(self) -> None:
        """Begin a session without cookies."""
        import aiohttp

        # A WebSocket is opened by a request that follows redirects, and has no option against it.
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(self._refuse_redirect)
        self._http = aiohttp.ClientSession(
            headers=IDENTITY,
            trace_configs=[tracing],
            auto_decompress=False,
            connector=aiohttp.TCPConnector(keepalive_timeout=UNUSED_SECONDS),
            # Also of servers that are known by their IP address.
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        """End the session."""
        http = self._http
        socket = self._socket
        self._http = None
        self._socket = None
        try:
            if socket is not None:
                await socket.close()
        finally:
            if http is not None:
                await http.close()

    # --- HTTP -------------------------------------------------------------------------------------

    async def request(self, method: str, path: str, payload: Any = None) -> ServerAnswer:
        """Send a request, and return the answer whatever its status.

        Args:
            path: begins with a slash.
            payload: sent as JSON; None sends nothing.

        Raises:
            EnvironmentFailedError: the server cannot be reached, or its answer cannot be read.
        """
        import aiohttp

        url = self.url + path
        try:
            async with self._open_http().request(
                method, url, json=payload, allow_redirects=False
            ) as response:
                content = await read_answer(
                    response.headers, response.content.iter_any(), MAX_MESSAGE_BYTES
                )
        except UnreadableAnswerError as error:
            raise self.error(f"{url} {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(url, error) from None
        return ServerAnswer(status=response.status, content=content)

    async def request_object(self, method: str, path: str, payload: Any = None) -> dict[str, Any]:
        """Send a request, and return the object that the server answers.

        Raises:
            EnvironmentFailedError: as :meth:`request`; the server refuses, or answers something
                else.
        """
        answer = await self.request(method, path, payload)
        if not 200 <= answer.status < 300:
            raise self.refused(path, answer)
        return self._object(answer.content)

    # --- WebSocket --------------------------------------------------------------------------------

    async def connect(self, path: str) -> None:
        """Open the session's WebSocket.

        Raises:
            EnvironmentFailedError: the server cannot be reached.
        """
        import aiohttp

        url = self.url + path
        try:
            self._socket = await self._open_http().ws_connect(
                url, compress=0, max_msg_size=MAX_MESSAGE_BYTES
            )
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(url, error) from None

    async def exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message over the WebSocket, and return the next one.

        Raises:
            EnvironmentFailedError: the server ended the session, or sent no object.
        """
        import aiohttp

        if self._socket is None:
            raise self.error(f"the session with {self.url} is closed")
        try:
            await self._socket.send_str(json.dumps(message))
            received = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(self.url, error) from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            reason = received.extra or received.data
            raise self.error(
                f"{self.url} ended the session ({received.type.name}: {reason!s:.200})"
            )
        return self._object(received.data.encode("utf-8", "replace"))

    # ----------------------------------------------------------------------------------------------

    def error(self, problem: str) -> EnvironmentFailedError:
        """Return an exception that names the environment."""
        return EnvironmentFailedError(f"{self._environment}: {problem}")

    def refused(self, path: str, answer: ServerAnswer) -> EnvironmentFailedError:
        """Return an exception for an answer that is not a success."""
        return self.error(f"{self.url}{path} answered HTTP {answer.status}: {answer.text[:300]}")

    def _open_http(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise self.error(f"there is no session with {self.url}; reset comes first")
        return self._http

    async def _refuse_redirect(self, *_: object) -> None:
        raise self.error(f"{self.url} redirects to elsewhere, which is not followed")

    def _unreachable(self, url: str, error: Exception) -> EnvironmentFailedError:
        return self.error(
            f"{url} cannot be reached ({type(error).__name__}: {error}); start the server, or"
            " correct the row's url"
        )

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            value = decode_json(content)
        except ValueError as error:
            raise self.error(f"{self.url} answered what cannot be read: {error}") from None
        if not isinstance(value, dict):
            raise self.error(f"{self.url} answered a {type(value).__name__}, not an object")
        return value
