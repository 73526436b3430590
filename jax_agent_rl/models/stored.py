"""Sharded parameters in a folder or bucket: each process writes and reads only what its devices hold.

::

    <folder>/v7/layers.q/…         zarr3 arrays (TensorStore), one chunk per shard of the writers' mesh
    <folder>/v7/part-<n>.json      what process n wrote: a digest per chunk
    <folder>/v7/manifest.json      all parts, written last: it publishes the version

Every process writes the shards of its own devices, one replica of each. A reader fetches the chunks
that overlap its devices' shards, each once, and checks its digest. The weight update carries the
manifest's digest, so a manifest of another version is noticed, too.

Addresses are TensorStore key-value stores: ``gs://bucket/path/``, ``s3://…``; a plain path is a
folder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.sharding import Bounds, local_bounds, shard_bounds
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, check, digest, rounded

MANIFEST = "manifest.json"
# A version that a power cut destroys is published again: no need to wait for the disk.
_CONTEXT = {"file_io_sync": False}


def address(folder: str) -> str:
    """Return a folder or bucket as a TensorStore address, with a trailing slash."""
    return (folder if "://" in folder else f"file://{Path(folder).absolute()}").rstrip("/") + "/"


def version_folder(folder: str, version: int) -> str:
    """Return the address of one version."""
    return f"{address(folder)}v{version}/"


def write_part(folder: str, params: Params, *, part: int, dtype: str = AS_THEY_ARE) -> None:
    """Write this process's shards of all parameters into a version's folder, then its part file.

    Args:
        folder: address of the version.
        params: the parameters.
        part: number of this process.
        dtype: what they are rounded to.

    Raises:
        OSError: they cannot be written.
    """
    context = ts.Context(_CONTEXT)
    entries: dict[str, Any] = {}
    try:
        for name, x in ((name, rounded(x, dtype)) for name, x in _named(params)):
            chunk = x.sharding.shard_shape(x.shape)
            entries[name] = entry = {
                "shape": x.shape,
                "dtype": x.dtype.name,
                "chunk": chunk,
                "digests": {},
            }
            array = ts.open(
                _array(folder, name, entry), context=context, create=True, open=True
            ).result()
            written = []
            for shard in x.addressable_shards:
                if shard.replica_id == 0:
                    host = np.ascontiguousarray(shard.data)
                    entry["digests"][_key(shard_bounds(shard.index, x.shape), chunk)] = digest(
                        _bytes(host)
                    )
                    written.append(array[shard.index].write(host))
            for future in written:
                future.result()
        store = ts.KvStore.open(folder, context=context).result()
        store.write(f"part-{part}.json", json.dumps(entries).encode()).result()
    except ValueError as error:  # raised by TensorStore
        raise OSError(f"weights cannot be written to {folder}: {error}") from error


def publish(folder: str, *, parts: int) -> str:
    """Publish a version that ``parts`` processes have written; return the digest of its manifest.

    Raises:
        OSError: a part is missing, or the manifest cannot be written.
    """
    try:
        store = ts.KvStore.open(folder, context=ts.Context(_CONTEXT)).result()
        whole: dict[str, Any] = {}
        for part in range(parts):
            found = store.read(f"part-{part}.json").result()
            if found.state != "value":
                raise OSError(
                    f"process {part} has not written its part of {folder}; its log says why"
                )
            for name, entry in json.loads(found.value).items():
                whole.setdefault(name, {**entry, "digests": {}})["digests"] |= entry["digests"]
        manifest = json.dumps(whole).encode()
        store.write(MANIFEST, manifest).result()
    except ValueError as error:
        raise OSError(f"{folder} cannot be published: {error}") from error
    return digest(manifest)


def remove(folder: str) -> None:
    """Delete everything below an address, if there is anything."""
    root, _, last = folder.rstrip("/").rpartition("/")
    store = ts.KvStore.open(f"{root}/").result()
    store.delete_range(ts.KvStore.KeyRange(f"{last}/", f"{last}0")).result()  # "0" follows "/"
    if folder.startswith("file://"):
        _remove_empty(Path(folder.removeprefix("file://")))


def _remove_empty(folder: Path) -> None:
    """Remove empty folders, which only file systems have."""
    for inner in sorted(folder.rglob("*"), reverse=True):
        inner.rmdir()
    if folder.is_dir():
        folder.rmdir()


class StoredParams:
    """One published version.

    Args:
        folder: its address.
        manifest_digest: returned by :func:`publish`; None skips the check.

    Raises:
        WeightUpdateError: the version is missing, or has another digest.
    """

    def __init__(self, folder: str, *, manifest_digest: str | None = None) -> None:
        self._folder = address(folder)
        self.bytes_read = 0
        """Bytes of chunks read so far."""
        try:
            found = ts.KvStore.open(self._folder).result().read(MANIFEST).result()
        except ValueError as error:
            raise WeightUpdateError(f"weights at {self._folder} cannot be read: {error}") from error
        if found.state != "value":
            raise WeightUpdateError(
                f"there are no weights at {self._folder} (no {MANIFEST}): every engine has to see"
                " the folder that rollout.weight_dir names, and the versions before the newest are"
                " deleted"
            )
        if manifest_digest is not None:
            check(f"{self._folder}{MANIFEST}", digest(found.value), manifest_digest)
        self._entries: Mapping[str, Any] = json.loads(found.value)

    def read(self, shapes: Params, *, dtype: jnp.dtype, shardings: Params) -> Params:
        """Read parameters with the given shardings; each process reads only the chunks its devices' shards overlap.

        Args:
            shapes: a shape per parameter.
            dtype: of the result.
            shardings: a sharding per parameter.

        Raises:
            WeightUpdateError: the model differs, or a chunk is missing or damaged.
        """
        wanted, places = dict(_named(shapes)), dict(_named(shardings))
        found = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}
        if found != wanted:
            wrong = next(
                name for name in sorted(found | wanted) if found.get(name) != wanted.get(name)
            )
            raise WeightUpdateError(
                f"the update does not fit the model served: {wrong} is"
                f" {found.get(wrong, 'missing')}, served is {wanted.get(wrong, 'nothing')};"
                f" {self._folder} is of another model"
            )
        arrays = [self._read(name, places[name], dtype) for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(shardings), arrays)

    def _read(self, name: str, place: jax.sharding.Sharding, dtype: jnp.dtype) -> jax.Array:
        """Read one parameter, its chunks concurrently."""
        shape = tuple(self._entries[name]["shape"])
        shards = local_bounds(place, shape)
        chunks = self._fetch(
            name, {b for bounds in shards.values() for b in self._overlapping(name, bounds)}
        )
        parts: dict[Bounds, np.ndarray] = {}
        for bounds in shards.values():
            if bounds not in parts:
                parts[bounds] = _assembled(bounds, chunks).astype(dtype, copy=False)
        arrays = [jax.device_put(parts[bounds], device) for device, bounds in shards.items()]
        return jax.make_array_from_single_device_arrays(shape, place, arrays)

    def _overlapping(self, name: str, bounds: Bounds) -> Iterator[Bounds]:
        chunk = self._entries[name]["chunk"]
        ranges = (
            (range(b // size, -(-e // size))) for (b, e), size in zip(bounds, chunk, strict=True)
        )
        for at in itertools.product(*ranges):
            yield tuple((i * size, (i + 1) * size) for i, size in zip(at, chunk, strict=True))

    def _fetch(self, name: str, wanted: set[Bounds]) -> dict[Bounds, np.ndarray]:
        entry = self._entries[name]
        try:
            array = ts.open(_array(self._folder, name, entry), open=True).result()
            reads = {
                bounds: array[tuple(slice(b, e) for b, e in bounds)].read() for bounds in wanted
            }
            chunks = {
                bounds: np.ascontiguousarray(future.result()) for bounds, future in reads.items()
            }
        except ValueError as error:
            raise WeightUpdateError(f"{name} at {self._folder} cannot be read: {error}") from error
        for bounds, chunk in chunks.items():
            key = _key(bounds, entry["chunk"])
            check(
                f"{self._folder}{name} chunk {key}",
                digest(_bytes(chunk)),
                entry["digests"].get(key, "none"),
            )
            self.bytes_read += chunk.nbytes
        return chunks


def _assembled(bounds: Bounds, chunks: Mapping[Bounds, np.ndarray]) -> np.ndarray:
    """Assemble the part of an array within bounds from chunks that cover it."""
    if bounds in chunks:
        return chunks[bounds]
    first, *_ = chunks.values()
    whole = np.empty([e - b for b, e in bounds], first.dtype)
    for at, chunk in chunks.items():
        common = [(max(b, c), min(e, d)) for (b, e), (c, d) in zip(bounds, at, strict=True)]
        if all(begin < end for begin, end in common):
            there = tuple(
                slice(b - own, e - own) for (b, e), (own, _) in zip(common, bounds, strict=True)
            )
            here = tuple(
                slice(b - own, e - own) for (b, e), (own, _) in zip(common, at, strict=True)
            )
            whole[there] = chunk[here]
    return whole


def _array(folder: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": list(entry["chunk"])}}
    metadata = {"shape": list(entry["shape"]), "chunk_grid": grid, "data_type": entry["dtype"]}
    return {"driver": "zarr3", "kvstore": f"{folder}{name}/", "metadata": metadata}


def _named(tree: Params) -> Iterator[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return ((".".join(key.key for key in path), x) for path, x in leaves)


def _key(bounds: Bounds, chunk: tuple[int, ...]) -> str:
    return "/".join(str(begin // size) for (begin, _), size in zip(bounds, chunk, strict=True))


def _bytes(x: np.ndarray) -> memoryview:
    return x.reshape(-1).view(np.uint8).data
