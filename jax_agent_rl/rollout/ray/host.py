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
from dataclasses import dataclass, replace
from typing import Any

from jax_agent_rl.errors import BackendClosedError, JaxAgentRLError
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.protocol import Capabilities, GenerateRequest, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.ray.weights import KIND, Fetch, fetched

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


async def await_reference(reference: Any) -> Any:
    """Fetch an object from Ray's object store, whose references can be awaited."""
    return await reference


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

    async def call(self, method: str, *arguments: Any) -> Answer:
        """Call any method of the protocol but ``start`` and ``stream``."""
        if method == "update_weights":
            return await self._answer(self._update_weights, *arguments)
        return await self._answer(lambda: getattr(self._serving(), method)(*arguments))

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

    async def _update_weights(self, update: WeightUpdate) -> None:
        backend = self._serving()
        async with fetched(update, self._fetch) as given:
            await backend.update_weights(given)

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


class ObjectStoreBackend:
    """A backend of this process, beside others in actors, that takes its weights from the same object store."""

    def __init__(self, backend: RolloutBackend, fetch: Fetch = await_reference) -> None:
        self._backend = backend
        self._fetch = fetch

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._backend.capabilities, weight_payloads=frozenset({KIND}))

    async def update_weights(self, update: WeightUpdate) -> None:
        async with fetched(update, self._fetch) as given:
            await self._backend.update_weights(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
