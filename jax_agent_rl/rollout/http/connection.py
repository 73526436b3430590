"""The connection of a backend to its engine's server: a rollout server, or the engine's own.

Answers are bounded before they are kept. A server that cannot be reached, closes the connection or
sends nothing for ``silence_seconds`` is lost: ``EngineDiedError``. What is not an answer of such a
server is ``BackendError``, and whatever waits when the connection is closed here ends with
``BackendClosedError``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from jax_agent_rl.errors import BackendClosedError, BackendError, ConfigError, EngineDiedError
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.network import (
    IDENTITY,
    UNUSED_SECONDS,
    LineBuffer,
    UnreadableAnswerError,
    read_answer,
    require_identity,
)

T = TypeVar("T")
CONNECT_SECONDS = 10.0
MAX_STATE_BYTES = 1 << 20
"""Limit of an answer about a server's state."""
MAX_LINE_BYTES = 1 << 28
MAX_LINE_VALUES = 16_000_000
"""Limits of one message: with the engine's experts and support, an output takes thousands of bytes
per token."""
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What is raised where the server is lost."""
_JSON = {"Content-Type": "application/json"}


class ServerConnection:
    """Connections to one server, which live from :meth:`open` to :meth:`close`.

    Args:
        url: ``http://host:port``.
        kind: what serves there, for messages: "rollout server".
        headers: sent with every request.
        silence_seconds: a server that owes an answer and sends nothing for so long is lost.
        check: raises the error of an answer that is a refusal, see :meth:`get` and :meth:`lines`.

    Raises:
        ConfigError: the address is not an HTTP URL.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: str,
        headers: Mapping[str, str],
        silence_seconds: float,
        check: Callable[[aiohttp.ClientResponse], Awaitable[None]],
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"rollout.urls: {url!r} is not an address like http://10.0.0.5:8100")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.kind = kind
        self.closed = False
        self._headers = dict(headers)
        self._silence_seconds = silence_seconds
        self._check = check
        self._session: aiohttp.ClientSession | None = None
        self._deadlines: set[asyncio.Timeout] = set()  # of reads that wait for the server

    @property
    def is_open(self) -> bool:
        return self._session is not None

    def open(self) -> None:
        """Make the session; nothing is sent."""
        self._session = aiohttp.ClientSession(
            headers={**self._headers, **IDENTITY},
            auto_decompress=False,
            # A connection per request in flight.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UNUSED_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=self._silence_seconds
            ),
        )

    async def abandon(self) -> None:
        """Undo :meth:`open` where the start failed; it may be opened again."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def close(self) -> None:
        """Disconnect; what waits for the server ends with ``BackendClosedError``."""
        self.closed = True
        while self._deadlines:
            # Each only once: a deadline that is about to fire cannot be rescheduled.
            self._deadlines.pop().reschedule(0.0)
        if self._session is not None:
            await self._session.close()

    def client(self) -> aiohttp.ClientSession:
        """Return the session; raise BackendClosedError before :meth:`open` and after the end."""
        if self.closed:
            raise BackendClosedError(f"the connection to {self.url} is closed")
        if self._session is None:
            raise BackendClosedError(f"the connection to {self.url} was not started")
        return self._session

    async def get(self, path: str) -> Any:
        """Return the decoded answer to a GET about the server's state."""
        with self.loss_is_an_error():
            get = self.client().get(f"{self.url}{path}", allow_redirects=False)
            async with get as response:
                content = await self._read_state(response)
        # HTTP reports an early end only where the answer has a length.
        if content.startswith(b"{") and not content.rstrip().endswith(b"}"):
            raise EngineDiedError(f"the {self.kind} at {self.url} is gone: the answer ended early")
        with self.malformed_is_an_error():
            return decode_json(content, non_finite=True)

    async def post(self, path: str, body: bytes) -> bytes:
        """Return the content of the answer to a POST, which is no longer than a state."""
        with self.loss_is_an_error():
            post = self.client().post(
                f"{self.url}{path}", data=body, headers=_JSON, allow_redirects=False
            )
            async with await self.until_closed(post) as response:
                return await self.until_closed(self._read_state(response))

    async def lines(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the answer to a POST, as they come, without empty ones.

        Leaving early drops the connection, by which the server sees that nobody waits any more.

        Raises:
            EngineDiedError: the server is lost.
        """
        with self.loss_is_an_error():
            post = self.client().post(
                f"{self.url}{path}", data=body, headers=_JSON, allow_redirects=False
            )

            async with await self.until_closed(post) as response:
                await self._check(response)
                require_identity(response.headers)

                num_lines = 0
                lines = LineBuffer(MAX_LINE_BYTES)
                try:
                    while data := await self.until_closed(response.content.readany()):
                        for line in lines.add(data):
                            num_lines += 1
                            yield line
                finally:
                    # Left early: the connection cannot be used again.
                    if not response.content.at_eof():
                        response.close()

                if num_lines == 0 or lines.unfinished:
                    raise aiohttp.ClientPayloadError("the answer ended early")

    async def _read_state(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the content of an answer that is not a refusal."""
        await self._check(response)
        return await read_answer(response.headers, response.content.iter_any(), MAX_STATE_BYTES)

    async def until_closed(self, awaitable: Awaitable[T]) -> T:
        """Await, but not past :meth:`close`: aiohttp does not wake readers of a closed session."""
        deadline = asyncio.timeout(None)
        async with deadline:
            self._deadlines.add(deadline)
            try:
                return await awaitable
            finally:
                self._deadlines.discard(deadline)

    @contextlib.contextmanager
    def malformed_is_an_error(self) -> Iterator[None]:
        """Turn what is raised for an answer of another shape into BackendError."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BackendError(
                f"{self.url} gave an answer that no {self.kind} of this version gives "
                f"({type(error).__name__}: {str(error)[:300]})"
            ) from error

    @contextlib.contextmanager
    def loss_is_an_error(self) -> Iterator[None]:
        """Raise the errors of a backend where the server is lost, or was closed here."""
        try:
            yield
        except UnreadableAnswerError as error:
            raise BackendError(f"{self.url} {error}") from None
        except _LOST as error:
            if self.closed:
                raise BackendClosedError(f"the connection to {self.url} was closed") from error
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                reason = f"no connection within {CONNECT_SECONDS:g} s"
            elif isinstance(error, TimeoutError):
                reason = f"silent for {self._silence_seconds:g} s"
            else:
                reason = str(error)
            raise EngineDiedError(f"the {self.kind} at {self.url} is gone: {reason}") from error
        except RuntimeError as error:
            # aiohttp raises it where close() meets a connection that is being made.
            if not self.closed:
                raise
            raise BackendClosedError(f"the connection to {self.url} was closed") from error
