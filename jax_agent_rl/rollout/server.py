"""One engine as the rollout sees it: a :class:`RolloutBackend`, its running requests, and the weight-update dance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, TokenChunk, WeightUpdate
from jax_agent_rl.types import PauseMode, TokenOutput

OnIds = Callable[[Sequence[int]], None]
"""Is told newly sampled ids of one request; must be quick and must not raise."""


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

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that are inside the backend."""
        return frozenset(self._running)

    async def start(self) -> None:
        await self.backend.start()

    async def close(self) -> None:
        await self.backend.close()

    async def generate(self, request: GenerateRequest, *, on_ids: OnIds | None = None) -> TokenOutput:
        """Runs one request.

        Args:
            request: what to sample.
            on_ids: called with new ids as they are sampled, where the backend streams.

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
        try:
            if on_ids is None or not self.backend.capabilities.streaming:
                return await self.backend.generate(request)
            return await self._stream(request, on_ids)
        finally:
            self._running.discard(request.request_id)

    async def _stream(self, request: GenerateRequest, on_ids: OnIds) -> TokenOutput:
        stream = cast(AsyncGenerator[TokenChunk, None], self.backend.stream(request))  # closing it frees the slot
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                on_ids(chunk.token_ids)
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

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Pauses, takes the weights, resumes (also when the weights were refused).

        Args:
            update: the new weights.
            mode: what happens to running requests; None picks the gentlest the backend can do: keep them if
                weights may change under them, else abort them (the client resumes them), else wait for them.

        Raises:
            WeightUpdateError: refused; the old weights still serve.
        """
        mode = mode or self._gentlest_pause()
        if mode is None:
            await self.backend.update_weights(update)
            return
        await self.backend.pause(mode)
        try:
            await self.backend.update_weights(update)
        finally:
            await self.backend.resume()

    def _gentlest_pause(self) -> PauseMode | None:
        capabilities = self.backend.capabilities
        if capabilities.in_flight_update and PauseMode.KEEP in capabilities.pause_modes:
            return PauseMode.KEEP
        return next((mode for mode in (PauseMode.ABORT, PauseMode.WAIT) if mode in capabilities.pause_modes), None)
