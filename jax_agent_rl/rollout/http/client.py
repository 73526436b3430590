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
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from jax_agent_rl.errors import BackendError, EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.http.connection import MAX_LINE_VALUES, ServerConnection
from jax_agent_rl.rollout.http.wire import encode_request
from jax_agent_rl.rollout.protocol import (
    MESH,
    PULL,
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
from jax_agent_rl.utils.network import is_loopback, local_address, read_beginning
from jax_agent_rl.utils.pull_tickets import PullOffer
from jax_agent_rl.utils.weight_deltas import delta_path

_RETRY_SECONDS = 0.5
_GATEWAY = frozenset({502, 503, 504})  # what a proxy answers for a server that it cannot reach


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
        headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._connection = ServerConnection(
            url,
            kind="rollout server",
            headers=headers,
            silence_seconds=silence_seconds,
            check=self._check,
        )
        super().__init__(self.url)
        self._may_share_disk = shares_disk
        if shares_disk is None:
            self._may_share_disk = is_loopback(self._connection.host)
        self._start_seconds = start_seconds
        self.weights_fingerprint = ""
        """Which weights the server has: see ``rollout.protocol.IdentifiesWeights``."""

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._connection.url

    @url.setter
    def url(self, url: str) -> None:
        """Set the address of a server that is known once it listens."""
        self._connection.url = url

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._connection.is_open:
            raise BackendError("the backend was already started")
        self._connection.open()
        try:
            greeting = await self._greet()
            with self._connection.malformed_is_an_error():
                self._connection.client().headers[wire.INSTANCE_HEADER] = greeting["instance"]
                self._capabilities = wire.decode_capabilities(greeting["capabilities"])
                self._version = int(greeting["policy_version"])
                self.weights_fingerprint = str(greeting.get("weights", ""))
        except BaseException:
            await self._connection.abandon()
            raise

    async def close(self) -> None:
        """Disconnect from the server, which keeps running.

        Requests in flight fail, and the server aborts them.
        """
        self._closed = True
        await self._connection.close()

    async def _greet(self) -> Mapping[str, Any]:
        """Return the server's answer to the handshake, once it listens."""
        deadline = time.monotonic() + self._start_seconds
        while True:
            try:
                return await self._connection.get("/v1/handshake")
            except EngineDiedError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        async with contextlib.aclosing(self._lines("generate", await self._body(request))) as lines:
            async for message in lines:
                with self._connection.malformed_is_an_error():
                    output = wire.decode_output(message["final"])
        return output

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        body = await self._body(request) | {"chunks": True}
        async with contextlib.aclosing(self._lines("generate", body)) as lines:
            async for message in lines:
                with self._connection.malformed_is_an_error():
                    chunk = wire.decode_chunk(message)
                yield chunk

    async def score(
        self, token_ids: Sequence[int], *, start: int = 1, top_k: int = 0
    ) -> TokenScores:
        scores = await self._call("score", token_ids=list(token_ids), start=start, top_k=top_k)
        with self._connection.malformed_is_an_error():
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
        if update.kind == PULL:
            return {"ticket": await asyncio.to_thread(self._ticket, update.payload)}

        files = [Path(path).absolute() for path in update.payload]
        missing = [str(file) for file in files if not file.is_file()]
        if missing:
            raise WeightUpdateError(f"weight files do not exist: {missing}")

        visible_files = []
        if self._may_share_disk:
            for file in files:
                visible_files.append({"path": str(file), "size": file.stat().st_size})
        deltas = {Path(path).absolute(): base for path, base in (update.deltas or {}).items()}
        needed = await self._call("needed_files", files=visible_files, bases=[*deltas.values()])
        if needed == wire.NO_FILES:
            return {"paths": [str(file) for file in files]}

        upload = secrets.token_hex(16)
        for file in files:
            digest = update.digests.get(file.name)
            if digest is None:
                digest = await asyncio.to_thread(read_fingerprint, file)
            delta = delta_path(file)
            is_taken = False
            if needed == wire.DELTAS and delta in deltas:
                is_taken = await self._upload(upload, delta, digest)
            if not is_taken:
                await self._upload(upload, file, digest)
        # The next version may be sent as what changes.
        return {"upload": upload, "keep": update.deltas is not None}

    def _ticket(self, offer: Any) -> dict[str, Any]:
        """Let the server pull what is offered; return the ticket.

        Its addresses are left out: they are those of the connection on which it is sent.
        """
        if not isinstance(offer, PullOffer):
            raise WeightUpdateError(f"payload must be a PullOffer, got {type(offer).__name__}")
        try:
            interface = local_address(self._connection.host)
        except OSError as error:
            raise EngineDiedError(f"the rollout server at {self.url} is gone: {error}") from error
        return wire.encode_ticket(offer.ticket(interface))

    async def _upload(self, upload: str, file: Path, digest: str) -> bool:
        """Send the bytes of a file, or of a delta.

        Args:
            digest: of the file, also where its delta is sent.

        Returns:
            False if the server cannot make the file of this delta.
        """
        url = f"{self.url}/v1/uploads/{upload}/{file.name}"
        headers = {wire.DIGEST_HEADER: digest}
        with file.open("rb") as stream, self._connection.loss_is_an_error():
            put = self._connection.client().put(
                url, data=stream, headers=headers, allow_redirects=False
            )
            async with put as response:
                if response.status == 412:
                    return False
                await self._check(response)
        return True

    # --- state ------------------------------------------------------------------------------------

    async def health(self) -> Health:
        """Never raise: a server that cannot be reached is not ok."""
        try:
            answer = await self._connection.get("/v1/health")
            with self._connection.malformed_is_an_error():
                health = Health(**answer)
                self._version = max(self._version, health.policy_version)
        except BackendError as error:
            return Health(ok=False, detail=str(error), policy_version=self._version)
        return health

    async def metrics(self) -> BackendMetrics:
        answer = await self._connection.get("/v1/metrics")
        with self._connection.malformed_is_an_error():
            return BackendMetrics(**answer)

    # --- HTTP -------------------------------------------------------------------------------------

    async def _call(self, method: str, **arguments: Any) -> Any:
        async with contextlib.aclosing(self._lines(method, arguments)) as lines:
            async for message in lines:
                with self._connection.malformed_is_an_error():
                    self._version = max(self._version, message["policy_version"])
                    result = message["result"]
        return result

    async def _lines(
        self, method: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the messages of one answer, as :meth:`ServerConnection.lines` gives them.

        Raises:
            Exception: the error the answer ends with.
            EngineDiedError: the server is lost.
        """
        lines = self._connection.lines(f"/v1/{method}", wire.line(body))
        async with contextlib.aclosing(lines):
            async for line in lines:
                yield _message(line)

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
