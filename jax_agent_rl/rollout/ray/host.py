"""The engine inside an actor: a backend whose errors are returned as values.

Plain classes, tested without Ray. Ray would wrap an exception in one of its own; here errors come back as values
(:mod:`~jax_agent_rl.rollout.http.wire`), and an exception means that the actor itself is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.errors import BackendClosedError, JaxAgentRLError
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, RolloutBackend
from jax_agent_rl.rollout.ray.weights import Fetch, await_reference, from_object_store

logger = logging.getLogger(__name__)
_EXPECTED = (JaxAgentRLError, NotImplementedError, ValueError, KeyError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Result of a call.

    Attributes:
        value: what it returned.
        error: what it raised instead, encoded.
        policy_version: of the engine after the call.
    """

    value: Any = None
    error: dict[str, str] | None = None
    policy_version: int = 0


class EngineHost:
    """One backend, whose methods are called by name from another process.

    Args:
        make: builds the backend; may load files for minutes.
        fetch: returns stored weights by their reference.
    """

    def __init__(self, make: Callable[[], RolloutBackend], fetch: Fetch = await_reference) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray limits its workers to one thread; the engine decides for itself
        self._make = make
        self._fetch = fetch
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
        backend = from_object_store(await asyncio.to_thread(self._make), self._fetch)
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
        version = self._backend.policy_version if self._backend is not None else 0
        return Answer(policy_version=version, **fields)

    def _failed(self, method: str, error: Exception) -> Answer:
        if not isinstance(error, _EXPECTED):
            logger.error("%s failed", method, exc_info=error)
        return self._result(error=wire.encode_error(error))
