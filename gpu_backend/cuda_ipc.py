"""Weights in the memory of a GPU, from the learner to vLLM's workers on the same machine.

::

    learner   export(arrays) ──► plain handles ──► engine ──► receive(handles) in each worker

Nothing is copied on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.multiprocessing import reductions


def export(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Make arrays of this process readable by processes of the same machine.

    torch views the learner's jax arrays (DLPack) and copies them into memory of its own: only that
    can be exported.

    Args:
        arrays: on one GPU, by name; any that support DLPack.

    Returns:
        What workers need (``gpu_backend.worker.InPlaceUpdateInfo``), without pickle, and the
        copies, which must live until they have read them.
    """
    device = torch.cuda.current_device()
    copies = {name: torch.from_dlpack(array).clone() for name, array in arrays.items()}
    torch.cuda.synchronize(device)
    handles = {}
    for name, copy in copies.items():
        _, arguments = reductions.reduce_tensor(copy)
        _, size, stride, offset, _, dtype, _, *storage = cast(tuple[Any, ...], arguments)
        dtype_name = str(dtype).removeprefix("torch.")
        handles[name] = [list(size), list(stride), offset, dtype_name, *storage]
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"handles": handles, "device_uuid": uuid}, list(copies.values())


def receive(
    handles: Mapping[str, Sequence[Any]], device_uuid: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, in the memory of the GPU that holds it.

    Args:
        handles: from :func:`export`, by name.

    Raises:
        ValueError: this process does not see that GPU.
    """
    uuids = []
    for number in range(torch.cuda.device_count()):
        uuids.append(str(torch.cuda.get_device_properties(number).uuid))
    if device_uuid not in uuids:
        raise ValueError(
            f"this worker does not see the learner's GPU {device_uuid}, but {uuids}; let"
            " CUDA_VISIBLE_DEVICES also name it"
        )
    device = uuids.index(device_uuid)
    for name, (size, stride, offset, dtype_name, *storage) in handles.items():
        tensor = reductions.rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size(size),
            tuple(stride),
            offset,
            torch.storage.TypedStorage,
            getattr(torch, dtype_name),
            device,
            *storage,
        )
        yield name, tensor
