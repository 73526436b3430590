"""Parameters that a process offers on its devices, and that others pull onto theirs.

::

    learner   OfferedParams ── a copy of every shard, in the engines' precision
                   │ ticket: names, shapes, types and parts, and a number for one pull
                   ▼
    engine    pull ── is it this model? ─► connect ─► parts ─► digests ─► shards of its devices

The bytes move by JAX's transfer servers (``jax.experimental.transfer``), one at each end, which
connect to each other. They leave three things to their caller:

- A pull never fails by itself while there is no answer, whatever time it is given: a peer that is
  gone, or a number that it does not know. So :func:`pull` connects once by itself. JAX's own calls
  then return at once, and :func:`await_arrays` waits only as long as a slow network would take:
  for each part, and for all of them together.
- A peer that freezes during a pull holds up all others of its server, and what is never pulled is
  held as long as the server. So each pull has a server of its own, until the version is released.
- They answer whoever reaches their port and says the number, and a malformed message ends their
  process. So they listen on the one address through which the engine is reached, loopback for an
  engine of this machine, and on others the network has to be a trusted one.
"""

from __future__ import annotations

import importlib.metadata
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.config import Params
from jax_agent_rl.models.parameters import dtype_of
from jax_agent_rl.models.sharding import Bounds, Device, local_bounds, shard_bounds
from jax_agent_rl.models.stored import (
    chunk_key,
    named,
    overlapping_chunks,
    own_name,
    require_same,
)
from jax_agent_rl.utils import fingerprints
from jax_agent_rl.utils.fingerprints import fingerprint
from jax_agent_rl.utils.pull_tickets import OfferedParam, PullOffer, PullTicket
from jax_agent_rl.utils.weight_transfer import AS_THEY_ARE, check_digest, rounded

INSTEAD = "set rollout.weight_transport=files"
"""What helps where nothing can be pulled."""

_JAXLIB = importlib.metadata.version("jaxlib")
CONNECT_SECONDS = 10.0
STALL_SECONDS = 30.0
"""How long a part may take to begin to arrive, and how much longer all of them may take."""
LEAST_BYTES_PER_SECOND = 10e6
"""A network that is slower counts as broken."""
_POLL_SECONDS = 0.002
_STREAMS = 4
"""Connections that share the bytes of one pull."""
_BLOCK_BYTES = 16 << 20
"""Bytes copied at a time. Each server reserves three times ``_STREAMS`` blocks of host memory."""

OFFER = "offer"
"""Name of an offer's digest among those of an update."""
Part = tuple[str, Bounds]
"""A part of a parameter: the parameter's dotted name, and its bounds."""


class OfferedParams(PullOffer):
    """A copy of parameters on their devices, until it is released.

    Args:
        params: all of them on devices of this process.
        version: of the weights, for messages.
        dtype: what they are rounded to, as ``WeightUpdate.dtype``.

    Attributes:
        digest: of all that is offered: names, shapes, types, and the digests of the parts.
    """

    def __init__(self, params: Params, *, version: int, dtype: str = AS_THEY_ARE) -> None:
        self._version = version
        self._lock = threading.Lock()
        self._servers: list[Any] = []
        self._params: dict[str, OfferedParam] = {}

        copies: dict[Part, jax.Array] = {}
        for name, value in named(params).items():
            copy = rounded(value, dtype, own_name(name))
            if copy.dtype == value.dtype:
                copy = value.copy()  # the learner's next step reuses the memory of its own
            chunk = tuple(copy.sharding.shard_shape(copy.shape))
            digests = {}
            for shard in copy.addressable_shards:
                if shard.replica_id == 0:
                    bounds = shard_bounds(shard.index, copy.shape)
                    copies[name, bounds] = shard.data
                    digests[chunk_key(bounds, chunk)] = digest_of(shard.data)
            self._params[name] = OfferedParam(
                shape=copy.shape, dtype=copy.dtype.name, chunk=chunk, digests=digests
            )

        self._arrays = [copies[part] for part in parts_of(self._params)]
        self.digest = fingerprint(self._params)

    def ticket(self, interface: str) -> PullTicket:
        with self._lock:
            if not self._arrays:
                raise WeightUpdateError(
                    f"weights of version {self._version} are not offered any longer, because newer"
                    " ones are; publish those"
                )
            server = start_server(interface, next(iter(self._arrays[0].devices())))
            self._servers.append(server)
            number = secrets.randbits(63)
            server.await_pull(number, self._arrays)

        return PullTicket(
            host=interface,
            interface=interface,
            port=int(server.address().rpartition(":")[2]),
            number=number,
            jaxlib=_JAXLIB,
            params=self._params,
        )

    def release(self) -> None:
        """Free the copy, also for those that hold a ticket and have not pulled yet."""
        with self._lock:
            self._servers.clear()
            self._arrays.clear()


def start_server(interface: str, device: Device) -> Any:
    """Start JAX's transfer server on a free port.

    Args:
        interface: the address of this machine on which it listens.
        device: any of the devices from or to which it moves arrays.

    Raises:
        WeightUpdateError: this jax has none, or it cannot listen there.
    """
    try:
        from jax.experimental import transfer
    except (ImportError, AttributeError) as error:
        raise WeightUpdateError(f"this jax has no transfer server ({error}); {INSTEAD}") from error

    address = _address(interface, 0)
    try:
        return transfer.start_transfer_server(
            device.client,
            address,
            [address] * _STREAMS,
            max_num_parallel_copies=_STREAMS,
            transfer_size=_BLOCK_BYTES,
        )
    except (RuntimeError, ValueError) as error:
        raise WeightUpdateError(
            f"JAX's transfer server cannot listen on {interface}: {error}; {INSTEAD}"
        ) from error


def pull(
    ticket: PullTicket,
    shapes: Params,
    *,
    digest: str | None,
    dtype: jnp.dtype,
    shardings: Params,
    stall_seconds: float = STALL_SECONDS,
) -> Params:
    """Return parameters with the given shardings, pulled from another process's devices.

    Args:
        shapes: a shape per parameter of the model.
        digest: of the offer; None skips the check.
        dtype: of the model.
        shardings: a sharding per parameter, on devices of this process.
        stall_seconds: as for :func:`await_arrays`.

    Raises:
        WeightUpdateError: they are of another model, the learner cannot be reached, falls silent,
            is too slow or ends, or other bytes arrive than it offered.
    """
    check_ticket(ticket, shapes, digest=digest, dtype=dtype)
    by_name = named(shardings)
    parts = list(parts_of(ticket.params))
    structs = []
    for part in parts:
        structs.append(_struct(part, ticket.params[part[0]], by_name[part[0]]))

    arrays = _fetch(ticket, structs, stall_seconds)
    chunks: dict[str, dict[Bounds, jax.Array]] = {}
    for part, array in zip(parts, arrays, strict=True):
        name, bounds = part
        key = chunk_key(bounds, ticket.params[name].chunk)
        check_digest(f"{name}/{key}", digest_of(array), ticket.params[name].digests[key])
        chunks.setdefault(name, {})[bounds] = array
    arrays.clear()  # the parts of a parameter are freed once it is arranged

    params = []
    for name, sharding in by_name.items():
        shape = ticket.params[name].shape
        array = _arranged(chunks.pop(name), shape, sharding)
        params.append(array.astype(dtype_of(own_name(name), dtype)))
    return jax.tree.unflatten(jax.tree.structure(shardings), params)


def check_ticket(
    ticket: PullTicket, shapes: Params, *, digest: str | None, dtype: jnp.dtype
) -> None:
    """Check that what is offered fits a model, before anything is connected or reserved.

    Raises:
        WeightUpdateError: it does not.
    """
    if digest is not None:
        check_digest("the ticket", fingerprint(ticket.params), digest)
    if ticket.jaxlib != _JAXLIB:
        raise WeightUpdateError(
            f"the learner has jaxlib {ticket.jaxlib}, this engine {_JAXLIB}, and their"
            f" transfer servers may not understand each other; install one version, or {INSTEAD}"
        )
    offered_shapes = {name: param.shape for name, param in ticket.params.items()}
    require_same(named(shapes), offered_shapes)

    for name, param in ticket.params.items():
        own_dtype = dtype_of(own_name(name), dtype).name
        if param.dtype not in (own_dtype, AS_THEY_ARE):
            raise WeightUpdateError(
                f"the update does not fit the model served: {name} is {param.dtype}, served is"
                f" {own_dtype}; publish it in {own_dtype} or {AS_THEY_ARE}"
            )
        if not _is_complete(param):
            raise WeightUpdateError(
                f"{name}: parts of {param.chunk}, with {len(param.digests)} digests, do not make up"
                f" {param.shape}; the learner and this engine must have one version of this package"
            )


def _is_complete(param: OfferedParam) -> bool:
    """Whether equal parts, with a digest each, make up a parameter."""
    if len(param.shape) != len(param.chunk):
        return False
    count = 1
    for size, part in zip(param.shape, param.chunk, strict=True):
        if part < 1 or size % part:
            return False
        count *= size // part
    if count != len(param.digests):  # before the keys are listed, of which there may be any number
        return False
    keys = {chunk_key(bounds, param.chunk) for bounds in _chunks_of(param)}
    return keys == param.digests.keys()


def parts_of(params: Mapping[str, OfferedParam]) -> Iterator[Part]:
    """Yield all parts, in the order in which both sides number them."""
    for name in sorted(params):
        for bounds in _chunks_of(params[name]):
            yield name, bounds


def _chunks_of(param: OfferedParam) -> Iterator[Bounds]:
    """Yield the bounds of all parts of a parameter."""
    yield from overlapping_chunks(tuple((0, size) for size in param.shape), param.chunk)


def digest_of(array: jax.Array) -> str:
    """Return the digest of an array's bytes."""
    numbers = np.ascontiguousarray(array)
    return fingerprints.digest(numbers.reshape(-1).view(np.uint8).data)


def _struct(part: Part, param: OfferedParam, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """Return a part's shape, on the first device that holds some of it."""
    _, bounds = part
    for device, target in local_bounds(sharding, param.shape).items():
        if _overlap(bounds, target) is not None:
            return jax.ShapeDtypeStruct(
                param.chunk, jnp.dtype(param.dtype), sharding=SingleDeviceSharding(device)
            )
    raise AssertionError("an engine's process holds all parameters")


def _fetch(
    ticket: PullTicket, structs: Sequence[jax.ShapeDtypeStruct], stall_seconds: float
) -> list[jax.Array]:
    """Pull arrays from the process of a ticket."""
    address = _address(ticket.host, ticket.port)
    try:
        socket.create_connection((ticket.host, ticket.port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise WeightUpdateError(
            f"the learner's transfer server at {address} cannot be reached from this engine:"
            f" {error}; a firewall may be in the way, or it has newer weights by now. Open the"
            f" ports between both machines, or {INSTEAD}"
        ) from error

    # The server is kept until all has arrived, and so is the connection.
    (device,) = structs[0].sharding.device_set
    server = start_server(ticket.interface, device)
    connection = server.connect(address)
    arrays = connection.pull(ticket.number, list(structs))
    try:
        await_arrays(arrays, address, stall_seconds=stall_seconds)
    except jax.errors.JaxRuntimeError as error:
        raise WeightUpdateError(
            f"the learner at {address} ended, or lost its connection, while its weights were"
            f" pulled: {error}"
        ) from error
    return arrays


def await_arrays(
    arrays: Sequence[Any],
    address: str,
    *,
    stall_seconds: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until all arrays of a pull have arrived.

    Args:
        address: of the learner, for messages.
        stall_seconds: how long each may take, and all of them together, besides their bytes at
            ``LEAST_BYTES_PER_SECOND``.

    Raises:
        WeightUpdateError: one took longer, or all did: a learner that sends a little now and then
            would else hold up the update once for every part.
    """
    total = sum(array.nbytes for array in arrays)
    seconds = stall_seconds + total / LEAST_BYTES_PER_SECOND
    begin = now()
    arrived = 0
    for array in arrays:
        part_seconds = stall_seconds + array.nbytes / LEAST_BYTES_PER_SECOND
        part_begin = now()
        while not array.is_ready():
            if now() > part_begin + part_seconds:
                raise WeightUpdateError(
                    f"the learner at {address} sent nothing of {array.nbytes:,} bytes in"
                    f" {part_seconds:.0f} seconds: it hangs, has newer weights by now, or cannot"
                    f" connect to this engine. Open the ports between both machines, or {INSTEAD}"
                )
            if now() > begin + seconds:
                raise WeightUpdateError(
                    f"the learner at {address} sent {arrived:,} of {total:,} bytes in"
                    f" {seconds:.0f} seconds, less than {LEAST_BYTES_PER_SECOND / 1e6:.0f} MB per"
                    f" second: mend the network between both machines, or {INSTEAD}"
                )
            sleep(_POLL_SECONDS)
        array.block_until_ready()  # raises if it failed
        arrived += array.nbytes


def _arranged(
    chunks: Mapping[Bounds, jax.Array], shape: tuple[int, ...], sharding: Sharding
) -> jax.Array:
    """Return an array of a sharding, made of parts that cover it."""
    shards = []
    for device, bounds in local_bounds(sharding, shape).items():
        shards.append(_cut(chunks, bounds, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _cut(chunks: Mapping[Bounds, jax.Array], bounds: Bounds, device: Device) -> jax.Array:
    """Return the numbers within bounds on a device."""
    if bounds in chunks:
        return jax.device_put(chunks[bounds], device)

    shard: jax.Array | None = None
    for chunk_bounds, chunk in chunks.items():
        overlap = _overlap(chunk_bounds, bounds)
        if overlap is None:
            continue
        starts_in_chunk = []
        starts_in_shard = []
        for (low, _), (chunk_begin, _), (begin, _) in zip(
            overlap, chunk_bounds, bounds, strict=True
        ):
            starts_in_chunk.append(low - chunk_begin)
            starts_in_shard.append(low - begin)
        # Places are arguments of these programs, so that one is compiled for all of one shape.
        piece = jax.lax.dynamic_slice(chunk, starts_in_chunk, _sizes(overlap))
        if shard is None:
            shard = jnp.zeros(_sizes(bounds), chunk.dtype, device=device)
        shard = jax.lax.dynamic_update_slice(shard, jax.device_put(piece, device), starts_in_shard)
    assert shard is not None  # the parts cover the array
    return shard


def _overlap(one: Bounds, other: Bounds) -> Bounds | None:
    """Return the bounds that two have in common; None if there are none."""
    common = []
    for (begin, end), (other_begin, other_end) in zip(one, other, strict=True):
        low = max(begin, other_begin)
        high = min(end, other_end)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)


def _sizes(bounds: Bounds) -> list[int]:
    return [end - begin for begin, end in bounds]


def _address(host: str, port: int) -> str:
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"
