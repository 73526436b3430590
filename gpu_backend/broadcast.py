"""Weights from the learner's device to vLLM's workers on other hosts.

They travel by NCCL between GPUs, and by gloo between CPUs::

    learner   sending(update) ──► address and names of the tensors ──► engine
                  │                                                      │
                  │                                                receive(…) in each worker
                  └────────────── each tensor, in order, broadcast ──────┘ ──► load_weights

A group of processes lasts for one update of one engine: an engine that died, or that is not there
yet, holds nobody up. Engines are served one after the other, because NCCL's groups on one device
must not overlap. Like NCCL itself, the transfer is neither encrypted nor authenticated; it listens
at the address at which Ray knows the learner's node.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # documented, though not in __all__
)

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate

JOIN_SECONDS = 120.0
TRANSFER_SECONDS = 600.0
_ARRIVALS = "arrivals"
_POLL_SECONDS = 0.01
_transfer_lock = threading.Lock()
"""Held while tensors are sent: NCCL's groups on one device must not overlap."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What a worker needs to join.

    Attributes:
        host: address where the group meets.
        port: port where it meets.
        receivers: number of workers of the engine.
        backend: ``nccl`` or ``gloo``.
        tensors: dtype and shape of each tensor by name, in the order in which they are sent.
    """

    host: str
    port: int
    receivers: int
    backend: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


@contextlib.asynccontextmanager
async def sending(
    update: WeightUpdate, *, receivers: int, host: str
) -> AsyncIterator[WeightUpdate]:
    """Yield an update as its engine takes it, and send its tensors meanwhile.

    Args:
        update: of kind ``broadcast``: Hugging Face names to arrays of this process on one device.
        receivers: number of workers of the engine.
        host: address of this machine that the engine reaches.

    Raises:
        WeightUpdateError: not all workers came, or one was lost.
    """
    sender = await asyncio.to_thread(_Sender, update.payload, receivers, host)
    transfer = asyncio.create_task(asyncio.to_thread(sender.run))
    # Retrieve its exception, also where nobody waits for the task any more.
    transfer.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        yield replace(update, payload=sender.announcement)
        await transfer
    finally:
        sender.cancelled.set()  # it stops waiting for receivers


class _Sender:
    """Rank 0 of a group.

    Args:
        arrays: the update's; any that support DLPack.
        receivers: number of workers of the engine.
        host: address to listen at.
    """

    def __init__(self, arrays: Mapping[str, Any], receivers: int, host: str) -> None:
        self._tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        self.cancelled = threading.Event()
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=JOIN_SECONDS),
        )

        backend = "gloo"
        tensors = {}
        for name, tensor in self._tensors.items():
            if tensor.is_cuda:
                backend = "nccl"
            tensors[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        self.announcement = Announcement(
            host=host, port=port, receivers=receivers, backend=backend, tensors=tensors
        )

    def run(self) -> None:
        """Wait for all receivers, then send everything."""
        host = self.announcement.host
        receivers = self.announcement.receivers
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            arrived = self._store.add(_ARRIVALS, 0)
            if arrived >= receivers:
                break
            if self.cancelled.wait(_POLL_SECONDS):
                return
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"{arrived} of {receivers} workers of the engine came to"
                    f" {host}:{self.announcement.port} for new weights within {JOIN_SECONDS:g} s;"
                    " is the address within reach of the engine's node?"
                )

        with _transfer_lock:
            try:
                group = _join(self._store, 0, receivers + 1, self.announcement.backend, host)
                for tensor in self._tensors.values():
                    _broadcast(group, tensor)
            except RuntimeError as error:
                raise WeightUpdateError(
                    f"a worker of the engine was lost while weights were sent: {error}"
                ) from error


def receive(announcement: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, on this worker's device, as they arrive.

    Args:
        announcement: the fields of :class:`Announcement`.
    """
    host = announcement["host"]
    port = announcement["port"]
    backend = announcement["backend"]
    store = TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_SECONDS),
    )
    rank = store.add(_ARRIVALS, 1)

    # Connecting a datagram socket sends nothing, and shows which address of this machine the
    # sender is reached from.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.connect((host, port))
        address = connection.getsockname()[0]
    group = _join(store, rank, announcement["receivers"] + 1, backend, address)

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    for name, (dtype, shape) in announcement["tensors"].items():
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
        _broadcast(group, tensor)
        yield name, tensor


def _join(store: TCPStore, rank: int, size: int, backend: str, address: str) -> Any:
    """Return the group, once all its members are there."""
    limit = timedelta(seconds=TRANSFER_SECONDS)
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        settings = ProcessGroupNCCL.Options()
        settings._timeout = limit
        return ProcessGroupNCCL(store, rank, size, settings)
    # torch's stub lacks these options.
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = limit
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    data = tensor.reshape(-1).view(torch.uint8)  # gloo lacks some types
    group.broadcast([data], options).wait()
