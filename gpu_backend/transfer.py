"""Weights from device to device on CUDA, without files, through vLLM's own weight-transfer interface.

The learner's jax arrays are viewed by torch (DLPack), copied into memory torch allocated (only that can be exported),
and handed to vLLM's workers as CUDA-IPC handles. Learner and engine must share the GPU. Between machines, NCCL is the
seam beside this one: the same four calls, with ``WeightTransferConfig(backend="nccl")`` and a torch process group that
the learner joins. Neither runs on a machine without CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.utils.weight_probe import LogprobProbe


@dataclass(frozen=True, kw_only=True)
class DeviceWeights:
    """Payload of a ``WeightUpdate(kind="cuda_ipc")``.

    Attributes:
        tensors: Hugging Face names to arrays on this GPU that speak DLPack (jax or torch).
        probe: see :class:`LogprobProbe`.
    """

    tensors: Mapping[str, Any]
    probe: LogprobProbe | None = None


async def load_from_device(engine: Any, weights: DeviceWeights) -> None:
    """Loads the tensors into ``engine`` (``AsyncLLM`` with ``weight_transfer_config={"backend": "ipc"}``).

    The tensors are exported one by one with their handles sent in one message; the copies live until vLLM is done.
    """
    import torch
    from torch.multiprocessing.reductions import reduce_tensor
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    device = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    copies = {name: torch.from_dlpack(array).clone() for name, array in weights.tensors.items()}
    torch.cuda.synchronize(device)
    info = {
        "names": list(copies),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in copies.values()],
        "shapes": [list(t.shape) for t in copies.values()],
        "ipc_handles": [{uuid: reduce_tensor(t)[1]} for t in copies.values()],
    }
    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"packed": False}))
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
    await engine.finish_weight_update()
    del copies
    torch.cuda.ipc_collect()
