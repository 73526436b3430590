"""Transports of weights: the learner offers a version, an engine in whatever process fetches it.

::

    learner   offer(learner, version) ──► WeightUpdate ──► ServerPool, to all engines at once
                                                               │
    AsyncServer                    pause ──► update_weights ──► resume
                                                 │
    engine                         fetch(update) ──► weights as it loads them ──► check, load

A transport is named by the ``kind`` of its updates. It is made of a :class:`WeightTransport`, the
learner's end, and, where engines do not open the payload themselves, of a :data:`Fetch`, the
engine's end. Whatever it is, :class:`~jax_agent_rl.rollout.server.AsyncServer` pauses the engine.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from jax_agent_rl.rollout.protocol import (
    BROADCAST,
    FILES,
    OBJECT_STORE,
    Capabilities,
    RolloutBackend,
    WeightUpdate,
)
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.weight_transfer import LogprobProbe

Fetch = Callable[[WeightUpdate], AbstractAsyncContextManager[WeightUpdate]]
"""Yields an update as the engine loads it, valid within the context."""

GetObject = Callable[[Any], Awaitable[Any]]
"""Returns an object of Ray's store by its reference."""


class WeightSource(Protocol):
    """The parameters of a learner, to be published."""

    @property
    def params(self) -> dict[str, Any]:
        """All parameters, on device."""
        ...


class Engines(Protocol):
    """The engines of a run: a :class:`~jax_agent_rl.rollout.pool.ServerPool`."""

    def weight_dtype(self) -> str:
        """Return ``Capabilities.weight_dtype`` of the engines that will take the next update."""
        ...

    def weight_payloads(self) -> frozenset[str]:
        """Return the kinds of updates that all engines take."""
        ...


class ScoreProbe(Protocol):
    """Scores the sequences that verify an update, with the learner's parameters."""

    def __call__(self, params: dict[str, Any], *, dtype: str) -> LogprobProbe: ...


class WeightTransport(ABC):
    """The learner's end of a transport."""

    @abstractmethod
    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Make a version of the weights available, in place of the previous one.

        Raises:
            WeightUpdateError: it could not be written.
            OSError: a process of the learner could not write.
        """

    @abstractmethod
    def release(self) -> None:
        """Free all that was offered."""


def fetching(
    backend: RolloutBackend, kind: str, fetch: Fetch, *, passes: str | None = None
) -> RolloutBackend:
    """Return a backend that fetches weights of one kind, in place of the kinds that it takes.

    Args:
        kind: kind of the updates that are fetched.
        fetch: the engine's end of their transport.
        passes: another kind, which goes to the backend as it is.
    """
    return cast(RolloutBackend, FetchingBackend(backend, kind, fetch, passes))


@dataclass(eq=False)
class FetchingBackend:
    """The backend of :func:`fetching`."""

    backend: RolloutBackend
    kind: str
    fetch: Fetch
    passes: str | None

    @property
    def capabilities(self) -> Capabilities:
        capabilities = self.backend.capabilities
        passed = capabilities.weight_payloads & {self.passes}
        return replace(capabilities, weight_payloads=passed | {self.kind})

    async def update_weights(self, update: WeightUpdate) -> None:
        if update.kind == self.passes:
            await self.backend.update_weights(update)
            return
        update.require_kind({self.kind})
        async with self.fetch(update) as fetched:
            await self.backend.update_weights(fetched)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


# --- files in Ray's object store ------------------------------------------------------------------


@dataclass
class ObjectStoreTransport(WeightTransport):
    """Offers files in Ray's object store, to engines in Ray actors: each node gets them once."""

    files: WeightTransport

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        import ray

        return store_files(self.files.offer(learner, version), ray.put)

    def release(self) -> None:
        self.files.release()


def store_files(update: WeightUpdate, put: Callable[[Any], Any]) -> WeightUpdate:
    """Write an update's files to the store; return an update that refers to them.

    Args:
        put: writes an object to the store; returns its reference, which the object lives as long
            as.
    """
    contents = {}
    for path in update.payload:
        contents[Path(path).name] = np.asarray(np.memmap(path, np.uint8, mode="r"))
    return replace(update, kind=OBJECT_STORE, payload=put(contents))


async def await_reference(reference: Any) -> Any:
    """Get an object from Ray's store, whose references can be awaited."""
    return await reference


@asynccontextmanager
async def fetch_files(
    update: WeightUpdate, *, get: GetObject = await_reference
) -> AsyncIterator[WeightUpdate]:
    """Yield an update of stored files with their paths, in shared memory if there is some."""
    contents = await get(update.payload)
    folder = make_temp_folder("jax_agent_rl-fetched-", in_memory=True)
    try:
        paths = await asyncio.to_thread(_write_files, contents, folder)
        yield replace(update, kind=FILES, payload=paths)
    finally:
        remove_temp_folder(folder)


def _write_files(contents: Mapping[str, np.ndarray], folder: Path) -> list[str]:
    paths = []
    for name, content in contents.items():
        path = folder / name
        content.tofile(path)
        paths.append(str(path))
    return paths


def from_object_store(
    backend: RolloutBackend, *, get: GetObject = await_reference
) -> RolloutBackend:
    """Return a backend whose weights come from the object store, or by broadcast."""
    return fetching(
        backend, OBJECT_STORE, functools.partial(fetch_files, get=get), passes=BROADCAST
    )
