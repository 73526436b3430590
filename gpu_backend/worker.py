"""The part of weight updates that runs inside vLLM's worker processes.

vLLM imports this module in every worker before it builds the model. :class:`InPlaceTransferEngine`
then takes the weights of vLLM's own calls (``start_weight_update``, ``update_weights``,
``finish_weight_update``). :class:`WeightExtension` is mixed into the worker class for what those do
not offer, and called by name through ``collective_rpc``.
"""

# pyright: reportMissingImports=false
# vLLM is not installed where types are checked.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
)
from vllm.platforms import current_platform

from gpu_backend import broadcast, cuda_ipc, tpu_weights
from gpu_backend.settings import TRANSFER
from jax_agent_rl.models.tensors import TensorSample


@dataclass
class InPlaceInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before."""


@dataclass
class InPlaceUpdateInfo(WeightTransferUpdateInfo):
    """One part of an update: ``paths``, ``handles`` or ``broadcast``.

    Attributes:
        paths: safetensors files.
        handles: tensors in the memory of a GPU of this machine, by name; see
            ``gpu_backend.cuda_ipc``.
        device_uuid: the GPU of the handles.
        broadcast: fields of a :class:`~gpu_backend.broadcast.Announcement`.
    """

    paths: list[str] = field(default_factory=list)
    handles: dict[str, list[Any]] = field(default_factory=dict)
    device_uuid: str = ""
    broadcast: dict[str, Any] = field(default_factory=dict)


class InPlaceTransferEngine(WeightTransferEngine[InPlaceInitInfo, InPlaceUpdateInfo]):
    """Copies tensors into the served model in place.

    The model's own loader fuses and slices; it raises for unknown names. The engines that vLLM
    brings reload layer by layer between start and finish, which leaves a tied output matrix stale
    on CPUs, and breaks the model when only some tensors are named.
    """

    init_info_cls = InPlaceInitInfo
    update_info_cls = InPlaceUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InPlaceInitInfo) -> None:
        """Do nothing: each update brings what it needs."""

    def start_weight_update(self) -> None:
        """Do nothing: the model stays as it is."""

    def receive_weights(self, update_info: InPlaceUpdateInfo) -> None:
        if update_info.broadcast:
            tensors = broadcast.receive(update_info.broadcast)
        elif update_info.handles:
            tensors = cuda_ipc.receive(update_info.handles, update_info.device_uuid)
        else:
            tensors = _read_files(update_info.paths)
        with torch.no_grad():
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Do nothing: every tensor was complete when it was loaded."""

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""


class WeightExtension:
    """Methods added to vLLM's worker. ``self`` is the worker."""

    def replace_tpu_weights(self, paths: Sequence[str]) -> None:
        """Replace the parameters of a TPU worker, whose ``update_weights`` does nothing."""
        worker: Any = self
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            tpu_weights.replace_weights(worker.model_runner, _read_files(paths))
        worker.synchronize_device()

    def why_not_replaceable(self) -> str | None:
        """Return why this TPU worker's weights cannot be replaced; None if they can."""
        worker: Any = self
        return tpu_weights.why_not_replaceable(worker.model_runner)

    def weights_not_landed(
        self, paths: Sequence[str], placements: Mapping[str, Sequence[Any]]
    ) -> list[str]:
        """Return the names of tensors that differ between the model and the files.

        Args:
            paths: the files that were loaded.
            placements: tensor name to (parameter, first row, rows, transposed, expert or None).
        """
        worker: Any = self
        parameters = _named_parameters(worker.model_runner.get_model())
        missing = []
        for name, tensor in _read_files(paths):
            if name in placements and not _holds(parameters, placements[name], tensor):
                missing.append(name)
        return missing

    def sample_tensors(self, placements: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
        """Return a sample of each served tensor, as JSON.

        See :class:`~jax_agent_rl.models.tensors.TensorSample`.

        Args:
            placements: as :meth:`weights_not_landed` takes them.
        """
        worker: Any = self
        parameters = _named_parameters(worker.model_runner.get_model())
        samples = {}
        for name, placement in placements.items():
            parameter_name, _, _, transposed, _ = placement
            served = _served_rows(parameters[parameter_name], placement)
            dtype = str(served.dtype).removeprefix("torch.")
            if transposed:
                served = served.T
            values = served.detach().float().cpu().numpy()
            samples[name] = replace(TensorSample.of(values), dtype=dtype).to_json()
        return samples


def _read_files(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, mapped from the file (shared memory: nothing is read twice)."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def _named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters by name, without what adapters insert into the names."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in model.named_parameters()}


def _served_rows(parameter: torch.Tensor, placement: Sequence[Any]) -> torch.Tensor:
    """Return the rows of a parameter that a placement describes, in vLLM's layout."""
    _, first, rows, _, expert = placement
    if expert is not None:
        parameter = parameter[expert]
    return parameter[first : first + rows]


def _holds(
    parameters: Mapping[str, torch.Tensor], placement: Sequence[Any], tensor: torch.Tensor
) -> bool:
    """Return whether the model has a tensor of the files where it should lie."""
    parameter_name, _, _, transposed, _ = placement
    if parameter_name not in parameters:
        return False
    served = _served_rows(parameters[parameter_name], placement)
    if transposed:
        tensor = tensor.T
    expected = tensor.to(dtype=served.dtype, device=served.device)
    return served.shape == expected.shape and bool(torch.equal(served, expected))


def _keep_weights_plain() -> None:
    """Keep vLLM from packing matrices for its CPU kernels, which drops the originals.

    Nothing could be copied into packed matrices. It has to happen before the model is built, and
    only in worker processes: therefore at import of this module.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUUnquantizedExperts,
    )

    def keep_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def keep_experts(self: Any, layer: Any) -> None:
        if str(layer.activation.value) != "silu" or hasattr(layer, "w13_bias"):
            raise RuntimeError(
                f"experts with {layer.activation} or a bias are unknown to gpu_backend/worker.py"
            )

    if not callable(getattr(utils, "dispatch_cpu_unquantized_gemm", None)):
        raise RuntimeError(
            "this vLLM packs CPU weights in a way gpu_backend/worker.py does not know"
        )
    utils.dispatch_cpu_unquantized_gemm = keep_linear
    kernel: Any = CPUUnquantizedExperts
    kernel.process_weights_after_loading = keep_experts
    kernel.apply = _apply_experts


def _apply_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **unused: Any,
) -> None:
    """Send each token through its experts, on plain matrices; one product per expert in use.

    Args:
        self: vLLM's kernel, whose method this becomes.
        output: [N, D], written.
        hidden_states: [N, D].
        w1: [E, 2F, D], gate above up.
        w2: [E, D, F].
        topk_weights: [N, k].
        topk_ids: [N, k].
        unused: other arguments of kernels, which the models in question leave at their defaults.
    """
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = torch.where(topk_ids == expert)
        gate, up = torch.nn.functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        down = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        output.index_add_(0, rows, down * topk_weights[rows, slots, None].to(down.dtype))


WeightTransferEngineFactory.register_engine(TRANSFER, InPlaceTransferEngine)
if current_platform.is_cpu():
    _keep_weights_plain()
