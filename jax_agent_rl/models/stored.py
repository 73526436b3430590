"""Sharded parameters in a folder or bucket.

Each process writes and reads only the parts that its devices hold::

    <folder>/v7/layers.q/c/0/2   a chunk: the numbers of a shard of the writers' mesh, in C order
    <folder>/v7/part-<n>.json    what process n wrote: shapes, types, and a digest per chunk
    <folder>/v7/manifest.json    all parts, written last: it publishes the version

Every process writes the shards of its own devices, one replica of each. A reader fetches the chunks
that overlap its devices' shards, each once, and checks their digests. The weight update carries the
manifest's digest, so that a manifest of another version is noticed as well.

Addresses are TensorStore key-value stores: ``gs://bucket/path/``, ``s3://…``; a plain path is a
folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.parameters import dtype_of
from jax_agent_rl.models.sharding import Bounds, local_bounds, shard_bounds
from jax_agent_rl.utils.fingerprints import digest
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, check_digest, rounded

MANIFEST = "manifest.json"
# A version that a power cut destroys is published again: no need to wait for the disk.
_CONTEXT = {"file_io_sync": False}


def address(folder: str) -> str:
    """Return a folder or bucket as a TensorStore address, with a trailing slash."""
    if "://" not in folder:
        folder = f"file://{Path(folder).absolute()}"
    return folder.rstrip("/") + "/"


def version_folder(folder: str, version: int) -> str:
    """Return the address of one version."""
    return f"{address(folder)}v{version}/"


def write_part(folder: str, params: Params, *, part: int, dtype: str = AS_THEY_ARE) -> None:
    """Write this process's shards of all parameters into a version's folder, then its part file.

    Args:
        folder: address of the version.
        part: number of this process.
        dtype: what the parameters are rounded to.

    Raises:
        OSError: they cannot be written.
    """
    entries: dict[str, Any] = {}
    try:
        store = ts.KvStore.open(folder, context=ts.Context(_CONTEXT)).result()
        for name, value in named(params).items():
            entries[name] = _write_shards(store, name, rounded(value, dtype, own_name(name)))
        store.write(f"part-{part}.json", json.dumps(entries).encode()).result()
    except ValueError as error:  # raised by TensorStore
        raise OSError(f"weights cannot be written to {folder}: {error}") from error


def _write_shards(store: ts.KvStore, name: str, x: jax.Array) -> dict[str, Any]:
    """Write this process's shards of a parameter; return its entry of the part file."""
    chunk = x.sharding.shard_shape(x.shape)
    digests: dict[str, str] = {}
    writes = []
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            data = np.asarray(shard.data).tobytes()
            key = chunk_key(shard_bounds(shard.index, x.shape), chunk)
            digests[key] = digest(data)
            writes.append(store.write(f"{name}/{key}", data))
    for write in writes:
        write.result()
    return {"shape": x.shape, "dtype": x.dtype.name, "chunk": chunk, "digests": digests}


def publish(folder: str, *, parts: int) -> str:
    """Publish a version that ``parts`` processes have written; return the digest of its manifest.

    Raises:
        OSError: a part is missing, or the manifest cannot be written.
    """
    try:
        store = ts.KvStore.open(folder, context=ts.Context(_CONTEXT)).result()
        entries: dict[str, Any] = {}
        for part in range(parts):
            stored = store.read(f"part-{part}.json").result()
            if stored.state != "value":
                raise OSError(
                    f"process {part} has not written its part of {folder}; its log says why"
                )
            # A tensor may be in parts of several processes.
            for name, entry in json.loads(stored.value).items():
                if name in entries:
                    entries[name]["digests"] |= entry["digests"]
                else:
                    entries[name] = entry

        manifest = json.dumps(entries).encode()
        store.write(MANIFEST, manifest).result()
    except ValueError as error:
        raise OSError(f"{folder} cannot be published: {error}") from error
    return digest(manifest)


def store(folder: str, params: Params, *, dtype: str = AS_THEY_ARE) -> str:
    """Write and publish a version from a sole process; return the digest of its manifest.

    Raises:
        OSError: it cannot be written.
    """
    write_part(folder, params, part=0, dtype=dtype)
    return publish(folder, parts=1)


def remove(folder: str) -> None:
    """Delete everything below an address, if there is anything."""
    if folder.startswith("file://"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(unquote(folder.removeprefix("file://")))  # a URL, as TensorStore reads it
        return
    parent, _, name = folder.rstrip("/").rpartition("/")
    store = ts.KvStore.open(f"{parent}/").result()
    # All keys that begin with the name and "/"; the character after "/" is "0".
    store.delete_range(ts.KvStore.KeyRange(f"{name}/", f"{name}0")).result()


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
            self._store = ts.KvStore.open(self._folder).result()
            manifest = self._store.read(MANIFEST).result()
        except ValueError as error:
            raise WeightUpdateError(f"weights at {self._folder} cannot be read: {error}") from error
        if manifest.state != "value":
            raise WeightUpdateError(
                f"there are no weights at {self._folder} (no {MANIFEST}): every engine has to see"
                " the folder that rollout.weight_dir names, and the versions before the newest are"
                " deleted"
            )
        if manifest_digest is not None:
            check_digest(f"{self._folder}{MANIFEST}", digest(manifest.value), manifest_digest)
        self._entries: Mapping[str, Any] = json.loads(manifest.value)

    def read(self, shapes: Params, *, dtype: jnp.dtype, shardings: Params) -> Params:
        """Read parameters with the given shardings.

        Each process reads only the chunks that its devices' shards overlap.

        Args:
            shapes: a shape per parameter.
            dtype: of the result.
            shardings: a sharding per parameter.

        Raises:
            WeightUpdateError: the model differs, or a chunk is missing or damaged.
        """
        stored_shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}
        require_same(named(shapes), stored_shapes)
        arrays = []
        for name, sharding in named(shardings).items():
            arrays.append(self._read(name, sharding, dtype_of(own_name(name), dtype)))
        return jax.tree.unflatten(jax.tree.structure(shardings), arrays)

    def _read(self, name: str, sharding: jax.sharding.Sharding, dtype: jnp.dtype) -> jax.Array:
        """Read one parameter, its chunks concurrently."""
        shape = tuple(self._entries[name]["shape"])
        shards = local_bounds(sharding, shape)
        overlapping: set[Bounds] = set()
        for bounds in shards.values():
            overlapping.update(overlapping_chunks(bounds, self._entries[name]["chunk"]))
        chunks = self._fetch_chunks(name, overlapping)

        # Devices may hold the same part.
        parts: dict[Bounds, np.ndarray] = {}
        for bounds in shards.values():
            if bounds not in parts:
                parts[bounds] = _assemble(bounds, chunks).astype(dtype, copy=False)
        arrays = [jax.device_put(parts[bounds], device) for device, bounds in shards.items()]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def _fetch_chunks(self, name: str, all_bounds: set[Bounds]) -> dict[Bounds, np.ndarray]:
        """Read chunks of a parameter, given by their bounds, and check their digests."""
        entry = self._entries[name]
        reads = {}
        for bounds in all_bounds:
            key = chunk_key(bounds, entry["chunk"])
            reads[key] = bounds, self._store.read(f"{name}/{key}")

        chunks: dict[Bounds, np.ndarray] = {}
        while reads:
            key, (bounds, read) = reads.popitem()  # frees TensorStore's copy
            chunk_address = f"{self._folder}{name}/{key}"
            try:
                data = read.result().value  # empty if there is none
                check_digest(chunk_address, digest(data), entry["digests"].get(key, "none"))
                chunks[bounds] = np.frombuffer(data, entry["dtype"]).reshape(entry["chunk"])
            except (ValueError, TypeError) as error:
                raise WeightUpdateError(f"{chunk_address} cannot be read: {error}") from error
            self.bytes_read += len(data)
        return chunks


def _assemble(bounds: Bounds, chunks: Mapping[Bounds, np.ndarray]) -> np.ndarray:
    """Assemble the part of an array within bounds from chunks that cover it."""
    if bounds in chunks:
        return chunks[bounds]

    any_chunk = next(iter(chunks.values()))
    part = np.empty([end - begin for begin, end in bounds], any_chunk.dtype)
    for chunk_bounds, numbers in chunks.items():
        part_index = []
        chunk_index = []
        overlaps = True
        for (begin, end), (chunk_begin, chunk_end) in zip(bounds, chunk_bounds, strict=True):
            low = max(begin, chunk_begin)
            high = min(end, chunk_end)
            overlaps = overlaps and low < high
            part_index.append(slice(low - begin, high - begin))
            chunk_index.append(slice(low - chunk_begin, high - chunk_begin))
        if overlaps:
            part[tuple(part_index)] = numbers[tuple(chunk_index)]
    return part


def named(tree: Params) -> dict[str, Any]:
    """Return the leaves of a tree, or tuples in place of leaves, by their dotted names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def own_name(name: str) -> str:
    """Return a parameter's own name, the last part of its dotted one."""
    return name.rpartition(".")[2]


def require_same(served: Mapping[str, Any], update: Mapping[str, Any]) -> None:
    """Check that an update has the parameters of the model that is served.

    Args:
        served: the model's shapes, perhaps with types, by dotted name.
        update: the same of the update.

    Raises:
        WeightUpdateError: they differ; names the first parameter.
    """
    for name in sorted(served.keys() | update.keys()):
        if served.get(name) != update.get(name):
            raise WeightUpdateError(
                f"the update does not fit the model served: {name} is"
                f" {update.get(name, 'missing')}, served is {served.get(name, 'nothing')}; it is of"
                " another model"
            )


def overlapping_chunks(bounds: Bounds, chunk: Sequence[int]) -> Iterator[Bounds]:
    """Yield the bounds of the chunks that overlap with some bounds of a parameter.

    Args:
        chunk: size of a chunk in every dimension.
    """
    ranges = []
    for (begin, end), size in zip(bounds, chunk, strict=True):
        first = begin // size
        stop = -(-end // size)  # rounded up
        ranges.append(range(first, stop))
    for indices in itertools.product(*ranges):
        yield tuple((i * size, (i + 1) * size) for i, size in zip(indices, chunk, strict=True))


def chunk_key(bounds: Bounds, chunk: Sequence[int]) -> str:
    """Return a chunk's key from its index in every dimension, such as ``c/0/2``."""
    indices = [str(begin // size) for (begin, _), size in zip(bounds, chunk, strict=True)]
    return "/".join(["c", *indices])
