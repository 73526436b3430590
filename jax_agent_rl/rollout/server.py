"""One engine as the rollout sees it: a :class:`RolloutBackend`, its running requests, and the weight-update dance."""

from __future__ import annotations

import asyncio

from jax_agent_rl.errors import BackendError
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, WeightUpdate
from jax_agent_rl.types import PauseMode, TokenOutput


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

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        """Runs one request.

        Raises:
            BackendError: the backend failed it, or cannot do what it asks for.
        """
        if missing := request.multi_modal.keys() - self.backend.capabilities.multi_modal:
            raise BackendError(f"request {request.request_id!r}: {self.name} takes no {sorted(missing)} input")
        self._running.add(request.request_id)
        try:
            return await self.backend.generate(request)
        finally:
            self._running.discard(request.request_id)

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
