"""Secrets from the environment, addresses of this machine, and JSON over HTTP to a service.

Requests are bounded in time, size and retries. Every failure is one exception with the service's
URL and the key to change. A request is retried only where that is safe: it did not reach the
service, the service was too busy to accept it, or the caller declares it idempotent.

Every HTTP client of the package reads answers by :func:`read_answer`, whichever library it uses:
not compressed, as seven kilobytes of a twice compressed answer become eight gigabytes, and counted
before they are kept. Redirects are not followed: a server must not choose who gets a token, or
which address inside a network is asked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.utils.bounded_json import MAX_VALUES, decode_json

if TYPE_CHECKING:
    import httpx


def token_from(variable: str | None, *, key: str) -> str | None:
    """Return the secret in an environment variable.

    Args:
        variable: its name; None returns None.
        key: setting that names the variable, for the message.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(
            f"{key} names {variable}, which is not set; export {variable}=<the secret>"
        )
    return token


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(host: str) -> str:
    """Return the address of this machine in the network in which it reaches a host.

    Nothing is sent.

    Raises:
        OSError: there is no route to the host, or it has no address.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as connection:
        connection.connect(address)  # chooses the route
        return connection.getsockname()[0]


def require_token(host: str, token: str | None, *, key: str) -> None:
    """Check that a server that other machines can reach has a token.

    Args:
        host: the address that it listens on.
        token: the secret that requests must send; None or empty if there is none.
        key: setting that names the token's variable, for the message.

    Raises:
        ConfigError: it has none.
    """
    if not token and not is_loopback(host):
        raise ConfigError(
            f"host={host!r} can be reached from other machines and needs a token: put a secret into"
            f" an environment variable and name it in {key} (or listen on 127.0.0.1)"
        )


LAST_PORT = 65_535


def listen_on(host: str, port: int) -> socket.socket:
    """Return a socket that listens; clients that connect wait until it is served.

    Raises:
        ConfigError: the port is in use or no port, or the address is not this machine's.
    """
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(
            f"{port} is not a port: ports are 0 (which takes a free one) to {LAST_PORT}"
        )

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; choose another port (0 takes a free one) or"
            " address"
        ) from error
    return listener


def names_this_machine(host_header: str, *, listening_on: str) -> bool:
    """Return whether a request's ``Host`` is this machine, or the address listened on.

    Servers without a token refuse other names: DNS rebinding lets a page in a local browser reach
    them.
    """
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:  # malformed
        return False
    return host == listening_on or is_loopback(host)


IDENTITY = {"Accept-Encoding": "identity"}
"""Header of every request: its answer must not be compressed."""

UNUSED_SECONDS = 2.0
"""How long a client keeps a connection that it does not use. Servers close theirs as well (uvicorn
after 5 s), and a request that is sent meanwhile is lost."""

MAX_ANSWER_BYTES = 64 * 2**20
"""Limit of an answer: no model reads more."""
MAX_ERROR_BYTES = 64 * 2**10
"""Limit of what is read of an answer that is an error."""

MAX_PAUSE_SECONDS = 30.0
"""Limit of the pauses that back-off or the service's ``Retry-After`` ask for."""

_NOT_ACCEPTED = frozenset({429, 502, 503, 504})
_TRANSIENT = frozenset({408, 425})  # besides all server errors
_HINTS = {
    401: "it wants a token: {token_hint}",
    403: "it refuses the token: {token_hint}",
    404: "there is no such path: correct {url_key}",
    413: "the request is too large for it",
    507: "it is out of memory: start it with more, or send it less at a time",
}


@dataclass(kw_only=True)
class JsonService:
    """Client of one service, with its address, time limits and retries.

    Use it from one event loop, and close it.

    Attributes:
        url: http or https.
        url_key: configuration key of ``url``, for messages.
        timeout: seconds per attempt, from connecting to the last byte.
        timeout_key: configuration key of ``timeout``, for messages.
        error: makes the error to raise from its message.
        max_retries: retries of a request that was not accepted, or is repeatable and failed.
        retry_delay: seconds before the first retry; the service's ``Retry-After`` takes precedence.
        backoff: factor of the delay from one retry to the next.
        headers: sent with every request.
        token_hint: what to do about a missing token, for messages.
        trust_env: whether to use the environment's proxies.
        pace: awaited before each attempt, to limit their rate.
        sleep: waits between attempts.
        max_answer_bytes: limit of an answer's content.
        max_values: as in :func:`~jax_agent_rl.utils.bounded_json.decode_json`.
        transport: httpx transport, for tests.
        retries: number of retries so far.

    Raises:
        ConfigError: the URL is invalid.
    """

    url: str
    url_key: str
    timeout: float
    timeout_key: str
    error: Callable[[str], JaxAgentRLError]
    max_retries: int = 0
    retry_delay: float = 1.0
    backoff: float = 1.0
    headers: Mapping[str, str] | None = None
    token_hint: str = "see its documentation"
    trust_env: bool = False
    pace: Callable[[], Awaitable[None]] | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    max_answer_bytes: int = MAX_ANSWER_BYTES
    max_values: int = MAX_VALUES
    transport: httpx.AsyncBaseTransport | None = None
    retries: int = 0
    _client: httpx.AsyncClient | None = None

    def __post_init__(self) -> None:
        import httpx

        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as problem:
            raise ConfigError(f"{self.url_key}={self.url!r} is not a URL: {problem}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{self.url_key}={self.url!r} must be like http://localhost:5000")

    async def post(self, payload: Any, *, repeatable: bool = False) -> Any:
        """Send ``payload`` and return the decoded answer; invalid UTF-8 in it becomes U+FFFD.

        Args:
            payload: anything JSON can hold.
            repeatable: whether the service may run the request twice, so that it is also retried
                when its answer was lost, late or a server error.

        Raises:
            TimeoutError: every attempt took longer than ``timeout``.
            JaxAgentRLError: made by ``error``: any other failure.
        """
        try:
            body = json.dumps(payload, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as problem:
            raise self.error(
                f"a request to {self.url} cannot be written as JSON: {problem}"
            ) from None

        content = await self._request("POST", self.url, body, repeatable=repeatable)

        # Whoever reads a number checks it: one infinite reward must not lose the others' answers.
        try:
            return decode_json(
                content,
                max_values=self.max_values,
                errors="replace",
                non_finite=True,
                lone_surrogates=True,
            )
        except ValueError as problem:
            raise self.error(
                f"{self.url} answered what is not JSON ({problem}): {content[:100]!r}"
            ) from None

    async def ping(self, url: str) -> None:
        """Send a GET and ignore the answer's content; raise as :meth:`post`."""
        await self._request("GET", url, b"", repeatable=True)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _request(self, method: str, url: str, body: bytes, *, repeatable: bool) -> bytes:
        """Return the content of the answer, after retries where they are allowed."""
        for attempt in range(self.max_retries + 1):
            is_last = attempt == self.max_retries
            times = f" ({attempt + 1} times)" if attempt else ""
            pause = self.retry_delay * self.backoff**attempt
            if self.pace is not None:
                await self.pace()

            try:
                async with asyncio.timeout(self.timeout):
                    return await self._request_once(method, url, body)
            except TimeoutError:
                if is_last or not repeatable:
                    raise TimeoutError(
                        f"{url} did not answer within {self.timeout_key}={self.timeout:g} seconds;"
                        f" raise it, or look why the server is slow{times}"
                    ) from None
            except _AttemptError as failure:
                may_retry = failure.not_accepted or (repeatable and failure.is_transient)
                if is_last or not may_retry:
                    raise self.error(f"{failure}{times}") from None
                if failure.retry_after is not None:
                    pause = failure.retry_after

            self.retries += 1
            await self.sleep(min(pause, max(MAX_PAUSE_SECONDS, self.retry_delay)))
        raise AssertionError("the last attempt returns or raises")

    async def _request_once(self, method: str, url: str, body: bytes) -> bytes:
        import httpx

        try:
            async with self._http_client().stream(method, url, content=body) as answer:
                if answer.is_success:
                    content = await read_answer(
                        answer.headers, answer.aiter_bytes(), self.max_answer_bytes
                    )
                else:
                    content = await read_beginning(answer.headers, answer.aiter_bytes())
        except UnreadableAnswerError as problem:
            raise _AttemptError(f"{url} {problem}", is_transient=False) from None
        except httpx.ConnectError as problem:
            raise _AttemptError(
                f"{url} cannot be reached ({problem}); start the server, or correct {self.url_key}",
                not_accepted=True,
            ) from None
        except httpx.HTTPError as problem:
            raise _AttemptError(
                f"{url} broke off the connection ({type(problem).__name__}: {problem})"
            ) from None
        if answer.is_success:
            return content

        if answer.has_redirect_location:
            hint = (
                f"it redirects to {answer.headers['location'][:200]!r}: set {self.url_key} to the"
                " right address"
            )
        else:
            hint = _HINTS.get(answer.status_code, "{body}").format(
                url_key=self.url_key,
                token_hint=self.token_hint,
                body=content[:300].decode("utf-8", "replace") or answer.reason_phrase,
            )
        retry_after = answer.headers.get("Retry-After", "")
        raise _AttemptError(
            f"{url} answered HTTP {answer.status_code}: {hint}",
            not_accepted=answer.status_code in _NOT_ACCEPTED,
            is_transient=answer.status_code >= 500 or answer.status_code in _TRANSIENT,
            retry_after=float(retry_after) if retry_after.isdecimal() else None,
        )

    def _http_client(self) -> httpx.AsyncClient:
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=None, keepalive_expiry=UNUSED_SECONDS)
            headers = {"content-type": "application/json", **(self.headers or {}), **IDENTITY}
            self._client = httpx.AsyncClient(
                limits=limits,
                headers=headers,
                timeout=None,
                trust_env=self.trust_env,
                transport=self.transport,
            )
        return self._client


class _AttemptError(Exception):
    """A failed attempt.

    Attributes:
        not_accepted: the service did not act on the request.
        is_transient: a retry may succeed.
        retry_after: seconds after which the service wants to be asked again, if it says so.
    """

    def __init__(
        self,
        message: str,
        *,
        not_accepted: bool = False,
        is_transient: bool = True,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.not_accepted = not_accepted
        self.is_transient = is_transient
        self.retry_after = retry_after


# --- answers of any client ------------------------------------------------------------------------


class UnreadableAnswerError(Exception):
    """An answer that is not read: compressed, or too large.

    The message continues a sentence that begins with the server's name.
    """


async def read_answer(
    headers: Mapping[str, str], chunks: AsyncIterable[bytes], max_bytes: int
) -> bytes:
    """Return the content of an answer to a request that was sent with :data:`IDENTITY`.

    Args:
        chunks: the content as it comes from the connection, not decompressed.
        max_bytes: limit of the content.

    Raises:
        UnreadableAnswerError: it is compressed or too large; no more than a chunk beyond the limit
            was read.
    """
    require_identity(headers)
    content = bytearray()
    async for chunk in chunks:
        _append(content, chunk, max_bytes)
    return bytes(content)


def read_answer_blocking(
    headers: Mapping[str, str], chunks: Iterable[bytes], max_bytes: int
) -> bytes:
    """Do as :func:`read_answer` where there is no event loop."""
    require_identity(headers)
    content = bytearray()
    for chunk in chunks:
        _append(content, chunk, max_bytes)
    return bytes(content)


def _append(content: bytearray, chunk: bytes, max_bytes: int) -> None:
    content += chunk
    if len(content) > max_bytes:
        raise UnreadableAnswerError(
            f"answered more than {max_bytes} bytes; limit what it puts into one answer"
        )


async def read_beginning(headers: Mapping[str, str], chunks: AsyncIterable[bytes]) -> bytes:
    """Return the first :data:`MAX_ERROR_BYTES` of an answer that is an error, for a message.

    Nothing is returned of a compressed one.
    """
    if _encoding(headers):
        return b""
    content = bytearray()
    async for chunk in chunks:
        content += chunk
        if len(content) >= MAX_ERROR_BYTES:
            break
    return bytes(content[:MAX_ERROR_BYTES])


def require_identity(headers: Mapping[str, str]) -> None:
    """Raise UnreadableAnswerError if an answer is compressed."""
    encoding = _encoding(headers)
    if encoding:
        raise UnreadableAnswerError(
            f"answered with Content-Encoding {encoding[:50]!r}, though it was asked not to; what it"
            " is compressed from cannot be bounded: switch compression off there"
        )


class LineBuffer:
    """Cuts what arrives in pieces into lines, each of bounded length.

    Args:
        max_bytes: limit of a line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def unfinished(self) -> bool:
        """Whether the end of a line is still to come."""
        return self._size > 0

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete with this piece, without empty ones.

        Raises:
            UnreadableAnswerError: a line is too long.
        """
        first_part, *next_parts = data.split(b"\n")
        self._add_part(first_part)
        lines = []
        for part in next_parts:
            line = b"".join(self._parts)
            if line:
                lines.append(line)
            self._parts = []
            self._size = 0
            self._add_part(part)
        return lines

    def _add_part(self, part: bytes) -> None:
        if part:
            self._parts.append(part)
            self._size += len(part)
        if self._size > self._max_bytes:
            raise UnreadableAnswerError(
                f"answered with a line of more than {self._max_bytes} bytes"
            )


def _encoding(headers: Mapping[str, str]) -> str:
    """Return how an answer is compressed; an empty text if it is not."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding == "identity":
        return ""
    return encoding


def bearer(variable: str | None, *, key: str) -> dict[str, str]:
    """Return the Authorization header with the secret in an environment variable; empty for None.

    Raises:
        ConfigError: the variable is not set.
    """
    token = token_from(variable, key=key)
    if token is None:
        return {}
    return {"authorization": f"Bearer {token}"}
