"""One engine as the rollout sees it: a :class:`RolloutBackend`, its running requests, and the weight-update dance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from jax_agent_rl.errors import BackendError, EngineDiedError
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, TokenChunk, WeightUpdate
from jax_agent_rl.types import PauseMode, TokenOutput

OnIds = Callable[[Sequence[int]], None]
"""Is told newly sampled ids of one request; must be quick and must not raise."""

OnChunk = Callable[[TokenChunk], None]
"""Likewise, with their log-probs and versions."""


@dataclass(frozen=True, kw_only=True)
class ServingStats:
    """How the servers of a client fared, since it was made.

    Attributes:
        servers_up: in rotation now.
        servers_lost: that died, were cut off, stalled or fell behind.
        servers_joined: that entered the rotation after the first request.
        stale_served: tokens older than the weights that were served when their part of a request began; 0, or an
            engine served what it should have replaced.
    """

    servers_up: int
    servers_lost: int
    servers_joined: int
    stale_served: int


class AsyncServer:
    """Serves one backend (one data-parallel replica of the engine).

    Args:
        backend: the engine; started and closed with the server.
        name: unique among the servers of a client.
    """

    def __init__(self, backend: RolloutBackend, *, name: str = "server-0"):
        self.backend = backend
        self.name = name
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._waits: set[asyncio.Timeout] = set()
        self._abandoned = ""
        self._updating = False
        self.has_answered = False
        """Whether it has finished a request: it works, or did."""

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that are inside the backend."""
        return frozenset(self._running)

    @property
    def updating(self) -> bool:
        """Whether it takes weights, so that its requests stand still."""
        return self._updating

    async def start(self) -> None:
        await self.backend.start()

    async def close(self) -> None:
        await self.backend.close()

    def abandon(self, reason: str) -> None:
        """What waits for the backend fails at once with ``EngineDiedError``, whatever the backend does; for good."""
        self._abandoned = reason
        for deadline in self._waits:
            deadline.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _until_abandoned(self) -> AsyncIterator[None]:
        if self._abandoned:
            raise EngineDiedError(self._abandoned)
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self._waits.add(deadline)
                try:
                    yield
                finally:
                    self._waits.discard(deadline)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineDiedError(self._abandoned) from None

    async def generate(self, request: GenerateRequest, *, on_chunk: OnChunk | None = None) -> TokenOutput:
        """Runs one request.

        Args:
            request: what to sample.
            on_chunk: called with what is sampled, as it is sampled, where the backend streams.

        Raises:
            BackendError: the backend failed it, or cannot do what it asks for.
        """
        if missing := request.multi_modal.keys() - self.backend.capabilities.multi_modal:
            raise BackendError(f"request {request.request_id!r}: {self.name} takes no {sorted(missing)} input")
        if request.lora is not None and not self.backend.capabilities.lora:
            raise BackendError(
                f"request {request.request_id!r}: {self.name} serves no LoRA adapter, so not {request.lora!r} either"
            )
        self._running.add(request.request_id)
        self._idle.clear()
        try:
            async with self._until_abandoned():
                if on_chunk is None or not self.backend.capabilities.streaming:
                    output = await self.backend.generate(request)
                else:
                    output = await self._stream(request, on_chunk)
            self.has_answered = True
            return output
        finally:
            self._running.discard(request.request_id)
            if not self._running:
                self._idle.set()

    async def _stream(self, request: GenerateRequest, on_chunk: OnChunk) -> TokenOutput:
        stream = cast(AsyncGenerator[TokenChunk, None], self.backend.stream(request))  # closing it frees the slot
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                on_chunk(chunk)
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def abort(self, request_id: str) -> bool:
        """Ends a request with ``StopReason.ABORTED``; False if it is not here."""
        return await self.backend.abort(request_id)

    async def evacuate(self) -> None:
        """Aborts everything, so that the client resumes it on other servers; does nothing if it cannot abort."""
        if self.backend.capabilities.abort:
            await asyncio.gather(*(self.backend.abort(request_id) for request_id in self.running))

    async def drain(self) -> None:
        """Waits until nothing runs; new requests have to be kept away."""
        await self._idle.wait()

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Pauses, takes the weights, resumes (also when the weights were refused).

        Args:
            update: the new weights.
            mode: what happens to running requests; None picks the gentlest the backend can do: keep them if
                weights may change under them, else abort them (the client resumes them), else wait for them.

        Raises:
            WeightUpdateError: refused; the old weights still serve.
            EngineDiedError: the backend died of it, or was abandoned.
        """
        self._updating = True
        try:
            async with self._until_abandoned():
                await self._take(update, mode or self._gentlest_pause())
        finally:
            self._updating = False

    async def _take(self, update: WeightUpdate, mode: PauseMode | None) -> None:
        if mode is None:
            await self.backend.update_weights(update)
            return
        try:
            await self.backend.pause(mode)
            await self.backend.update_weights(update)
        finally:  # a pause that was called off may have taken hold
            if not self._abandoned:  # it might never answer
                await self.backend.resume()

    def _gentlest_pause(self) -> PauseMode | None:
        capabilities = self.backend.capabilities
        if capabilities.in_flight_update and PauseMode.KEEP in capabilities.pause_modes:
            return PauseMode.KEEP
        return next((mode for mode in (PauseMode.ABORT, PauseMode.WAIT) if mode in capabilities.pause_modes), None)


class ServerLifecycle(Protocol):
    """Who looks after a client's servers; see :class:`~jax_agent_rl.rollout.lifecycle.LLMServerManager`."""

    def lost(self, server: AsyncServer, why: str) -> None:
        """A server is about to leave the rotation."""
        ...

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Does what :meth:`~jax_agent_rl.rollout.client.LLMServerClient.update_weights` promises."""
        ...


async def take_weights(
    servers: Iterable[AsyncServer], update: WeightUpdate, *, mode: PauseMode | None = None
) -> dict[AsyncServer, BaseException | None]:
    """Updates servers side by side; what each of them said, None where it took the weights."""
    servers = list(servers)
    updates = (server.update_weights(update, mode=mode) for server in servers)
    return dict(zip(servers, await asyncio.gather(*updates, return_exceptions=True), strict=True))
