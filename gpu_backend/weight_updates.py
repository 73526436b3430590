"""New weights for a running engine, verified before any token is served from them.

::

    check files (names, shapes)      wrong: refused, the old weights serve on
      ─► load in place ─► read back every tensor
      ─► drop cached prefixes, recompute the KV of frozen requests
      ─► probe: the learner's log-probs of a few sequences, reproduced by the engine
                                     wrong after loading: the engine must not serve

vLLM's plugin for TPUs (tpu-inference 0.32) runs a model in one of two ways. In JAX, the parameters
are an ``nnx.State`` that every step takes as its first argument, so that a new state is new
weights; the model's own loader makes it from Hugging Face tensors. As vLLM's torch model, the
parameters were fused and laid out when they were loaded, and cannot be replaced. vLLM's own
interface for weight updates does nothing there (``TPUWorker.update_weights``): trainers are
expected to write into the state.

Imports no vLLM: workers import it, and so do tests without vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gpu_backend.settings import Platform, VllmSettings
from gpu_backend.weight_mapping import Checkpoint, Shapes, read_update
from jax_agent_rl.errors import WeightUpdateError
from jax_agent_rl.models.tensors import TensorSample
from jax_agent_rl.rollout.protocol import BROADCAST, CUDA_IPC, WeightUpdate
from jax_agent_rl.utils.weight_transfer import LogprobProbe, check_files

logger = logging.getLogger(__name__)
FILES = "safetensors"
_KINDS: Mapping[Platform, frozenset[str]] = {
    "cpu": frozenset({FILES, BROADCAST}),
    "cuda": frozenset({FILES, BROADCAST, CUDA_IPC}),
    "tpu": frozenset({FILES}),
    "other": frozenset({FILES, BROADCAST}),
}
"""Kinds of updates that an engine takes."""
_FIRST_IN_QUEUE = -(1 << 30)


class WeightUpdater:
    """Loads weights into one engine.

    Args:
        engine: ``AsyncLLM``.
        checkpoint: tensors of its model.
        platform: what it runs on; on TPUs only the probe shows what arrived.
        why_fixed: why its weights cannot be replaced; None if they can.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint: Checkpoint,
        settings: VllmSettings,
        platform: Platform,
        *,
        why_fixed: str | None = None,
    ) -> None:
        self.engine: Any = engine
        self._checkpoint = checkpoint
        self._settings = settings
        self._tolerances = settings.tolerances(platform)
        self._why_fixed = why_fixed
        self._is_tpu = platform == "tpu"

        self.kinds: frozenset[str] = frozenset()
        if why_fixed is None:
            self.kinds = _KINDS[platform]

        # Tensor-parallel ranks hold slices, so reading back complete tensors works on a single rank
        # only; and in JAX the parameters have other forms.
        self.placements: dict[str, tuple[Any, ...]] = {}
        if settings.tensor_parallel_size == 1 and not self._is_tpu:
            for name, placement in checkpoint.placements().items():
                self.placements[name] = tuple(placement)  # as it travels to the worker
        self.last_difference: tuple[float, float] | None = None
        """(largest, mean) log-prob difference of the last probe."""

    def check(self, update: WeightUpdate, *, served: int) -> LogprobProbe | None:
        """Refuse wrong updates before the model is touched; return the update's probe.

        Args:
            served: version of the weights that are served.

        Raises:
            WeightUpdateError: refused; nothing has changed.
        """
        if self._why_fixed is not None:
            raise WeightUpdateError(self._why_fixed)
        if update.kind not in self.kinds:
            raise WeightUpdateError(
                f"this vLLM backend takes weights of kind {sorted(self.kinds)}, got"
                f" kind={update.kind!r}"
            )
        if update.version <= served:
            raise WeightUpdateError(
                f"version {update.version} is not newer than {served}, which is served"
            )
        if update.partial and self._is_tpu:
            raise WeightUpdateError(
                "on TPUs vLLM takes whole updates only; send every tensor with partial=False"
            )

        shapes, probe = _shapes_and_probe(update)
        self._checkpoint.check(shapes, partial=update.partial)
        if probe is None:
            if self._settings.require_probe or self._is_tpu:
                raise WeightUpdateError(self._missing_probe())
            return None

        longest = max((len(ids) for ids in probe.ids), default=0)
        if longest >= self._settings.max_model_len:
            raise WeightUpdateError(
                f"the probe has a sequence of {longest} ids, which does not fit max_model_len="
                f"{self._settings.max_model_len}"
            )
        return probe

    def _missing_probe(self) -> str:
        message = (
            "the update brings no log-prob probe, so a wrong load could not be noticed; write"
            " it with jax_agent_rl.runtime.publishers.WeightFiles"
        )
        if self._settings.require_probe:
            message += ", or set rollout.vllm.require_probe=false"
        return message

    async def load(self, update: WeightUpdate) -> None:
        """Load the weights; tokens sampled from now on carry the new version.

        Raises:
            WeightUpdateError: they did not all arrive. The model is unusable until a whole update
                succeeds.
        """
        engine = self.engine  # closing forgets it, also in the middle of an update
        if update.kind == FILES:
            await self._load_files([str(path) for path in update.payload])
        elif update.kind == BROADCAST:
            await self._transfer({"broadcast": asdict(update.payload)})
        else:
            update_info, copies = await asyncio.to_thread(export_tensors, update.payload)
            await self._transfer(update_info)
            # Free the memory that was exported, and that neither side uses any more.
            del copies
            import torch

            torch.cuda.ipc_collect()

        # Frozen requests lose their KV as well: it is recomputed under the new weights when they
        # continue.
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.reset_encoder_cache()
        await engine.update_weight_version(str(update.version))

    async def _load_files(self, paths: Sequence[str]) -> None:
        """Load files, and read back every tensor where that is possible."""
        engine = self.engine
        if self._is_tpu:
            await engine.collective_rpc("replace_tpu_weights", args=(paths,))
        else:
            await self._transfer({"paths": paths})
        if not self.placements:
            return

        names_by_worker = await engine.collective_rpc(
            "weights_not_landed", args=(paths, self.placements)
        )
        missing: set[str] = set()
        missing.update(*names_by_worker)
        if missing:
            raise WeightUpdateError(
                f"{len(missing)} tensors did not arrive in vLLM's model, e.g."
                f" {sorted(missing)[:3]}: its loader skipped them or stores them in a way"
                " gpu_backend/weight_mapping.py does not describe"
            )

    async def _transfer(self, update_info: Mapping[str, Any]) -> None:
        """Run vLLM's calls of one update.

        If cancelled, they run to the end first: vLLM would refuse to start another update.
        """
        session = asyncio.ensure_future(_run_transfer(self.engine, update_info))
        try:
            await asyncio.shield(session)
        except asyncio.CancelledError:
            await asyncio.gather(session, return_exceptions=True)
            raise

    async def verify(self, probe: LogprobProbe, name: str) -> None:
        """Compare the engine's log-probs with the learner's. The engine must be running.

        Args:
            name: prefix of the probe's request ids.

        Raises:
            WeightUpdateError: they differ by more than rounding.
        """
        log_probs = []
        for number, ids in enumerate(probe.ids):
            log_probs.append(await self._measure(ids, f"{name}-{number}"))

        largest, mean = probe.differences(log_probs)
        self.last_difference = (largest, mean)
        max_largest, max_mean = self._tolerances
        is_close = largest <= max_largest and mean <= max_mean  # false if one is no number
        if not is_close:
            raise WeightUpdateError(
                f"the engine's log-probs are not the learner's: they differ by up to {largest:.2g}"
                f" (mean {mean:.2g}), allowed are {max_largest:.2g} ({max_mean:.2g};"
                " rollout.vllm.max_logprob_difference and mean_logprob_difference). The engine"
                " holds a model nobody asked for"
            )

    async def tensor_samples(self) -> Mapping[str, TensorSample]:
        """Return a sample of every served tensor; empty where complete tensors cannot be read."""
        if not self.placements:
            return {}
        (samples,) = await self.engine.collective_rpc("sample_tensors", args=(self.placements,))
        return {name: TensorSample.from_json(sample) for name, sample in samples.items()}

    async def _measure(self, ids: Sequence[int], request_id: str) -> list[float]:
        """Return the engine's log-probs of all ids but the first."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        prompt = {"prompt_token_ids": list(ids)}
        outputs = self.engine.generate(prompt, params, request_id, priority=_FIRST_IN_QUEUE)
        async for output in outputs:
            prompt_logprobs = output.prompt_logprobs

        log_probs = []
        for position in range(1, len(ids)):
            by_token = prompt_logprobs[position]
            log_probs.append(float(by_token[ids[position]].logprob))
        return log_probs


def _shapes_and_probe(update: WeightUpdate) -> tuple[Shapes, LogprobProbe | None]:
    """Return the shapes of an update's tensors, and its probe."""
    if update.kind == FILES:
        if isinstance(update.payload, str | bytes):
            raise WeightUpdateError(
                f"payload must be a list of file paths, got {type(update.payload).__name__}"
            )
        paths = [str(path) for path in update.payload]
        check_files(paths, update.digests)
        return read_update(paths)
    if update.kind == BROADCAST:
        return {name: shape for name, (_, shape) in update.payload.tensors.items()}, update.probe
    return {name: tuple(array.shape) for name, array in update.payload.items()}, update.probe


async def _run_transfer(engine: Any, update_info: Mapping[str, Any]) -> None:
    """Run vLLM's weight-transfer calls of one update.

    ``gpu_backend.worker.InPlaceTransferEngine`` serves them in the workers.
    """
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        WeightTransferInitRequest,
        WeightTransferUpdateRequest,
    )

    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info=dict(update_info)))
    await engine.finish_weight_update()


def export_tensors(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Make arrays of this process readable by processes of the same machine.

    Nothing is copied on the host. torch views the learner's jax arrays (DLPack) and copies them
    into memory of its own: only that can be exported.

    Args:
        arrays: on one GPU, by name; any that support DLPack.

    Returns:
        What the receiver needs (``InPlaceUpdateInfo``), and the copies, which must live until it
        has read them.
    """
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    device = torch.cuda.current_device()
    copies = {name: torch.from_dlpack(array).clone() for name, array in arrays.items()}
    torch.cuda.synchronize(device)
    handles = {}
    for name, copy in copies.items():
        _, rebuild_args = reduce_tensor(copy)
        handles[name] = plain_handle(rebuild_args)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"handles": handles, "device_uuid": uuid}, list(copies.values())


def plain_handle(rebuild_args: Sequence[Any]) -> list[Any]:
    """Return the arguments of ``rebuild_cuda_tensor`` as plain values.

    They reach a worker without pickle.

    Args:
        rebuild_args: class, size, stride, offset, storage class, dtype, device, and the arguments
            of the storage.
    """
    _, size, stride, offset, _, dtype, _, *storage = rebuild_args
    return [list(size), list(stride), offset, str(dtype).removeprefix("torch."), *storage]


# --- TPUs -----------------------------------------------------------------------------------------

IN_JAX = "Qwen2ForCausalLM, Qwen3ForCausalLM and LlamaForCausalLM"
"""Architectures of ``weight_mapping.FAMILIES`` that tpu-inference 0.32 has in JAX."""


async def ask_workers(engine: Any) -> str | None:
    """Return why this engine's (``AsyncLLM``) weights cannot be replaced; None if they can."""
    for reason in await engine.collective_rpc("why_not_replaceable"):
        if reason:
            logger.warning("weights cannot be updated: %s", reason)
            return reason
    return None


def why_not_replaceable(runner: Any) -> str | None:
    """Return why this ``TPUModelRunner``'s weights cannot be replaced; None if they can."""
    from flax import nnx

    if isinstance(runner.state, nnx.State):
        return None
    return (
        "on TPUs this model runs as vLLM's torch model, whose weights cannot be replaced; serve"
        f" one that tpu-inference has in JAX ({IN_JAX}) with MODEL_IMPL_TYPE=auto, or use"
        " rollout.backend=jetstream"
    )


def replace_weights(runner: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Replace the weights of a model that runs in JAX.

    Args:
        runner: the worker's ``TPUModelRunner``; nothing may be running.
        tensors: Hugging Face names and torch tensors, all of the model.

    Raises:
        RuntimeError: some did not arrive, or have another shape or dtype, for which programs would
            be recompiled. The model is unusable until a whole update succeeds.
    """
    import jax
    from flax import nnx

    reason = why_not_replaceable(runner)
    if reason is not None:
        raise RuntimeError(reason)
    model = runner.model
    old_structs = jax.tree.map(_as_struct, runner.state)

    # Else every old array stays until the last new one is there.
    runner.state = None
    runner.state_leaves = None
    try:
        with jax.set_mesh(runner.mesh):
            _load(runner, model, tensors)
    finally:
        _, runner.state = nnx.split(model)
        runner.refresh_state_leaves()

    old_forms = _forms(old_structs)
    new_forms = _forms(runner.state)
    changed = []
    for name in sorted(old_forms.keys() | new_forms.keys()):
        if old_forms.get(name) != new_forms.get(name):
            changed.append(name)
    if changed:
        name = changed[0]
        raise RuntimeError(
            f"{len(changed)} parameters have another form, e.g. {name}: {new_forms.get(name)}, was"
            f" {old_forms.get(name)}"
        )

    runner.state = jax.tree.map(
        lambda array, struct: jax.device_put(array, struct.sharding), runner.state, old_structs
    )
    runner.refresh_state_leaves()


def _load(runner: Any, model: Any, tensors: Iterator[tuple[str, Any]]) -> None:
    """Call the model's loader; the plugin has two kinds of loaders."""
    if any(cls.__name__ == "LoadableWithIterator" for cls in type(model).__mro__):
        model.load_weights(tensors)
        return

    # The older kind reads the folder it was started with, unless a stream is put here, as Run:ai's
    # streamer does.
    config = runner.vllm_config.model_config
    config.runai_model_weights_iterator = tensors
    try:
        model.load_weights(runner.rng_key)
    finally:
        del config.runai_model_weights_iterator


def _as_struct(array: Any) -> Any:
    import jax

    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _forms(state: Any) -> dict[str, tuple[Any, ...]]:
    """Return shape and dtype of every array, by its name."""
    import jax

    forms = {}
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        forms[jax.tree_util.keystr(path)] = (array.shape, str(array.dtype))
    return forms
