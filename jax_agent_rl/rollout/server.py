"""One engine as the rollout sees it: its backend, running requests and weight updates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import cast

from jax_agent_rl.errors import BackendError, EngineDiedError, WeightUpdateError
from jax_agent_rl.rollout.protocol import GenerateRequest, RolloutBackend, TokenChunk, WeightUpdate
from jax_agent_rl.types import PauseMode, TokenOutput
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE

logger = logging.getLogger(__name__)

_EVACUATE_TIMEOUT_SECONDS = 2.0
"""Time limit of a lost server for returning what its requests have sampled."""

_CLOSE_TIMEOUT_SECONDS = 30.0

OnIds = Callable[[Sequence[int]], None]
"""Called with newly sampled ids of one request; must be quick and must not raise."""

OnChunk = Callable[[TokenChunk], None]
"""Called with newly sampled ids, their log-probs and versions; must be quick and must not raise."""


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
        self._deadlines: set[asyncio.Timeout] = set()  # of calls that wait for the backend
        self._abandoned = ""  # the reason, once it is
        self.updating = False
        """Whether it is taking weights, so that its requests stand still."""
        self.has_answered = False
        """Whether it has ever finished a request."""

    @property
    def running(self) -> frozenset[str]:
        """Ids of the requests that are inside the backend."""
        return frozenset(self._running)

    async def close_quietly(self, *, timeout: float | None = None) -> None:
        """Close a server that may be in any state, within ``timeout`` seconds; log what fails."""
        try:
            async with asyncio.timeout(timeout):
                await self.backend.close()
        except Exception as error:
            logger.warning("server %s failed to close: %r", self.name, error)

    async def end(self, why: str) -> None:
        """Abort the requests, fail those that the backend cannot return any more, and close."""
        try:
            async with asyncio.timeout(_EVACUATE_TIMEOUT_SECONDS):
                await self.evacuate()
        except Exception as error:
            logger.info("server %s returned nothing: %r", self.name, error)
        self.abandon(why)
        await self.close_quietly(timeout=_CLOSE_TIMEOUT_SECONDS)

    def abandon(self, why: str) -> None:
        """Fail every call that waits for the backend, now and later, with ``EngineDiedError``.

        Of several reasons, the first is given.
        """
        if not self._abandoned:
            self._abandoned = f"server {self.name} is lost: {why}"
        while self._deadlines:
            # Each only once: a deadline that is about to fire cannot be rescheduled.
            self._deadlines.pop().reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _until_abandoned(self) -> AsyncIterator[None]:
        """Raise ``EngineDiedError`` in the context once the server is abandoned."""
        if self._abandoned:
            raise EngineDiedError(self._abandoned)
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineDiedError(self._abandoned) from None

    async def generate(
        self, request: GenerateRequest, *, on_chunk: OnChunk | None = None
    ) -> TokenOutput:
        """Run one request.

        Args:
            on_chunk: called with chunks as they are sampled, if the backend streams.

        Raises:
            BackendError: the request failed, or asks for what the backend cannot do.
        """
        capabilities = self.backend.capabilities
        missing = request.multi_modal.keys() - capabilities.multi_modal
        if missing:
            raise BackendError(
                f"request {request.request_id!r}: {self.name} takes no {sorted(missing)} input"
            )
        if request.lora is not None and not capabilities.lora:
            raise BackendError(
                f"request {request.request_id!r}: {self.name} serves no LoRA adapter, so not"
                f" {request.lora!r} either"
            )

        self._running.add(request.request_id)
        self._idle.clear()
        try:
            async with self._until_abandoned():
                if on_chunk is None or not capabilities.streaming:
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
        stream = cast(AsyncGenerator[TokenChunk, None], self.backend.stream(request))
        async with contextlib.aclosing(stream) as chunks:  # closing it frees the slot
            async for chunk in chunks:
                on_chunk(chunk)
                if chunk.final is not None:
                    return chunk.final
        raise BackendError(f"request {request.request_id!r} ended without a result")

    async def evacuate(self) -> None:
        """Abort all requests, so that the client resumes them elsewhere.

        Do nothing if the backend cannot abort.
        """
        if self.backend.capabilities.abort:
            await asyncio.gather(*(self.backend.abort(request_id) for request_id in self.running))

    async def drain(self) -> None:
        """Wait until nothing runs; the caller keeps new requests away."""
        await self._idle.wait()

    def takes(self, update: WeightUpdate) -> bool:
        """Return whether the weights are unrounded, or rounded as the engine would round them."""
        return update.dtype in (AS_THEY_ARE, self.backend.capabilities.weight_dtype)

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Pause before new weights are made, until :meth:`update_weights` or :meth:`resume`.

        Args:
            mode: what happens to running requests, see :meth:`update_weights`.

        Raises:
            EngineDiedError: the backend died, or the server was abandoned.
        """
        self.updating = True
        mode = mode or self._gentlest_pause()
        async with self._until_abandoned():
            if mode is not None:
                await self.backend.pause(mode)

    async def resume(self) -> None:
        """End a pause, also one that an update has ended.

        Raises:
            EngineDiedError: the backend died, or the server was abandoned.
        """
        self.updating = False
        async with self._until_abandoned():
            if self._gentlest_pause() is not None:
                await self.backend.resume()

    async def update_weights(self, update: WeightUpdate, *, mode: PauseMode | None = None) -> None:
        """Pause, take the weights, and resume (also if the weights were refused).

        Args:
            mode: what happens to running requests; None picks the gentlest mode of the backend:
                keep them if weights may change under them, else abort them (the client resumes
                them), else wait for them.

        Raises:
            WeightUpdateError: refused; says which weights are served now, if any.
            EngineDiedError: the backend died, or the server was abandoned.
        """
        if not self.takes(update):
            raise WeightUpdateError(
                f"server {self.name} takes weights in {self.backend.capabilities.weight_dtype}, but"
                f" those of version {update.version} are rounded to {update.dtype}: it joined after"
                " they were made; it gets the next ones"
            )
        self.updating = True
        try:
            async with self._until_abandoned():
                await self._update_paused(update, mode or self._gentlest_pause())
        finally:
            self.updating = False

    async def _update_paused(self, update: WeightUpdate, mode: PauseMode | None) -> None:
        """Take weights in a pause of this mode; None: without a pause."""
        if mode is None:
            await self.backend.update_weights(update)
            return
        try:
            await self.backend.pause(mode)
            await self.backend.update_weights(update)
        finally:  # a cancelled pause may have taken effect
            if not self._abandoned:  # it might never answer
                await self.backend.resume()

    def _gentlest_pause(self) -> PauseMode | None:
        """Return the mode that disturbs running requests least; None if there is none."""
        capabilities = self.backend.capabilities
        modes = [PauseMode.ABORT, PauseMode.WAIT]
        if capabilities.in_flight_update:
            modes.insert(0, PauseMode.KEEP)
        for mode in modes:
            if mode in capabilities.pause_modes:
                return mode
        return None
