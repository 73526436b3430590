"""Transports of weights: the learner offers a version, an engine in whatever process fetches it.

::

    learner   offer(learner, version) ──► WeightUpdate ──► ServerPool, to all engines at once
                                                               │
    AsyncServer                    pause ──► update_weights ──► resume     (or pause before offer)
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
from typing import Any, ClassVar, Protocol, cast

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 by name)
import numpy as np

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import (
    ARRAYS,
    BROADCAST,
    FILES,
    OBJECT_STORE,
    Capabilities,
    RolloutBackend,
    WeightUpdate,
)
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.fingerprints import fingerprint
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, LogprobProbe, check_digest, rounded

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
    """The learner's end of a transport.

    Attributes:
        takes_engines_memory: new weights are made in the memory of those that are served, so that
            engines have to be paused before weights are offered.
    """

    takes_engines_memory: ClassVar[bool] = False

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


# --- Ray's object store ---------------------------------------------------------------------------

Tensor = tuple[str, np.ndarray]
"""A stored array: the name of its type, and its numbers as unsigned integers of that size.

Ray returns these as views of shared memory, while it would copy arrays of types that NumPy itself
does not know (bfloat16).
"""


@dataclass
class ObjectStoreTransport(WeightTransport):
    """Offers another transport's weights in Ray's object store, to engines in Ray actors.

    They are written once, and are once on every node.

    Args:
        source: makes the update in the engines' form: arrays or files.
        score_probe: None if the source adds a probe, and for a learner of several processes.
    """

    source: WeightTransport
    engines: Engines
    score_probe: ScoreProbe | None = None

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        import ray

        dtype = self.engines.weight_dtype()
        update = store(self.source.offer(learner, version), ray.put, dtype=dtype)
        if self.score_probe is not None:
            update = replace(update, probe=self.score_probe(learner.params, dtype=dtype))
        return update

    def release(self) -> None:
        self.source.release()


def store(
    update: WeightUpdate, put: Callable[[Any], Any], *, dtype: str = AS_THEY_ARE
) -> WeightUpdate:
    """Write the weights of an update to the store; return an update that refers to them.

    Args:
        update: of kind ``arrays`` (nested dicts) or ``safetensors`` (paths).
        put: writes an object to the store; returns its reference, which the object lives as long
            as.
        dtype: what arrays are rounded to; files are as their update says.
    """
    contents: dict[str, Any] = {}
    if update.kind == FILES:
        for path in update.payload:
            contents[Path(path).name] = np.asarray(np.memmap(path, np.uint8, mode="r"))
    else:
        contents = _map(lambda name, array: _pack(rounded(array, dtype, name)), update.payload)
        update = replace(update, dtype=dtype, digests={ARRAYS: fingerprint(contents)})
    payload = (update.kind, put(contents))
    return replace(update, kind=OBJECT_STORE, payload=payload, lasting=True)


async def await_reference(reference: Any) -> Any:
    """Get an object from Ray's store, whose references can be awaited."""
    return await reference


@asynccontextmanager
async def fetch(
    update: WeightUpdate, *, get: GetObject = await_reference
) -> AsyncIterator[WeightUpdate]:
    """Yield the update as an engine loads it: views of the store, or files in shared memory.

    Args:
        update: from :func:`store`.
        get: returns a stored object by its reference.

    Raises:
        WeightUpdateError: the payload is none of :func:`store`, or arrays have another digest than
            the update. Of files, the engine finds it.
    """
    if not isinstance(update.payload, tuple) or len(update.payload) != 2:
        raise WeightUpdateError(
            f"the payload of version {update.version} is {type(update.payload).__name__}, and no"
            " kind and reference to Ray's store"
        )
    kind, reference = update.payload
    contents = await get(reference)
    if kind == ARRAYS:
        if update.digests:
            digest = await asyncio.to_thread(fingerprint, contents)
            check_digest(f"version {update.version} in Ray's store", digest, update.digests[ARRAYS])
        yield replace(update, kind=kind, payload=_map(lambda _, tensor: _unpack(tensor), contents))
        return

    folder = make_temp_folder("jax_agent_rl-fetched-", in_memory=True)
    try:
        paths = await asyncio.to_thread(_write_files, contents, folder)
        yield replace(update, kind=kind, payload=paths)
    finally:
        remove_temp_folder(folder)


def from_object_store(
    backend: RolloutBackend, *, get: GetObject = await_reference
) -> RolloutBackend:
    """Return a backend whose weights come from the object store, or by broadcast."""
    return fetching(backend, OBJECT_STORE, functools.partial(fetch, get=get), passes=BROADCAST)


def _pack(array: Any) -> Tensor:
    """Copy a NumPy or device array only if it is not in C order on the host already."""
    host_array = np.asarray(array, order="C")
    return host_array.dtype.name, host_array.view(f"u{host_array.dtype.itemsize}")


def _unpack(tensor: Tensor) -> np.ndarray:
    """Return the array, a view of the stored one."""
    dtype, numbers = tensor
    return numbers.view(dtype)


def _map(function: Callable[[str, Any], Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with ``function(name, value)`` in place of every value."""
    mapped = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            mapped[name] = _map(function, value)
        else:
            mapped[name] = function(name, value)
    return mapped


def _write_files(contents: Mapping[str, np.ndarray], folder: Path) -> list[str]:
    paths = []
    for name, content in contents.items():
        path = folder / Path(name).name  # none outside of the folder
        content.tofile(path)
        paths.append(str(path))
    return paths
