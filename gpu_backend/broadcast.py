"""Weights from the learner's device to vLLM's workers on other hosts: by NCCL between GPUs, by gloo between CPUs.

::

    learner   sending(update) ──► address and names of the tensors, to the engine ──► receive(…) in each worker
                  └────────────── each tensor, in order, broadcast ───────────────────────┘ ──► load_weights

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
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]  # its documented place, which __all__ leaves out
)

from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.rollout.protocol import WeightUpdate

JOIN_SECONDS, TRANSFER_SECONDS = 120.0, 600.0
_ARRIVALS = "arrivals"
_POLL_SECONDS = 0.01
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """What a worker needs to join.

    Attributes:
        host, port: where the group meets.
        receivers: workers of the engine.
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
        receivers: workers of the engine.
        host: address of this machine that the engine reaches.

    Raises:
        WeightUpdateError: not all workers came, or one was lost.
    """
    sender = await asyncio.to_thread(_Sender, update.payload, receivers, host)
    running = asyncio.create_task(asyncio.to_thread(sender.run))
    running.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # where nobody waits for it any more
    try:
        yield replace(update, payload=sender.announcement)
        await running
    finally:
        sender.cancelled.set()  # it stops waiting for receivers


class _Sender:
    """Rank 0 of a group.

    Args:
        arrays: those of the update; any that support DLPack.
        receivers: workers of the engine.
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
        described = {
            name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in self._tensors.items()
        }
        on_gpu = any(tensor.is_cuda for tensor in self._tensors.values())
        backend = "nccl" if on_gpu else "gloo"
        self.announcement = Announcement(
            host=host, port=port, receivers=receivers, backend=backend, tensors=described
        )

    def run(self) -> None:
        """Wait for all receivers, then send everything."""
        where, receivers = (
            f"{self.announcement.host}:{self.announcement.port}",
            self.announcement.receivers,
        )
        deadline = time.monotonic() + JOIN_SECONDS
        while (arrived := self._store.add(_ARRIVALS, 0)) < receivers:
            if self.cancelled.wait(_POLL_SECONDS):
                return
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"{arrived} of {receivers} workers of the engine came to {where} for new"
                    f" weights within {JOIN_SECONDS:g} s; is the address within reach of the"
                    " engine's node?"
                )
        with _one_at_a_time:
            try:
                group = _join(
                    self._store, 0, receivers + 1, self.announcement.backend, self.announcement.host
                )
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
    host, port, backend = announcement["host"], announcement["port"], announcement["backend"]
    limit = timedelta(seconds=JOIN_SECONDS)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    rank = store.add(_ARRIVALS, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address = probe.getsockname()[0]  # of this machine, from which the other one is reached
    group = _join(store, rank, announcement["receivers"] + 1, backend, address)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if backend == "nccl"
        else torch.device("cpu")
    )
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
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # torch's stub lacks it
    options._timeout = limit
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast(
        [tensor.reshape(-1).view(torch.uint8)], options
    ).wait()  # bytes: gloo lacks some types
