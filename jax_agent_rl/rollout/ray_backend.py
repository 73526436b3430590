"""A rollout backend in a Ray actor: any backend in a process of its own, on any node of a cluster.

::

    RayBackend ──Ray calls──► EngineHost ──► any RolloutBackend, made in the actor

An actor that died, or that Ray cannot reach, is lost: its requests fail with ``EngineDiedError``,
and :class:`~jax_agent_rl.rollout.client.LLMServerClient` sends them on. Ray would wrap an engine's
exception in one of its own; so errors come back as values
(:mod:`~jax_agent_rl.rollout.http.wire`), and an exception means that the actor itself is lost.
:class:`EngineHost` is a plain class, tested without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import BackendClosedError, BackendError, EngineDiedError, JaxAgentRLError
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.protocol import (
    BackendMetrics,
    Capabilities,
    GenerateRequest,
    Health,
    RolloutBackend,
    TokenChunk,
    WeightUpdate,
)
from jax_agent_rl.rollout.proxy import ProxyBackend
from jax_agent_rl.types import TokenOutput
from jax_agent_rl.utils.services import ENGINE_START_SECONDS

logger = logging.getLogger(__name__)
_EXPECTED = (JaxAgentRLError, NotImplementedError, ValueError, KeyError)
_MAX_CALLS = 1 << 14
"""Concurrent calls of an actor: control calls must never queue behind requests."""
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Result of a call.

    Attributes:
        value: what the call returned.
        error: what it raised instead, encoded.
        policy_version: the engine's policy version after the call.
    """

    value: Any = None
    error: dict[str, str] | None = None
    policy_version: int = 0


class EngineHost:
    """One backend, whose methods are called by name from another process.

    Args:
        make: builds the backend; may load files for minutes.
    """

    def __init__(self, make: Callable[[], RolloutBackend]) -> None:
        # Ray limits its workers to one thread; the engine decides for itself.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._make = make
        self._backend: RolloutBackend | None = None

    async def start(self) -> Answer:
        """Build and start the backend; the answer's value is its capabilities."""
        return await self._answer(self._start)

    async def call(self, method: str, *arguments: Any, **named: Any) -> Answer:
        """Call any method of the protocol but ``start`` and ``stream``."""
        return await self._answer(lambda: getattr(self._serving(), method)(*arguments, **named))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Answer]:
        """Yield chunks; an error comes last."""
        try:
            async with contextlib.aclosing(self._serving().stream(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield self._result(value=chunk)
        except Exception as error:
            yield self._failed("stream", error)

    async def _start(self) -> Capabilities:
        backend = await asyncio.to_thread(self._make)
        await backend.start()
        self._backend = backend
        return backend.capabilities

    async def _answer(self, call: Callable[..., Any], *arguments: Any) -> Answer:
        try:
            return self._result(value=await call(*arguments))
        except Exception as error:
            return self._failed(getattr(call, "__name__", "call"), error)

    def _serving(self) -> RolloutBackend:
        if self._backend is None:
            raise BackendClosedError("the engine of this actor was not started")
        return self._backend

    def _result(self, **fields: Any) -> Answer:
        version = 0
        if self._backend is not None:
            version = self._backend.policy_version
        return Answer(policy_version=version, **fields)

    def _failed(self, method: str, error: Exception) -> Answer:
        if not isinstance(error, _EXPECTED):
            logger.error("%s failed", method, exc_info=error)
        return self._result(error=wire.encode_error(error))


class RayBackend(ProxyBackend):
    """One actor, from :meth:`start` to :meth:`close`. Ray must be initialised.

    Args:
        make: builds the backend, inside the actor; it is sent there.
        name: shown in messages.
        options: Ray options of the actor: resources, placement and environment.
    """

    def __init__(
        self,
        make: Callable[[], RolloutBackend],
        *,
        name: str = "engine",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name)
        self._make = make
        self._options = {"num_cpus": 0, **(options or {})}
        self._actor: Any = None

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the actor and the engine in it.

        Raises:
            BackendError: the engine could not start (``EngineDiedError``: its process ended).
        """
        import ray

        if self._actor is not None:
            raise BackendError("the backend was already started")
        if self._closed:
            raise BackendClosedError(f"{self.name} is closed")

        actor_class = ray.remote(EngineHost).options(
            max_concurrency=_MAX_CALLS, max_restarts=0, **self._options
        )
        self._actor = actor_class.remote(self._make)
        try:
            async with asyncio.timeout(ENGINE_START_SECONDS) as limit:
                answer = await self._ask(self._actor.start)
            self._capabilities = self._value(answer)
        except TimeoutError:
            await self.close()
            if not limit.expired():
                raise
            raise BackendError(
                f"{self.name}: its Ray actor did not start an engine within"
                f" {ENGINE_START_SECONDS:g} seconds; see Ray's logs in /tmp/ray/session_latest/logs"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._version = answer.policy_version

    async def close(self) -> None:
        """End the engine, then the actor, also if it does not answer for 30 s or never started."""
        if self._closed:
            return
        self._closed = True
        if self._actor is None:
            return
        import ray

        try:
            if self._capabilities is not None:
                with contextlib.suppress(BackendError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        self._value(await self._ask(self._actor.call, "close"))
        finally:
            ray.kill(self._actor, no_restart=True)

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> TokenOutput:
        return await self._call("generate", request=request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        import ray

        answers = self._open().stream.options(num_returns="streaming").remote(request)
        finished = False
        try:
            with self._loss_is_an_error():
                async for reference in answers:
                    chunk = self._value(await reference)
                    finished = chunk.final is not None
                    yield chunk
        finally:
            if not finished:
                ray.cancel(answers)

    # --- weights and state ------------------------------------------------------------------------

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call("update_weights", update=update)

    async def health(self) -> Health:
        """Never raise: an engine that cannot be reached is not ok."""
        try:
            return await self._call("health")
        except BackendError as error:
            return Health(ok=False, detail=str(error), policy_version=self._version)

    async def metrics(self) -> BackendMetrics:
        return await self._call("metrics")

    # --- Ray --------------------------------------------------------------------------------------

    async def _call(self, method: str, **arguments: Any) -> Any:
        return self._value(await self._ask(self._open().call, method, **arguments))

    async def _ask(self, method: Any, *arguments: Any, **named: Any) -> Answer:
        """Call a method of the actor; cancelling the caller cancels it there as well."""
        import ray

        reference = method.remote(*arguments, **named)
        with self._loss_is_an_error():
            try:
                return await reference
            except asyncio.CancelledError:
                ray.cancel(reference)
                raise

    def _value(self, answer: Answer) -> Any:
        self._version = max(self._version, answer.policy_version)
        if answer.error is not None:
            raise wire.decode_error(answer.error)
        return answer.value

    def _open(self) -> Any:
        if self._closed:
            raise BackendClosedError(f"{self.name} is closed")
        if self._actor is None:
            raise BackendClosedError(f"{self.name} was not started")
        return self._actor

    @contextlib.contextmanager
    def _loss_is_an_error(self) -> Iterator[None]:
        """Translate Ray's errors, which concern the actor; the engine's errors come as answers."""
        from ray.exceptions import RayError

        try:
            yield
        except RayError as error:
            if self._closed:
                raise BackendClosedError(f"{self.name} was closed") from error
            lines = str(error).splitlines()
            reason = type(error).__name__
            if lines and lines[0]:
                reason = lines[0]
            raise EngineDiedError(f"{self.name}: its Ray actor is gone: {reason}") from error
