"""The part of weight updates that runs inside vLLM's worker processes.

vLLM imports this module in every worker before it builds the model, and mixes :class:`WeightExtension` into its worker
class; the backend calls the methods by name through ``collective_rpc``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from gpu_backend import tpu
from jax_agent_rl.models.tensor_samples import TensorSample


class WeightExtension:
    """Methods added to vLLM's worker. ``self`` is the worker."""

    def load_weight_files(self, paths: Sequence[str]) -> float:
        """Copies tensors into the served model in place; returns seconds.

        The model's own loader does the fusing and slicing; a name it does not know raises. ``reload_weights`` would
        leave a tied output matrix stale and spoil the model when only some tensors are named.
        """
        begin = time.perf_counter()
        worker: Any = self
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            if current_platform.is_tpu():
                tpu.replace_weights(worker.model_runner, _tensors(paths))
            else:
                worker.model_runner.get_model().load_weights(_tensors(paths))
        worker.synchronize_device()
        return time.perf_counter() - begin

    def why_not_replaceable(self) -> str | None:
        """Why this TPU worker's weights cannot be replaced; None if they can."""
        worker: Any = self
        return tpu.why_not_replaceable(worker.model_runner)

    def weights_not_landed(self, paths: Sequence[str], placements: Mapping[str, Sequence[Any]]) -> list[str]:
        """Names of tensors whose place in the model does not hold what the files hold.

        Args:
            paths: the files that were loaded.
            placements: tensor name to (parameter, first row, rows, transposed, expert or None).
        """
        worker: Any = self
        parameters = _plain_names(worker.model_runner.get_model())
        return [
            name
            for name, tensor in _tensors(paths)
            if name in placements and not _holds(parameters, placements[name], tensor)
        ]

    def sample_tensors(self, placements: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
        """A :class:`~jax_agent_rl.models.tensor_samples.TensorSample` of each tensor as it is served, as JSON.

        Args:
            placements: as :meth:`weights_not_landed` takes them.
        """
        worker: Any = self
        parameters = _plain_names(worker.model_runner.get_model())
        samples = {}
        for name, (parameter, first, rows, transposed, expert) in placements.items():
            whole = parameters[parameter] if expert is None else parameters[parameter][expert]
            served = whole[first : first + rows]
            dtype = str(served.dtype).removeprefix("torch.")
            wide = (served.T if transposed else served).detach().float().cpu().numpy()
            samples[name] = replace(TensorSample.of(wide), dtype=dtype).to_json()
        return samples


def _tensors(paths: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, mapped from the file (shared memory: nothing is read twice)."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def _plain_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters; adapters wrap layers and rename them."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in model.named_parameters()}


def _holds(parameters: Mapping[str, torch.Tensor], place: Sequence[Any], tensor: torch.Tensor) -> bool:
    name, first, rows, transposed, expert = place
    if name not in parameters:
        return False
    parameter = parameters[name] if expert is None else parameters[name][expert]
    served = parameter[first : first + rows]
    expected = (tensor.T if transposed else tensor).to(dtype=served.dtype, device=served.device)
    return served.shape == expected.shape and bool(torch.equal(served, expected))


def _keep_weights_plain() -> None:
    """On CPUs vLLM packs matrices for its kernels while loading and drops the originals.

    Nothing could be copied into them afterwards, so layers keep their matrices as they are. It has to happen before
    the model is built, and only in worker processes: therefore at import, and nowhere else.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def plain_experts(self: Any, layer: Any) -> None:
        if str(layer.activation.value) != "silu" or hasattr(layer, "w13_bias"):
            raise RuntimeError(f"experts with {layer.activation} or a bias are unknown to gpu_backend/worker.py")

    if not callable(getattr(utils, "dispatch_cpu_unquantized_gemm", None)):
        raise RuntimeError("this vLLM packs CPU weights in a way gpu_backend/worker.py does not know")
    utils.dispatch_cpu_unquantized_gemm = plain
    kernel: Any = CPUUnquantizedExperts
    kernel.process_weights_after_loading = plain_experts
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
    """Each token through its experts, on plain matrices; one product per expert that any token goes to.

    Args:
        output: [N, D], written.
        hidden_states: [N, D].
        w1: [E, 2F, D], gate above up.
        w2: [E, D, F].
        topk_weights, topk_ids: [N, k].
        unused: what else vLLM hands its kernels; the models in question leave it at its defaults.
    """
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = torch.where(topk_ids == expert)
        gate, up = torch.nn.functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        down = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        output.index_add_(0, rows, down * topk_weights[rows, slots, None].to(down.dtype))


if current_platform.is_cpu():
    _keep_weights_plain()
