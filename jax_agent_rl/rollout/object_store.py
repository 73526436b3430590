"""Weights in Ray's object store: written once, read without copies, checked before use.

::

    learner   offer: arrays, or files ──► reference and fingerprint in a WeightUpdate
    engine    fetch ──► check ──► arrays, or files, as the engine loads them

Tensors are stored as unsigned integers: Ray returns those as views of shared memory, while it would
copy arrays of types that NumPy itself does not know (bfloat16).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 by name)
import numpy as np

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import (
    ARRAYS,
    BROADCAST,
    FILES,
    OBJECT_STORE,
    RolloutBackend,
    WeightUpdate,
)
from jax_agent_rl.rollout.transport import (
    Engines,
    ScoreProbe,
    WeightSource,
    WeightTransport,
    fetching,
)
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.fingerprints import fingerprint
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, rounded

GetObject = Callable[[Any], Awaitable[Any]]
"""Returns a stored object by its reference."""


Tensor = tuple[str, np.ndarray]
"""A stored array: the name of its type, and its numbers as unsigned integers of that size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The payload of an update in the object store.

    Attributes:
        form: kind of the update that was stored: a nested dict of arrays, or files by name.
        reference: reference of the stored object (``ray.ObjectRef``), which lives as long as it.
        fingerprint: of the stored object: names, types, shapes and bytes.
    """

    form: Literal["arrays", "safetensors"]
    reference: Any
    fingerprint: str


@dataclass
class ObjectStoreTransport(WeightTransport):
    """Offers another transport's weights in Ray's object store, to engines in Ray actors.

    Args:
        source: makes the update in the engines' form.
        score_probe: None if the source adds a probe, and for a learner of several processes.
    """

    source: WeightTransport
    engines: Engines
    score_probe: ScoreProbe | None = None
    _newest: WeightUpdate | None = None

    def offer(self, learner: WeightSource, version: int) -> WeightUpdate:
        """Store all parameters once; the previous version is freed when no engine reads it."""
        import ray

        dtype = self.engines.weight_dtype()
        update = store(self.source.offer(learner, version), ray.put, dtype=dtype)
        if self.score_probe is not None:
            update = replace(update, probe=self.score_probe(learner.params, dtype=dtype))
        self._newest = update
        return update

    def release(self) -> None:
        self._newest = None
        self.source.release()


def store(
    update: WeightUpdate, put: Callable[[Any], Any], *, dtype: str = AS_THEY_ARE
) -> WeightUpdate:
    """Write the weights of an update to the store; return an update that refers to them.

    Args:
        update: of kind ``arrays`` (nested dicts) or ``safetensors`` (paths).
        put: writes an object to the store; returns its reference.
        dtype: what arrays are rounded to; files are as their update says.
    """
    if update.kind == FILES:
        form = FILES
        tree = {}
        for path in update.payload:
            tree[Path(path).name] = _pack(np.memmap(path, np.uint8, mode="r"))
    else:
        form = ARRAYS
        tree = _map(lambda name, array: _pack(rounded(array, dtype, name)), update.payload)
        update = replace(update, dtype=dtype)
    payload = StoredWeights(form=form, reference=put(tree), fingerprint=fingerprint(tree))
    return replace(update, kind=OBJECT_STORE, payload=payload, lasting=True)


async def await_reference(reference: Any) -> Any:
    """Get an object from Ray's store, whose references can be awaited."""
    return await reference


@asynccontextmanager
async def fetch(
    update: WeightUpdate, *, get: GetObject = await_reference
) -> AsyncIterator[WeightUpdate]:
    """Yield the update as an engine loads it: views of the store, or files in shared memory.

    They are valid within the context.

    Args:
        update: from :func:`store`.
        get: returns a stored object by its reference.

    Raises:
        WeightUpdateError: the payload is no :class:`StoredWeights`, or the store returns other
            bytes than were written.
    """
    stored = update.payload
    if not isinstance(stored, StoredWeights):
        raise WeightUpdateError(f"payload must be StoredWeights, got {type(stored).__name__}")

    tree = await get(stored.reference)
    found = await asyncio.to_thread(fingerprint, tree)
    if found != stored.fingerprint:
        raise WeightUpdateError(
            f"the weights of version {update.version} were damaged on their way: their fingerprint"
            f" is {found}, it was {stored.fingerprint} when they were written; publish them again"
        )

    if stored.form == ARRAYS:
        yield replace(update, kind=ARRAYS, payload=_map(lambda _, tensor: _unpack(tensor), tree))
        return

    folder = make_temp_folder("jax_agent_rl-fetched-", in_memory=True)
    try:
        paths = await asyncio.to_thread(_write_files, tree, folder)
        yield replace(update, kind=FILES, payload=paths)
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


def _write_files(tree: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write files that were stored under their names; return their paths, in order of names."""
    paths = []
    for name in sorted(tree):
        path = folder / Path(name).name
        _unpack(tree[name]).tofile(path)
        paths.append(str(path))
    return paths
