"""A policy's weights in Ray's object store: written once, read without copies, checked before use.

::

    learner   store(tree) ──► put ──► StoredWeights (reference, checksum) in a WeightUpdate
    engine    fetch(reference) ──► checksum ──► "arrays" or "safetensors", as the engine takes them

Tensors are stored as plain bytes with their type and shape: Ray returns those as views of shared
memory, while it would copy arrays of types that NumPy itself does not know (bfloat16).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 by name)
import numpy as np
import xxhash

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import BROADCAST, RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.proxy import TransportBackend
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, rounded

KIND = "object_store"
"""Kind of a :class:`WeightUpdate` whose payload is a :class:`StoredWeights`."""

Form = Literal["arrays", "safetensors"]
Fetch = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One stored array.

    Attributes:
        data: uint8 [bytes], in C order.
        dtype: name of the type.
        shape: shape of the array.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any, dtype: str = AS_THEY_ARE) -> Tensor:
        """Store a NumPy or device array, perhaps rounded.

        Copy it only if it is not in C order on the host already.
        """
        host_array = np.ascontiguousarray(rounded(array, dtype))
        return cls(
            data=host_array.reshape(-1).view(np.uint8),
            dtype=host_array.dtype.name,
            shape=tuple(np.shape(array)),
        )

    def array(self) -> np.ndarray:
        """Return the array, a view of the data."""
        return self.data.view(np.dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The payload of an update of kind :data:`KIND`.

    Attributes:
        form: form of the stored object: a nested dict of arrays, or safetensors files by name.
        reference: reference of the stored object (``ray.ObjectRef``).
        checksum: :func:`checksum` of the stored object.
    """

    form: Form
    reference: Any
    checksum: str


def store(
    update: WeightUpdate, put: Callable[[Any], Any], *, dtype: str = AS_THEY_ARE
) -> WeightUpdate:
    """Write the weights of an update to the store; return an update that refers to them.

    Args:
        update: of kind ``arrays`` (nested dicts) or ``safetensors`` (paths).
        put: writes an object to the store; returns its reference. The object lives as long as the
            reference.
        dtype: what arrays are rounded to; files are as their update says.
    """
    form: Form
    if update.kind == "safetensors":
        form = "safetensors"
        tree = {}
        for path in update.payload:
            tree[Path(path).name] = Tensor.of(np.memmap(path, np.uint8, mode="r"))
    else:
        form = "arrays"
        tree = _map(functools.partial(Tensor.of, dtype=dtype), update.payload)
        update = replace(update, dtype=dtype)
    payload = StoredWeights(form=form, reference=put(tree), checksum=checksum(tree))
    return replace(update, kind=KIND, payload=payload, lasting=True)


async def await_reference(reference: Any) -> Any:
    """Fetch an object from Ray's object store, whose references can be awaited."""
    return await reference


def from_object_store(backend: RolloutBackend, fetch: Fetch = await_reference) -> RolloutBackend:
    """Return the backend with weights from the object store.

    Args:
        fetch: returns an object by its reference.
    """
    receive = functools.partial(fetched, fetch=fetch)
    return cast(
        RolloutBackend, TransportBackend(backend, KIND, receive, passes=frozenset({BROADCAST}))
    )


@asynccontextmanager
async def fetched(update: WeightUpdate, fetch: Fetch) -> AsyncIterator[WeightUpdate]:
    """Yield the update as an engine takes it: views of the store, or files in shared memory.

    They are valid within the context.

    Args:
        update: of kind :data:`KIND`.
        fetch: returns an object by its reference.

    Raises:
        WeightUpdateError: the payload is no :class:`StoredWeights`, or the store returns other
            bytes than were written.
    """
    stored = update.payload
    if not isinstance(stored, StoredWeights):
        raise WeightUpdateError(f"payload must be StoredWeights, got {type(stored).__name__}")

    tree = await fetch(stored.reference)
    fetched_checksum = await asyncio.to_thread(checksum, tree)
    if fetched_checksum != stored.checksum:
        raise WeightUpdateError(
            f"the weights of version {update.version} were damaged on their way: their checksum is"
            f" {fetched_checksum}, it was {stored.checksum} when they were written; publish them"
            " again"
        )

    if stored.form == "arrays":
        yield replace(update, kind="arrays", payload=_map(Tensor.array, tree))
        return

    folder = make_temp_folder("jax_agent_rl-fetched-", in_memory=True)
    try:
        files = await asyncio.to_thread(_write, tree, folder)
        yield replace(update, kind="safetensors", payload=files)
    finally:
        remove_temp_folder(folder)


def checksum(tree: Mapping[str, Any]) -> str:
    """Return the XXH3-128 digest of all tensors, in order of their names, in hexadecimal.

    It covers names, types, shapes and bytes.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in _leaves(tree):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.data.data)
    return digest.hexdigest()


def _leaves(tree: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    for name in sorted(tree, key=str):
        value = tree[name]
        if isinstance(value, Tensor):
            yield f"{path}/{name}", value
        else:
            yield from _leaves(value, f"{path}/{name}")


def _map(function: Callable[[Any], Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    mapped = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            mapped[name] = _map(function, value)
        else:
            mapped[name] = function(value)
    return mapped


def _write(tree: Mapping[str, Tensor], folder: Path) -> list[str]:
    """Write files that were stored under their names; return their paths, in order of names."""
    paths = []
    for name in sorted(tree):
        path = folder / Path(name).name
        tree[name].data.tofile(path)
        paths.append(str(path))
    return paths
