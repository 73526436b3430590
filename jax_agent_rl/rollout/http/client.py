"""A rollout server as a :class:`~jax_agent_rl.rollout.protocol.RolloutBackend`.

A server that cannot be reached, closes the connection, sends nothing for ``silence_seconds`` or was
restarted is lost: its requests fail with ``EngineDiedError``, and
:class:`~jax_agent_rl.rollout.client.LLMServerClient` sends them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from jax_agent_rl.errors import (
    BackendClosedError,
    BackendError,
    ConfigError,
    EngineDiedError,
    WeightUpdateError,
)
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.http.wire import encode_request
from jax_agent_rl.rollout.protocol import (
    MESH,
    SHARDS,
    BackendMetrics,
    GenerateRequest,
    Health,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.rollout.proxy import ProxyBackend
from jax_agent_rl.types import TokenOutput, TokenScores
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.fingerprints import read_fingerprint
from jax_agent_rl.utils.network import (
    IDENTITY,
    LineBuffer,
    UnreadableAnswerError,
    is_loopback,
    read_answer,
    read_beginning,
    require_identity,
)

T = TypeVar("T")
_RETRY_SECONDS = 0.5
CONNECT_SECONDS = 10.0
_GATEWAY = frozenset({502, 503, 504})  # what a proxy answers for a server that it cannot reach
MAX_STATE_BYTES = 1 << 20
"""Limit of an answer about a server's state."""
MAX_LINE_BYTES = 1 << 28
MAX_LINE_VALUES = 16_000_000
"""Limits of one message: with the engine's experts and support, an output takes thousands of bytes
per token."""
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)
"""What is raised where the server is lost."""


class RemoteBackend(ProxyBackend):
    """Connection to one server.

    Args:
        url: ``http://host:port``.
        token: bearer token, if the server requires one.
        shares_disk: whether the server may see the paths of weight files. If so it is asked, and
            files that it cannot read are uploaded. None: only a server on loopback may.
        start_seconds: how long ``start`` waits for a server that does not listen yet (it loads and
            compiles).
        silence_seconds: a server that owes an answer and sends nothing, not even heartbeats, for so
            long is lost.

    Raises:
        ConfigError: the address is not an HTTP URL.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        shares_disk: bool | None = None,
        start_seconds: float = 60.0,
        silence_seconds: float = 30.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"rollout.urls: {url!r} is not an address like http://10.0.0.5:8100")
        self.url = url.rstrip("/")
        super().__init__(self.url)
        self._headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._may_share_disk = shares_disk
        if shares_disk is None:
            self._may_share_disk = is_loopback(parts.hostname)
        self._start_seconds = start_seconds
        self._silence_seconds = silence_seconds
        self._session: aiohttp.ClientSession | None = None
        self.weights_fingerprint = ""
        """Which weights the server has: see ``rollout.protocol.IdentifiesWeights``."""
        self._deadlines: set[asyncio.Timeout] = set()  # of reads that wait for the server

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._session is not None:
            raise BackendError("the backend was already started")
        self._session = aiohttp.ClientSession(
            headers={**self._headers, **IDENTITY},
            auto_decompress=False,
            # A connection per request in flight; idle ones are dropped before the server would drop
            # them.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=self._silence_seconds
            ),
        )
        try:
            greeting = await self._greet()
            with self._malformed_is_an_error():
                self._session.headers[wire.INSTANCE_HEADER] = greeting["instance"]
                self._capabilities = wire.decode_capabilities(greeting["capabilities"])
                self._version = int(greeting["policy_version"])
                self.weights_fingerprint = str(greeting.get("weights", ""))
        except BaseException:
            await self._session.close()
            self._session = None
            raise

    async def close(self) -> None:
        """Disconnect from the server, which keeps running.

        Requests in flight fail, and the server aborts them.
        """
        self._closed = True
        while self._deadlines:
            # Each only once: a deadline that is about to fire cannot be rescheduled.
            self._deadlines.pop().reschedule(0.0)
        if self._session is not None:
            await self._session.close()

    async def _greet(self) -> Mapping[str, Any]:
        """Return the server's answer to the handshake, once it listens."""
        deadline = time.monotonic() + self._start_seconds
        while True:
            try:
                return await self._get("handshake")
            except EngineDiedError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self._lines("generate", await self._body(request))) as lines:
            async for message in lines:
                with self._malformed_is_an_error():
                    output = wire.decode_output(message["final"])
        return output

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        body = await self._body(request) | {"chunks": True}
        async with contextlib.aclosing(self._lines("generate", body)) as lines:
            async for message in lines:
                with self._malformed_is_an_error():
                    chunk = wire.decode_chunk(message)
                yield chunk

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        scores = await self._call("score", token_ids=list(token_ids), start=start, top_k=top_k)
        with self._malformed_is_an_error():
            return wire.decode_scores(scores)

    async def _body(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the request as JSON.

        Raises:
            BackendError: the server does not take its media.
        """
        unknown = sorted(request.multi_modal.keys() - self.capabilities.multi_modal)
        if unknown:
            raise BackendError(
                f"request {request.request_id!r}: the server at {self.url} takes no {unknown} input"
            )
        if request.multi_modal:  # images take time to encode
            return await asyncio.to_thread(encode_request, request)
        return encode_request(request)

    # --- weights ----------------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        update.require_kind(wire.REMOTE_PAYLOADS)
        arguments: dict[str, Any] = {
            "version": update.version,
            "kind": update.kind,
            "partial": update.partial,
            "digests": dict(update.digests),
        }
        if update.probe is not None:
            arguments["probe"] = update.probe.to_json()
        location = await self._provide(update)
        await self._call("update_weights", **arguments, **location)
        self.weights_fingerprint = update.fingerprint

    async def _provide(self, update: WeightUpdate) -> dict[str, Any]:
        """Return where the server finds the weights, after uploading files that it cannot read."""
        if update.kind == MESH:
            return {}
        if update.kind == SHARDS:
            if not isinstance(update.payload, str):
                raise WeightUpdateError(
                    f"payload must be an address, got {type(update.payload).__name__}"
                )
            return {"folder": update.payload}

        files = [Path(path).absolute() for path in update.payload]
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise WeightUpdateError(f"weight files do not exist: {missing}")

        visible_files = []
        if self._may_share_disk:
            for file in files:
                visible_files.append({"path": str(file), "size": file.stat().st_size})
        deltas = update.deltas or {}
        needed = await self._call("needed_files", files=visible_files, bases=[*deltas.values()])
        if needed == wire.NO_FILES:
            return {"paths": [str(file) for file in files]}

        keep = update.deltas is not None  # the next version may be sent as what changes
        if needed == wire.DELTAS:
            upload = await self._upload([Path(delta) for delta in deltas], {})
            if await self._call("apply_deltas", upload=upload, digests=dict(update.digests)):
                return {"upload": upload, "keep": keep}
        return {"upload": await self._upload(files, update.digests), "keep": keep}

    async def _upload(self, files: Sequence[Path], digests: Mapping[str, str]) -> str:
        """Send the bytes, file by file; return the name of the upload.

        Args:
            digests: by name of the file, where they are known.
        """
        upload = secrets.token_hex(16)
        for file in files:
            url = f"{self.url}/v1/uploads/{upload}/{file.name}"
            digest = digests.get(file.name) or await asyncio.to_thread(read_fingerprint, file)
            headers = {wire.DIGEST_HEADER: digest}
            with file.open("rb") as stream, self._loss_is_an_error():
                put = self._client().put(url, data=stream, headers=headers, allow_redirects=False)
                async with put as response:
                    await self._check(response)
        return upload

    # --- state ------------------------------------------------------------------------------------

    async def health(self) -> Health:
        """Never raise: a server that cannot be reached is not ok."""
        try:
            answer = await self._get("health")
            with self._malformed_is_an_error():
                health = Health(**answer)
                self._version = max(self._version, health.policy_version)
        except BackendError as error:
            return Health(ok=False, detail=str(error), policy_version=self._version)
        return health

    async def metrics(self) -> BackendMetrics:
        answer = await self._get("metrics")
        with self._malformed_is_an_error():
            return BackendMetrics(**answer)

    # --- HTTP -------------------------------------------------------------------------------------

    async def _get(self, path: str) -> Any:
        """Return the answer to ``GET /v1/{path}``, about the server's state."""
        with self._loss_is_an_error():
            get = self._client().get(f"{self.url}/v1/{path}", allow_redirects=False)
            async with get as response:
                await self._check(response)
                content = await read_answer(
                    response.headers, response.content.iter_any(), MAX_STATE_BYTES
                )
                # HTTP reports an early end only where the answer has a length.
                if content.startswith(b"{") and not content.rstrip().endswith(b"}"):
                    raise aiohttp.ClientPayloadError("the answer ended early")
                with self._malformed_is_an_error():
                    return decode_json(content, non_finite=True)

    async def _call(self, method: str, **arguments: Any) -> Any:
        async with contextlib.aclosing(self._lines(method, arguments)) as lines:
            async for message in lines:
                with self._malformed_is_an_error():
                    self._version = max(self._version, message["policy_version"])
                    result = message["result"]
        return result

    async def _lines(
        self, method: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the messages of one answer.

        Leaving early drops the connection, by which the server sees that nobody waits any more.

        Raises:
            Exception: the error the answer ends with.
            EngineDiedError: the server is lost.
        """
        with self._loss_is_an_error():
            post = self._client().post(
                f"{self.url}/v1/{method}",
                data=wire.line(body),
                headers=_JSON,
                allow_redirects=False,
            )

            async with await self._until_closed(post) as response:
                await self._check(response)
                require_identity(response.headers)

                num_lines = 0
                lines = LineBuffer(MAX_LINE_BYTES)
                try:
                    while data := await self._until_closed(response.content.readany()):
                        for line in lines.add(data):
                            num_lines += 1
                            yield _message(line)
                finally:
                    # Left early: the connection cannot be used again.
                    if not response.content.at_eof():
                        response.close()

                if num_lines == 0 or lines.unfinished:
                    raise aiohttp.ClientPayloadError("the answer ended early")

    async def _until_closed(self, awaitable: Awaitable[T]) -> T:
        """Await, but not past :meth:`close`: aiohttp does not wake readers of a closed session."""
        deadline = asyncio.timeout(None)
        async with deadline:
            self._deadlines.add(deadline)
            try:
                return await awaitable
            finally:
                self._deadlines.discard(deadline)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of a refusal."""
        if response.status == 200:
            return

        content = await read_beginning(response.headers, response.content.iter_any())
        try:
            error = wire.decode_error(decode_json(content)["error"])
        except (ValueError, KeyError, TypeError):
            if response.status in _GATEWAY:
                raise EngineDiedError(
                    f"the rollout server at {self.url} is gone: HTTP {response.status}"
                ) from None
            error = BackendError(f"HTTP {response.status}: is this a rollout server?")

        if response.status == 409:
            raise EngineDiedError(
                f"the rollout server at {self.url} was restarted and has lost its weights"
            )
        if response.status == 401:
            raise BackendError(
                f"{self.url} does not accept the token; check the variable named by"
                " rollout.token_env"
            )
        raise error

    def _client(self) -> aiohttp.ClientSession:
        if self._closed:
            raise BackendClosedError(f"the connection to {self.url} is closed")
        if self._session is None:
            raise BackendClosedError(f"the connection to {self.url} was not started")
        return self._session

    @contextlib.contextmanager
    def _malformed_is_an_error(self) -> Iterator[None]:
        """Turn what is raised for an answer of another shape into BackendError."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BackendError(
                f"{self.url} gave an answer that no rollout server of this version gives "
                f"({type(error).__name__}: {str(error)[:300]})"
            ) from error

    @contextlib.contextmanager
    def _loss_is_an_error(self) -> Iterator[None]:
        """Raise the errors of a backend where the server is lost, or was closed here."""
        try:
            yield
        except UnreadableAnswerError as error:
            raise BackendError(f"{self.url} {error}") from None
        except _LOST as error:
            if self._closed:
                raise BackendClosedError(f"the connection to {self.url} was closed") from error
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                reason = f"no connection within {CONNECT_SECONDS:g} s"
            elif isinstance(error, TimeoutError):
                reason = f"silent for {self._silence_seconds:g} s"
            else:
                reason = str(error)
            raise EngineDiedError(f"the rollout server at {self.url} is gone: {reason}") from error
        except RuntimeError as error:
            # aiohttp raises it where close() meets a connection that is being made.
            if not self._closed:
                raise
            raise BackendClosedError(f"the connection to {self.url} was closed") from error


_JSON = {"Content-Type": "application/json"}


def _message(line: bytes) -> dict[str, Any]:
    """Return a message of an answer.

    Raises:
        Exception: the error that the message holds.
        BackendError: the line is not a message.
    """
    try:
        message = decode_json(line, max_values=MAX_LINE_VALUES, non_finite=True)
        if not isinstance(message, dict):
            raise ValueError(f"it is {line[:100]!r}")
        if message.get("error") is None:
            return message
        error = wire.decode_error(message["error"])
    except (ValueError, KeyError, TypeError) as problem:
        raise BackendError(
            f"a line of the answer is not a message of a rollout server: {problem}"
        ) from None
    raise error
